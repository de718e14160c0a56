"""Memory that an epoch took for a while goes back to the system.

What a report, a plan or an index takes for a moment is freed in pieces, and the C library keeps
the pages for the next time: tens to hundreds of MB that the job's own processes cannot have. The
next time is minutes away, so they are given back, but not while saves follow each other.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

REST_S = 5.0
"""So long no group may have ended before memory is given back: it takes up to 50 ms."""


def give_back() -> None:
    """Return freed memory to the system; no effect with a C library that cannot. Any thread."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class Rest:
    """Says when to give memory back: once, REST_S seconds after the last of some groups ended."""

    def __init__(
        self, submit: Callable[[Callable[[], None]], None], now: Callable[[], float]
    ) -> None:
        """``submit`` runs a task in another thread; ``now`` tells the time in seconds."""
        self._submit = submit
        self._now = now
        self._due: float | None = None

    def group_over(self) -> None:
        """A group of this node ended."""
        self._due = self._now() + REST_S

    def look(self) -> None:
        """To be called every now and then."""
        if self._due is not None and self._now() >= self._due:
            self._due = None
            self._submit(give_back)
