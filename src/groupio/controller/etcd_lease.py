"""A lease of etcd, kept alive by a thread, and judged by the own clock when etcd is silent."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from groupio.controller.etcd_http import Etcd, NoSuchLeaseError
from groupio.errors import ControllerLost
from groupio.exhaustion import start_some

_LOG = logging.getLogger(__name__)

_MARGIN = 0.1
"""Share of the time to live by which the holder counts itself out before etcd does."""

_ROUNDS = 4
"""So many times in its time to live a lease is prolonged."""

_REVOKE_S = 1.0
"""How long an attempt to give a lease back may take, in seconds."""


class Lease:
    """A granted lease; ``start`` keeps it alive, and exactly one of two things ends that.

    ``end``, by the owner; or the loss: etcd says that the lease is over, ``check`` says why it is
    of no use any more, or nobody has answered for (almost) its time to live. The clock runs on
    while the process or the whole machine sleeps, so a holder that was paused knows at once.
    """

    def __init__(self, etcd: Etcd, ttl_s: int, deadline: float) -> None:
        """Ask for a lease of ``ttl_s`` seconds; ``ttl_s`` of the object is what etcd gave."""
        sent = _now()
        self._etcd = etcd
        self.id, self.ttl_s = etcd.grant(ttl_s, deadline)
        self._until = self._counted_from(sent, self.ttl_s)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_held(self) -> bool:
        """Whether the lease is surely not over, by the own clock; asks nobody."""
        return not self._stop.is_set() and _now() < self._until

    def start(self, check: Callable[[float], str | None], on_lost: Callable[[str], None]) -> None:
        """Keep the lease alive; ``on_lost`` is told once why that ended.

        ``check(deadline)`` is asked after each prolonging; it may raise ControllerLost.
        GroupAborted when the system has no thread to give.
        """
        thread = threading.Thread(
            target=self._run, args=(check, on_lost), name="groupio-lease", daemon=True
        )
        start_some([thread])
        self._thread = thread

    def end(self, *, revoke: bool) -> None:
        """Stop; ``revoke`` also gives it back, which deletes its keys at once (best effort)."""
        self._stop.set()
        if revoke:
            self._give_back()

    def join(self) -> None:
        """Wait, bounded, until the thread has noticed the end."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=2 * _REVOKE_S)

    def _run(self, check: Callable[[float], str | None], on_lost: Callable[[str], None]) -> None:
        while not self._stop.wait(self.ttl_s / _ROUNDS):
            try:
                why = self._prolong(check)
            except Exception as error:  # noqa: BLE001 - the holder must hear of any end
                _LOG.exception("keeping a lease in etcd failed")
                why = f"its lease in etcd cannot be kept: {error}"
            if why is not None and not self._stop.is_set():
                self._stop.set()
                on_lost(why)
                self._give_back()

    def _prolong(self, check: Callable[[float], str | None]) -> str | None:
        """Why the lease is of no use any more, or None."""
        sent = _now()
        deadline = time.monotonic() + max(_REVOKE_S, self._until - sent)
        try:
            ttl_s = self._etcd.keep_alive(self.id, deadline)
            if ttl_s <= 0:
                return f"its lease of {self.ttl_s} s in etcd is over"
            if sent >= self._until:
                return "this process slept for longer than its lease in etcd lasts"
            self._until = self._counted_from(sent, ttl_s)
            return check(deadline)
        except NoSuchLeaseError:
            return f"its lease of {self.ttl_s} s in etcd is over"
        except ControllerLost as error:
            if _now() < self._until:
                return None  # there is time for more tries
            return f"its lease in etcd could not be prolonged: {error.message}"

    def _give_back(self) -> None:
        try:
            self._etcd.revoke(self.id, time.monotonic() + _REVOKE_S)
        except ControllerLost as error:
            _LOG.debug("a lease was left to run out: %s", error.message)

    @staticmethod
    def _counted_from(sent: float, ttl_s: int) -> float:
        """Until when a lease lasts that etcd counts from when it got what was ``sent``."""
        return sent + ttl_s * (1 - _MARGIN)


def _now() -> float:
    # Unlike time.monotonic() this runs on while the machine is suspended.
    return time.clock_gettime(time.CLOCK_BOOTTIME)
