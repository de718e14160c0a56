"""One client per store and place, made at the first call and kept for the next ones."""

from __future__ import annotations

import os
import threading
from typing import Any

import groupio
from groupio.client.address import refuse_checkpoint
from groupio.client.agent_read import AgentRead, through_agent
from groupio.client.ahead import connect_ahead
from groupio.controller.discover import Kind, find_controller
from groupio.errors import InvalidInput
from groupio.model import DecisionKey
from groupio.settings import Settings
from groupio.torch.members import Members

_lock = threading.Lock()
_Key = tuple[str, int, int, int]
_clients: dict[_Key, groupio.Client] = {}
_loaded: dict[_Key, DecisionKey | None] = {}
"""What was loaded by those who had no client then."""


def client_for(store: Any, members: Members, *, connected: bool = True) -> groupio.Client:
    """The client of this process for ``store``; a forked child makes its own.

    Without ``connected`` a new one connects in the background, so that a load does not wait for
    the start of an agent that only a save needs.

    InvalidInput when ``store`` is no path or URL, or a checkpoint of another kind.
    """
    key = _key(store, members)
    refuse_checkpoint(key[0].removeprefix("file://"))
    with _lock:
        client = _clients.get(key)
        if client is None:
            connect = groupio.connect if connected else connect_ahead
            client = connect(key[0], rank=members.rank, world_size=members.world_size)
            client._origin.loaded(_loaded.pop(key, None))
            _clients[key] = client
        return client


def note_loaded(store: Any, members: Members, loaded: DecisionKey | None) -> None:
    """An epoch was loaded: by its number, or (None) as the latest one."""
    key = _key(store, members)
    with _lock:
        if key in _clients:
            _clients[key]._origin.loaded(loaded)
        else:
            _loaded[key] = loaded


def _key(store: Any, members: Members) -> _Key:
    text = store if isinstance(store, str) else _text(store)
    # A relative path means another store after a change of directory.
    where = text if "://" in text else os.path.abspath(text)
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


def _text(store: Any) -> str:
    try:
        text = os.fspath(store)
    except TypeError:
        text = None
    if not isinstance(text, str):
        raise InvalidInput(
            f"the store is of type {type(store).__name__}; give a path or a file:// URL"
        )
    return text


def close() -> None:
    """Close the clients of this process: waits, bounded, for its saves to become durable.

    The end of the interpreter does the same. A later save or load connects anew.
    """
    with _lock:
        pid = os.getpid()
        own = [key for key in _clients if key[3] == pid]
        clients = [_clients.pop(key) for key in own]
    for client in clients:
        client.close()


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)
