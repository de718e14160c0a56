"""One client per store and place, made at the first call and kept for the next ones."""

from __future__ import annotations

import os
from typing import Any

import groupio
from groupio.client.address import refuse_checkpoint
from groupio.client.agent_read import AgentRead, through_agent
from groupio.client.ahead import connect_ahead
from groupio.client.client import connect_now, unconnected
from groupio.controller.discover import Kind, find_controller
from groupio.errors import InvalidInput
from groupio.settings import Settings
from groupio.torch.members import Members

_clients: dict[tuple[str, int, int, int], groupio.Client] = {}


def client_for(store: Any, members: Members, *, connected: bool = True) -> groupio.Client:
    """The client of this process for ``store``; a forked child makes its own.

    Without ``connected`` a new one connects in the background, so that a load does not wait for
    the start of an agent that only a save needs.

    InvalidInput when ``store`` is no path or URL, or a checkpoint of another kind.
    """
    text = store if isinstance(store, str) else _text(store)
    # A relative path means another store after a change of directory.
    where = text if "://" in text else os.path.abspath(text)
    refuse_checkpoint(where.removeprefix("file://"))
    key = (where, members.rank, members.world_size, os.getpid())
    client = _clients.get(key)
    if client is None:
        # No lock: a signal handler may come, and save, at any time in here.
        made = unconnected(where, rank=members.rank, world_size=members.world_size)
        client = _clients.setdefault(key, made)
        if client is not made:
            made.close()
        elif connected:
            _connect(key, made)
        else:
            connect_ahead(made)
    return client


def _connect(key: tuple[str, int, int, int], client: groupio.Client) -> None:
    try:
        connect_now(client)
    except InvalidInput:
        _clients.pop(key, None)
        raise


def agent_read(store: Any, members: Members) -> AgentRead | None:
    """The way of reading through the node's agent, where the job spans nodes; else None."""
    if find_controller(Settings.from_env().controller, os.environ).kind is Kind.LOCAL:
        return None
    return through_agent(client_for(store, members, connected=False))


def open_clients() -> list[groupio.Client]:
    """The clients of this process."""
    return [client for key, client in list(_clients.items()) if key[3] == os.getpid()]


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
    pid = os.getpid()
    for key in list(_clients):
        client = _clients.pop(key, None) if key[3] == pid else None
        if client is not None:
            client.close()
