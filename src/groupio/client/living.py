"""Clients that were not closed: the end of the process closes them, a fork abandons them.

The children of multiprocessing end with ``os._exit``: before Python 3.13 none of them runs the
interpreter's exit handlers. They run the finalizers of multiprocessing instead.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from groupio.client.client import Client

_clients: dict[int, Client] = {}
_finalized_pid = 0
"""The process for which multiprocessing was asked to close the clients."""


def add(client: Client) -> None:
    """The client is in use."""
    _clients[id(client)] = client
    _finalize_child()


def remove(client: Client) -> None:
    """The client was closed."""
    _clients.pop(id(client), None)


def _finalize_child() -> None:
    """In a child of multiprocessing, close the clients at its end."""
    global _finalized_pid
    process = sys.modules.get("multiprocessing.process")
    if process is None or process.parent_process() is None or _finalized_pid == os.getpid():
        return
    from multiprocessing import util

    # Before the child ends or joins children of its own: those may run on without it.
    util.Finalize(None, close_all, exitpriority=0)
    _finalized_pid = os.getpid()


def close_all() -> None:
    """Close the clients of this process that are still open."""
    _for_each(lambda client: client.close())


def _for_each(call: Callable[[Client], None]) -> None:
    for client in list(_clients.values()):
        call(client)


def _after_fork_in_child() -> None:
    _for_each(lambda client: client._abandon_in_child())
    _clients.clear()


atexit.register(close_all)
os.register_at_fork(after_in_child=_after_fork_in_child)
