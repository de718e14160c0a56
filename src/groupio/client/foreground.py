"""Intervals in which the job communicates and storage has to give way; see ``Client.foreground``.

Beginning and ending one costs the caller a small message to the agent of its node, no answer.
While a rank itself waits for the agent to bring what it loads, its intervals do not count: it
would wait for what it holds back.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakSet

from groupio.client import nesting
from groupio.errors import GroupIOError, InvalidInput
from groupio.protocol import messages as msg

if TYPE_CHECKING:
    from groupio.client.connection import Connection

log = logging.getLogger("groupio.client")


class _Process:
    """The intervals of all clients of this process, and how many of its threads load."""

    def __init__(self) -> None:
        # Reentrant: a nested call may come while its thread changes a number here.
        self.lock = threading.RLock()
        self.intervals: WeakSet[Intervals] = WeakSet()
        self.loading = 0


class Intervals:
    """The intervals of one client that are open; they may nest and overlap. Thread-safe."""

    def __init__(self, connections: Callable[[], list[Connection]]) -> None:
        """``connections`` are those to agents that work for this client."""
        self._connections = connections
        self._lock = threading.Lock()
        self._shares: list[float] = []
        self._told: float | None = None
        with _process.lock:
            _process.intervals.add(self)

    @contextmanager
    @nesting.call
    def interval(self, share: float) -> Iterator[None]:
        """Within it storage keeps to ``share``, or less where another interval says so."""
        tell_again = self.tell_again
        if nesting.is_nested():
            tell_again = partial(nesting.start, tell_again)
        self._shares.append(share)
        tell_again()
        try:
            yield
        finally:
            self._shares.remove(share)
            tell_again()

    @nesting.call
    def greet(self, connection: Connection) -> None:
        """Tell an agent that is new to this client of an interval that is open."""
        with self._lock:
            if self._told is not None:
                tell([connection], msg.Foreground(self._told), "a foreground interval")

    @nesting.call
    def tell_again(self) -> None:
        """Whether intervals count may have changed."""
        with self._lock:
            self._tell()

    def _tell(self) -> None:
        share = None if _process.loading else min(self._shares, default=None)
        if share != self._told:
            self._told = share
            # Without its agent nothing moves that would have to give way.
            tell(self._connections(), msg.Foreground(share), "a foreground interval")


def tell(connections: Iterable[Connection], message: msg.ToAgent, what: str) -> None:
    """Send ``message`` to the agents that still work for this client; ``what`` is for the log."""
    for connection in connections:
        if connection.is_usable:
            try:
                connection.send(message)
            except GroupIOError as error:
                log.info("the agent was not told of %s: %s", what, error.message)


@contextmanager
def set_aside() -> Iterator[None]:
    """Within it the intervals of this process do not count: it waits for storage itself."""
    _change(1)
    try:
        yield
    finally:
        _change(-1)


def _change(more: int) -> None:
    with _process.lock:
        before = _process.loading
        _process.loading += more
        changed = (before > 0) != (_process.loading > 0)
        found = list(_process.intervals) if changed else []
    for intervals in found:
        intervals.tell_again()


def _after_fork_in_child() -> None:
    """The clients and threads of the parent are not here."""
    global _process
    _process = _Process()


_process = _Process()
os.register_at_fork(after_in_child=_after_fork_in_child)


def check_share(share: object) -> float:
    """``share`` as a number from 0 to 1. InvalidInput for anything else."""
    good = isinstance(share, int | float) and not isinstance(share, bool) and 0 <= share <= 1
    if not good:
        raise InvalidInput(f"share={share!r} is no number from 0 (pause) to 1 (all)")
    assert isinstance(share, int | float)
    return float(share)
