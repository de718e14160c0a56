"""Paces the bytes that a node moves: a token bucket for each direction of a link, and a share.

Storage has the lowest priority on a node. While the job communicates (a foreground
interval), the share goes down: bytes keep to a part of the rate, or pause.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from groupio.errors import InvalidInput

BURST_S = 0.02
"""An idle bucket saves up what the rate gives in this time, seconds."""

SLICE_S = 0.02
"""Without a rate, a share is kept by moving bytes in that part of each such slice, seconds."""

_RECHECK_S = 60.0

_PIECE_S = 0.1
_PIECE_BYTES_MIN = 64 << 10


class Bucket:
    """Tokens, one a byte, for one direction of a node's port; thread-safe.

    A take goes into debt rather than wait for its last byte: pieces of any size pass, and over
    time the rate is kept.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._rate: float | None = None
        self._share = 1.0
        self._tokens = 0.0
        self._filled_at = clock()
        self._free = True

    @property
    def is_free(self) -> bool:
        """Whether nothing holds bytes back now."""
        return self._free

    def set(self, rate: float | None, share: float) -> None:
        """From now on ``rate`` bytes/s (None: no limit) times ``share`` (0 pauses)."""
        with self._changed:
            self._fill()
            self._rate, self._share = rate, share
            self._free = rate is None and share >= 1.0
            self._changed.notify_all()

    def piece(self, most: int) -> int:
        """Bytes, at most ``most``, to take at a time: a slow rate lets small ones pass, often."""
        if self._rate is None:
            return most
        return min(most, max(int(self._rate * self._share * _PIECE_S), _PIECE_BYTES_MIN))

    def take(
        self, nbytes: int, deadline: float, stopped: Callable[[], bool] = lambda: False
    ) -> None:
        """Return when ``nbytes`` may move. TimeoutError when that is not before ``deadline``.

        Returns too, and takes nothing, when ``stopped`` says so: it is asked again after
        :meth:`wake`, with the bucket's lock held, and must not wait.
        """
        if self._free:
            return
        with self._changed:
            while (wait := self._wait_s()) > 0:
                if stopped():
                    return
                left = deadline - self._clock()
                if left <= 0:
                    raise TimeoutError("the pace did not let the bytes pass in time")
                self._changed.wait(min(wait, left))
            self._tokens -= nbytes

    def wake(self) -> None:
        """Let those who wait look whether they are to stop."""
        with self._changed:
            self._changed.notify_all()

    def _fill(self) -> None:
        now = self._clock()
        if self._rate is not None:
            rate = self._rate * self._share
            self._tokens = min(self._tokens + (now - self._filled_at) * rate, rate * BURST_S)
        else:
            self._tokens = 0.0
        self._filled_at = now

    def _wait_s(self) -> float:
        """Seconds until bytes may move as things are; 0: now."""
        if self._share <= 0:
            return _RECHECK_S
        if self._rate is None:
            into = self._clock() % SLICE_S
            return 0.0 if into < SLICE_S * self._share else SLICE_S - into
        self._fill()
        return max(-self._tokens / (self._rate * self._share), 0.0)


class Pacer:
    """The pace of all that a node's fabric sends and receives; a port is full duplex.

    ``rate`` is bytes/s in each direction, None for no limit. ``share`` is 1 for all of it, 0 for
    a pause, or a part between; without a rate, a part is that part of the time. What the
    system has buffered already still moves.
    """

    def __init__(
        self, rate: float | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.sending = Bucket(clock)
        self.receiving = Bucket(clock)
        self._lock = threading.Lock()
        self._rate: float | None = None
        self._share = 1.0
        self.changes = 0
        """How often the share changed: who measures meanwhile measures the pace."""
        self.set_rate(rate)

    @property
    def rate(self) -> float | None:
        """Bytes per second in each direction, before the share; None: no limit."""
        return self._rate

    @property
    def share(self) -> float:
        """The part of the rate that may be used now."""
        return self._share

    def set_rate(self, rate: float | None) -> None:
        """Limit each direction to ``rate`` bytes/s. InvalidInput unless positive or None."""
        if rate is not None and not 0 < rate < float("inf"):
            raise InvalidInput(f"the fabric's rate is {rate} bytes/s; give more than 0, or None")
        with self._lock:
            self._rate = rate
            self._apply()

    def set_share(self, share: float) -> None:
        """Use this part of the rate from now on: 0 pauses, 1 is all. InvalidInput otherwise."""
        if not 0 <= share <= 1:
            raise InvalidInput(f"the fabric's share is {share}; give a value from 0 to 1")
        with self._lock:
            self.changes += share != self._share
            self._share = share
            self._apply()

    def _apply(self) -> None:
        self.sending.set(self._rate, self._share)
        self.receiving.set(self._rate, self._share)
