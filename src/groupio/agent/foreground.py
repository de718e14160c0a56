"""Storage gives way while the job communicates: the intervals that ranks mark.

A rank says when an interval begins and ends. While any rank of the node is in one, what this
agent moves for storage (to and from stores, :mod:`groupio.agent.uplink`, and between nodes,
:mod:`groupio.fabric.pacing`) keeps to the lowest share that was asked for. Bytes that the system
or a device has taken already still move.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

FOREGROUND_MAX_S = 10.0
"""After so many seconds in intervals storage goes on at full speed, until no rank is in one:
intervals slow it down, but cannot starve it."""

GAP_PART = 0.1
"""Gaps count: where they make up this part of the time, storage is not let go on for that."""

_EPSILON_S = 1e-3


class Foreground:
    """Which clients are in an interval, and what share that leaves. Runs in the event loop.

    ``apply`` gets the share (0 to 1) whenever it changes; ``later`` calls back after so many
    seconds.
    """

    def __init__(
        self,
        apply: Callable[[float], None],
        later: Callable[[float, Callable[[], None]], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._apply = apply
        self._later = later
        self._clock = clock
        self._shares: dict[str, float] = {}
        self._period = 0
        """Counts the times in which there was an interval without a gap."""
        self._held_s = 0.0
        """Seconds that storage gave way, less what gaps made good."""
        self._counted_at = clock()
        self._lifted = False
        self.share = 1.0

    def enter(self, client: str, share: float) -> None:
        """The client is in an interval with this share, or in another one than before."""
        self._count()
        begins = not self._shares
        self._shares[client] = share
        self._set()
        if begins:
            self._period += 1
            self._look_later()

    def leave(self, client: str) -> None:
        """The client is in no interval, or is gone."""
        if client not in self._shares:
            return
        self._count()
        del self._shares[client]
        if not self._shares:
            self._lifted = False
        self._set()

    def _count(self) -> None:
        """Account for the time since this was called last, in which the share was the same."""
        now = self._clock()
        seconds, self._counted_at = now - self._counted_at, now
        if self.share >= 1:
            seconds *= 1 - 1 / GAP_PART
        self._held_s = min(max(self._held_s + seconds, 0.0), FOREGROUND_MAX_S)

    def _look_later(self) -> None:
        period = self._period
        self._later(max(FOREGROUND_MAX_S - self._held_s, 0.0), lambda: self._look(period))

    def _look(self, period: int) -> None:
        """Let storage go on when it has given way for long enough in this period."""
        if period != self._period or not self._shares or self._lifted:
            return
        self._count()
        if FOREGROUND_MAX_S - self._held_s > _EPSILON_S:
            self._look_later()  # there was a time in which it was not held
            return
        log.warning(
            "ranks have marked foreground intervals for %.0f s with hardly a gap; storage goes on "
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
