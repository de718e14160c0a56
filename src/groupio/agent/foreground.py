"""Storage gives way while the job communicates: the intervals that ranks mark, and the brake.

A rank says when an interval begins and ends. While any rank of the node is in one, what this
agent moves for storage (writes to the store, transfers between nodes) keeps to the lowest share
that was asked for. Bytes that the system or a device has taken already still move.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

FOREGROUND_MAX_S = 10.0
"""After so many seconds without a gap storage goes on at full speed, until no rank is in an
interval: intervals slow it down, but cannot starve it."""

_RECHECK_S = 60.0


class Brake:
    """Keeps the threads that write to a share of their time. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._share = 1.0
        self._rests = threading.local()

    def set(self, share: float) -> None:
        """From now on use ``share`` of the time: 0 pauses, 1 is all of it."""
        with self._changed:
            self._share = share
            self._changed.notify_all()

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Around a piece of work that moves bytes; waits first, as long as the share asks."""
        if self._share < 1.0:
            self._wait(getattr(self._rests, "spent_until", None))
        began = self._clock()
        try:
            yield
        finally:
            self._rests.spent_until = (self._clock() - began, self._clock())

    def _wait(self, last: tuple[float, float] | None) -> None:
        """Rest after the last piece of this thread: how long it took, and when it ended."""
        took, ended = last or (0.0, 0.0)
        with self._changed:
            while (share := self._share) < 1.0:
                left = _RECHECK_S
                if share > 0:
                    left = ended + took * (1 / share - 1) - self._clock()
                if left <= 0:
                    return
                self._changed.wait(left)


class Foreground:
    """Which clients are in an interval, and what share that leaves. Runs in the event loop.

    ``apply`` gets the share (0 to 1) whenever it changes; ``later`` calls back after so many
    seconds.
    """

    def __init__(
        self,
        apply: Callable[[float], None],
        later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        self._apply = apply
        self._later = later
        self._shares: dict[str, float] = {}
        self._period = 0
        """Counts the times in which there was an interval without a gap."""
        self._lifted = False
        self.share = 1.0

    def enter(self, client: str, share: float) -> None:
        """The client is in an interval with this share, or in another one than before."""
        if not self._shares:
            self._period += 1
            period = self._period
            self._later(FOREGROUND_MAX_S, lambda: self._lift(period))
        self._shares[client] = share
        self._set()

    def leave(self, client: str) -> None:
        """The client is in no interval, or is gone."""
        if self._shares.pop(client, None) is None:
            return
        if not self._shares:
            self._lifted = False
        self._set()

    def _lift(self, period: int) -> None:
        if period == self._period and self._shares:
            log.warning(
                "ranks have marked foreground intervals for %.0f s without a gap; storage goes on "
                "at full speed until there is one",
                FOREGROUND_MAX_S,
            )
            self._lifted = True
            self._set()

    def _set(self) -> None:
        share = 1.0 if self._lifted else min(self._shares.values(), default=1.0)
        if share != self.share:
            self.share = share
            self._apply(share)
