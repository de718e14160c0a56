"""One client per store and place, made at the first call and kept for the next ones."""

from __future__ import annotations

import os
import threading
from typing import Any

import groupio
from groupio.errors import InvalidInput
from groupio.torch.members import Members

_lock = threading.Lock()
_clients: dict[tuple[str, int, int, int], groupio.Client] = {}


def client_for(store: Any, members: Members) -> groupio.Client:
    """The client of this process for ``store``; a forked child makes its own.

    InvalidInput when ``store`` is no path or URL, or a checkpoint of another kind.
    """
    text = os.fspath(store)
    # A relative path means another store after a change of directory.
    where = text if "://" in text else os.path.abspath(text)
    _check_store(where.removeprefix("file://"))
    key = (where, members.rank, members.world_size, os.getpid())
    with _lock:
        client = _clients.get(key)
        if client is None:
            client = groupio.connect(where, rank=members.rank, world_size=members.world_size)
            _clients[key] = client
        return client


def _check_store(path: str) -> None:
    if not os.path.isfile(os.path.join(path, ".metadata")):
        return
    folder, step = os.path.split(path)
    store, kind = os.path.split(folder)
    if kind == "dcp" and os.path.isdir(os.path.join(store, "epochs")):
        raise InvalidInput(
            f"{path} is a view of one epoch of a store; give {store} and step={step}"
        )
    raise InvalidInput(
        f"{path} is a checkpoint of torch.distributed.checkpoint, not a store of groupio; to "
        "import it load it with torch.distributed.checkpoint.load, then save the state dict with "
        "groupio.torch.save into another directory"
    )


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
