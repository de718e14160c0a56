"""Limits the bytes between a node and its stores: a stated rate and a duty cycle.

What the agent writes into segments, and reads out of them for grouped loads, keeps to the rate
that the settings state, each way, of all jobs together. While ranks are in foreground intervals
it keeps to their share of that. Where no rate is stated there is none: then a share is kept as a
share of the time, and without a share nothing is held back and no lock is taken.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from groupio.fabric.pacing import Bucket

_RECHECK_S = 60.0

Stopped = Callable[[], bool]
"""Whether somebody who waits is to wait no more; asked under a lock, so it must not wait."""


class Brake:
    """Keeps threads to a share of their time. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._share = 1.0
        self._rests = threading.local()

    @property
    def is_free(self) -> bool:
        """Whether nothing is held back now."""
        return self._share >= 1.0

    def set(self, share: float) -> None:
        """From now on use ``share`` of the time: 0 pauses, 1 is all of it."""
        with self._changed:
            self._share = share
            self._changed.notify_all()

    def wake(self) -> None:
        """Let those who wait look whether they are to stop."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, stopped: Stopped) -> None:
        """Rest after this thread's last piece of work, as long as the share asks."""
        took, ended = getattr(self._rests, "last", (0.0, 0.0))
        with self._changed:
            while (share := self._share) < 1.0:
                left = _RECHECK_S
                if share > 0:
                    left = ended + took * (1 / share - 1) - self._clock()
                if left <= 0 or stopped():
                    return
                self._changed.wait(left)

    def worked(self, began: float) -> None:
        """This thread has ended a piece of work that it began at this reading of the clock."""
        now = self._clock()
        self._rests.last = (now - began, now)


class Way:
    """One direction of the uplink. Thread-safe."""

    def __init__(self, rate: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        """``rate`` is bytes per second; None: no limit."""
        self._clock = clock
        self._rate = rate
        self._bucket = Bucket(clock)
        self._brake = Brake(clock)
        self._lock = threading.Lock()
        self.held_s = 0.0
        """Seconds that threads waited here, all of them together."""
        self._held_at = -math.inf
        self._waiting = 0
        self.set(1.0)

    def set(self, share: float) -> None:
        """From now on keep to this share: of the rate, or of the time if there is none."""
        if self._rate is not None:
            self._bucket.set(self._rate, share)
        self._brake.set(share)

    def wake(self) -> None:
        """Let those who wait look whether they are to stop."""
        self._bucket.wake()
        self._brake.wake()

    def open(self) -> None:
        """Hold nothing back any more."""
        self._rate = None
        self._bucket.set(None, 1.0)
        self._brake.set(1.0)

    @contextmanager
    def moving(self, nbytes: int, stopped: Stopped) -> Iterator[None]:
        """Around what moves ``nbytes``; waits first. Hold no lock that others need.

        When ``stopped`` says so the wait ends at once: look again before anything is moved.
        """
        if not (self._bucket.is_free and self._brake.is_free):
            self._wait(nbytes, stopped)
        began = self._clock()
        try:
            yield
        finally:
            self._brake.worked(began)

    def _wait(self, nbytes: int, stopped: Stopped) -> None:
        came = self._clock()
        with self._lock:
            self._waiting += 1
        self._bucket.take(nbytes, math.inf, stopped)
        self._brake.wait(stopped)
        now = self._clock()
        with self._lock:
            self._waiting -= 1
            if now > came:
                self.held_s += now - came
                self._held_at = now

    def held_since(self, moment: float) -> bool:
        """Whether something was held back after this reading of the clock, or is just now."""
        return self._waiting > 0 or self._held_at >= moment


class Uplink:
    """The way of a node to its stores, and back; each keeps to ``rate`` bytes per second.

    None: to no rate. A measured rate is never one: what is held back would measure itself.
    """

    def __init__(
        self, rate: float | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.rate = rate
        self.share = 1.0
        self.writes = Way(rate, clock)
        self.reads = Way(rate, clock)

    def set_share(self, share: float) -> None:
        """Use this share from now on: 0 pauses, 1 is all."""
        self.share = share
        self.writes.set(share)
        self.reads.set(share)

    def wake(self) -> None:
        """Let those who wait look whether they are to stop."""
        self.writes.wake()
        self.reads.wake()

    def open(self) -> None:
        """Hold nothing back any more: the agent ends."""
        self.writes.open()
        self.reads.open()

    @property
    def held_s(self) -> float:
        """Seconds that threads waited for their turn, all of them together."""
        return self.writes.held_s + self.reads.held_s
