"""Clients that were not closed: the interpreter's exit closes them, a fork abandons them."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from groupio.client.client import Client

_clients: dict[int, Client] = {}


def add(client: Client) -> None:
    """The client is in use."""
    _clients[id(client)] = client


def remove(client: Client) -> None:
    """The client was closed."""
    _clients.pop(id(client), None)


def _for_each(call: Callable[[Client], None]) -> None:
    for client in list(_clients.values()):
        call(client)


def _after_fork_in_child() -> None:
    _for_each(lambda client: client._abandon_in_child())
    _clients.clear()


atexit.register(_for_each, lambda client: client.close())
os.register_at_fork(after_in_child=_after_fork_in_child)
