"""One client per store, place and launch, made at the first call and kept for the next ones.

A job that saves each of its checkpoints into a store of its own would gather clients, so only those
of the last few stores keep their connection to the agent, and the agent their stores open.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import groupio
from groupio.client import nesting
from groupio.client.address import refuse_checkpoint, store_address
from groupio.client.agent_read import AgentRead, through_agent
from groupio.client.ahead import connect_ahead
from groupio.client.client import connected as connect_now
from groupio.client.client import unconnected
from groupio.client.handle import SaveHandle
from groupio.client.lineage import Origin
from groupio.client.store_parts import PartStore
from groupio.controller.discover import Kind, find_controller
from groupio.errors import InvalidInput, LateMember
from groupio.model import DecisionKey
from groupio.settings import Settings
from groupio.torch.members import Members, is_living, leave

# A signal handler may come, and save, anywhere in here: the lock is reentrant, what it protects
# is sound between any two operations, and nothing waits or connects with it held.
_lock = threading.RLock()


class _Place(NamedTuple):
    where: str
    rank: int
    world_size: int
    pid: int


class _Key(NamedTuple):
    place: _Place
    launch_id: str | None


@dataclass
class _Entry:
    client: groupio.Client
    has_saved: bool = False


_clients: OrderedDict[_Key, _Entry] = OrderedDict()
"""Those used last at the end."""

_origins: OrderedDict[_Place, Origin] = OrderedDict()
"""What was loaded and is not saved after yet, of the clients of each place; the last used ones."""

STORES_KEPT = 4
"""Clients of so many stores stay connected when they have nothing to do."""

ORIGINS_KEPT = 64
"""For so many places it is remembered what was loaded."""


def client_for(
    store: Any, members: Members, *, connected: bool = True, saves: bool = False
) -> groupio.Client:
    """The client of this process for ``store``; a forked child makes its own.

    Without ``connected`` a new one connects in the background, so that a load does not wait for
    the start of an agent that only a save needs. ``saves``: it is going to save, so clients of
    earlier sets of members are over for this store.

    InvalidInput when ``store`` is no path or URL, or a checkpoint of another kind.
    """
    place = _place(store, members)
    refuse_checkpoint(place.where)
    key = _Key(place, members.launch_id)
    with _lock:
        made, entry = None, _clients.get(key)
        if entry is None:
            client = unconnected(
                place.where,
                job=store.job if isinstance(store, PartStore) else None,
                rank=place.rank,
                world_size=place.world_size,
                launch_id=key.launch_id,
            )
            made = _Entry(client)
            entry = _clients.setdefault(key, made)
        entry.has_saved |= saves
        entry.client._origin = _origin(place)
        with suppress(KeyError):
            _clients.move_to_end(key)
    if made is not None and entry is made:
        _connect(key, made, connected)
    elif made is not None:
        made.client.close()
    if not nesting.is_nested():
        _leave_unused(key if saves else None)
    return entry.client


def _connect(key: _Key, entry: _Entry, connected: bool) -> None:
    try:
        (connect_now if connected else connect_ahead)(entry.client)
    except InvalidInput:
        with _lock:
            if _clients.get(key) is entry:
                del _clients[key]
        raise


def _leave_unused(saving: _Key | None) -> None:
    """Let go of clients that have nothing to do: of the stores that were not used for longest, and
    of earlier launches that the one of ``saving`` replaces in its store.

    What those still have in flight keeps its handles and is decided without them.
    """
    with _lock:
        own = [key for key in list(_clients) if key.place.pid == os.getpid()]
        unused = set(own[:-STORES_KEPT])
        for key in own:
            if saving is None or key.launch_id == saving.launch_id or key not in _clients:
                continue
            if key.place.where != saving.place.where:
                continue
            if _clients[key].has_saved and key.launch_id is not None:
                leave(key.launch_id)
            if _clients[key].has_saved or not is_living(key.launch_id):
                unused.add(key)
        found = {key: _clients.get(key) for key in own if key in unused}
        entries = {key: entry for key, entry in found.items() if entry is not None}
    for key, entry in entries.items():
        if entry.client._leave_if_idle():
            with _lock:
                if _clients.get(key) is entry:
                    del _clients[key]


def save_as(store: Any, members: Members, items: Mapping[str, Any], **how: Any) -> SaveHandle:
    """Save as a member of a group: ``Client._save`` with the keywords ``how``."""
    handle = client_for(store, members, saves=True)._save(items, **how)
    launch_id = members.launch_id
    if members.group is not None and launch_id is not None:

        def done(handle: SaveHandle) -> None:
            if isinstance(handle._error, LateMember):
                leave(launch_id, refused=True)

        handle.add_done_callback("durable", done)
    return handle


def check_store(store: Any) -> None:
    """InvalidInput when ``store`` is no path or URL, or a checkpoint of another kind."""
    refuse_checkpoint(_where(store))


def note_loaded(store: Any, members: Members, loaded: DecisionKey | None) -> None:
    """An epoch was loaded: by its number, or (None) as the latest one."""
    with _lock:
        _origin(_place(store, members)).loaded(loaded)


def _origin(place: _Place) -> Origin:
    """What was loaded is known to all clients of the place, and to those that are still to come."""
    origin = _origins.setdefault(place, Origin())
    with suppress(KeyError):
        _origins.move_to_end(place)
        if len(_origins) > ORIGINS_KEPT:
            _origins.popitem(last=False)
    return origin


def _place(store: Any, members: Members) -> _Place:
    return _Place(_where(store), members.rank, members.world_size, os.getpid())


def _where(store: Any) -> str:
    # A call means what its path leads to now, from this directory and through links, whether it
    # saves or loads.
    return os.path.realpath(store_address(store))


def agent_read(store: Any, members: Members) -> AgentRead | None:
    """The way of reading through the node's agent, where the job spans nodes; else None."""
    if find_controller(Settings.from_env().controller, os.environ).kind is Kind.LOCAL:
        return None
    return through_agent(client_for(store, members, connected=False))


def open_clients() -> list[groupio.Client]:
    """The clients of this process."""
    with _lock:
        entries = list(_clients.items())
        return [entry.client for key, entry in entries if key.place.pid == os.getpid()]


def close() -> None:
    """Close the clients of this process: waits, bounded, for its saves to become durable.

    The end of the interpreter does the same. A later save or load connects anew.
    """
    with _lock:
        pid = os.getpid()
        own = [(k, e.client) for k, e in list(_clients.items()) if k.place.pid == pid]
        for key, _ in own:
            _clients.pop(key, None)
    clients = [client for _, client in own]
    for client in clients:
        client.close()


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork_in_child)
