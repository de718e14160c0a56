"""Intervals in which the job communicates and storage has to give way; see ``Client.foreground``.

Beginning and ending one costs the caller a small message to the agent of its node, no answer.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from groupio.client.connection import Connection
from groupio.errors import GroupIOError, InvalidInput
from groupio.protocol import messages as msg

log = logging.getLogger("groupio.client")


class Intervals:
    """The intervals of one client that are open; they may nest and overlap. Thread-safe."""

    def __init__(self, connections: Callable[[], list[Connection]]) -> None:
        """``connections`` are those to agents that work for this client."""
        self._connections = connections
        self._lock = threading.Lock()
        self._shares: list[float] = []
        self._told: float | None = None

    @contextmanager
    def interval(self, share: float) -> Iterator[None]:
        """Within it storage keeps to ``share``, or less where another interval says so."""
        with self._lock:
            self._shares.append(share)
            self._tell()
        try:
            yield
        finally:
            with self._lock:
                self._shares.remove(share)
                self._tell()

    def _tell(self) -> None:
        share = min(self._shares, default=None)
        if share == self._told:
            return
        self._told = share
        for connection in self._connections():
            if connection.is_usable:
                try:
                    connection.send(msg.Foreground(share))
                except GroupIOError as error:
                    # Without its agent nothing moves that would have to give way.
                    log.info("the agent was not told of a foreground interval: %s", error.message)


def check_share(share: object) -> float:
    """``share`` as a number from 0 to 1. InvalidInput for anything else."""
    good = isinstance(share, int | float) and not isinstance(share, bool) and 0 <= share <= 1
    if not good:
        raise InvalidInput(f"share={share!r} is no number from 0 (pause) to 1 (all)")
    assert isinstance(share, int | float)
    return float(share)
