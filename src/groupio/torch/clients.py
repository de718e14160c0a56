"""One client per store and place, made at the first call and kept for the next ones.

A job that saves each of its checkpoints into a store of its own would gather clients, so only those
of the last few stores keep their connection to the agent, and the agent their stores open.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import groupio
from groupio.client.address import refuse_checkpoint, store_address
from groupio.client.agent_read import AgentRead, through_agent
from groupio.client.ahead import connect_ahead
from groupio.client.lineage import Origin
from groupio.client.store_parts import PartStore
from groupio.controller.discover import Kind, find_controller
from groupio.model import DecisionKey
from groupio.settings import Settings
from groupio.torch.members import Members

_lock = threading.Lock()
_Key = tuple[str, int, int, int]
_clients: dict[_Key, groupio.Client] = {}
"""Those used last at the end."""

_origins: dict[_Key, Origin] = {}
"""What was loaded, and is not saved after yet, by clients that are closed or were not made yet."""

STORES_KEPT = 4
"""Clients of so many stores stay connected when they have nothing to do."""

ORIGINS_KEPT = 64
"""For so many stores it is remembered what was loaded, those used last."""


def client_for(store: Any, members: Members, *, connected: bool = True) -> groupio.Client:
    """The client of this process for ``store``; a forked child makes its own.

    Without ``connected`` a new one connects in the background, so that a load does not wait for
    the start of an agent that only a save needs.

    InvalidInput when ``store`` is no path or URL, or a checkpoint of another kind.
    """
    key = _key(store, members)
    refuse_checkpoint(key[0])
    with _lock:
        client = _clients.pop(key, None)
        if client is None:
            connect = groupio.connect if connected else connect_ahead
            job = store.job if isinstance(store, PartStore) else None
            client = connect(key[0], job=job, rank=members.rank, world_size=members.world_size)
            client._origin = _origins.pop(key, client._origin)
        _clients[key] = client
    _leave_unused()
    return client


def _leave_unused() -> None:
    """Let go of the clients that were not used for longest and have nothing to do."""
    with _lock:
        own = [key for key in _clients if key[3] == os.getpid()]
        unused = [(key, _clients[key]) for key in own[:-STORES_KEPT]]
    for key, client in unused:
        if client._leave_if_idle():
            with _lock:
                if _clients.get(key) is client:
                    del _clients[key]
                    _keep(key, client._origin)


def _keep(key: _Key, origin: Origin) -> None:
    """The next client for the same place goes on after what this one loaded."""
    _origins.pop(key, None)
    if origin.now() is not None:
        _origins[key] = origin
    if len(_origins) > ORIGINS_KEPT:
        del _origins[next(iter(_origins))]


def note_loaded(store: Any, members: Members, loaded: DecisionKey | None) -> None:
    """An epoch was loaded: by its number, or (None) as the latest one."""
    key = _key(store, members)
    with _lock:
        if key in _clients:
            _clients[key]._origin.loaded(loaded)
        else:
            origin = Origin()
            origin.loaded(loaded)
            _keep(key, origin)


def _key(store: Any, members: Members) -> _Key:
    # A call means what its path leads to now, from this directory and through links, whether it
    # saves or loads.
    where = os.path.realpath(store_address(store))
    return where, members.rank, members.world_size, os.getpid()


def agent_read(store: Any, members: Members) -> AgentRead | None:
    """The way of reading through the node's agent, where the job spans nodes; else None."""
    if find_controller(Settings.from_env().controller, os.environ).kind is Kind.LOCAL:
        return None
    return through_agent(client_for(store, members, connected=False))


def open_clients() -> list[groupio.Client]:
    """The clients of this process."""
    with _lock:
        return [client for key, client in _clients.items() if key[3] == os.getpid()]


def close() -> None:
    """Close the clients of this process: waits, bounded, for its saves to become durable.

    The end of the interpreter does the same. A later save or load connects anew.
    """
    with _lock:
        pid = os.getpid()
        own = [key for key in _clients if key[3] == pid]
        clients = [_clients.pop(key) for key in own]
        for key, client in zip(own, clients, strict=True):
            _keep(key, client._origin)
    for client in clients:
        client.close()


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)
