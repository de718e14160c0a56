"""The failed saves of one client: each is reported once unless its caller read the error.

A caller reads an error through ``SaveHandle.error`` or an exception of ``SaveHandle.wait``. What
was not read is logged at ERROR at the first of these moments: the client's next save, its close
(which the end of the interpreter implies), or GRACE_S after the failure.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from groupio.errors import GroupIOError, Outcome

if TYPE_CHECKING:
    from groupio.client.handle import SaveHandle

log = logging.getLogger("groupio.client")

GRACE_S = 10.0
"""A failure that the caller has not read after this time is logged."""

_OWN_LOGGERS = ("groupio.client", "groupio")
_KEPT = 64


class Failures:
    """Failed saves of the client of ``rank`` for ``store``. Thread-safe.

    Only short sections are locked, with a lock that the same thread may take twice: a signal
    handler may interrupt any of them and save.
    """

    def __init__(self, rank: int, store: str) -> None:
        self._where = f"rank {rank}, {store}"
        self._lock = threading.RLock()
        self._saves = 0
        self._failed = 0
        self._unread_reported = False
        self._last_durable: int | None = None
        self._last_error: GroupIOError | None = None
        self._pending: list[tuple[float, SaveHandle]] = []
        self._unread: deque[SaveHandle] = deque(maxlen=_KEPT)
        self._taken_over: deque[int] = deque(maxlen=_KEPT)
        self._reporter: threading.Thread | None = None
        self._closed = threading.Event()

    # -- events of the handles -------------------------------------------------------------------

    def began(self, epoch: int) -> None:
        """The client begins a save of ``epoch``."""
        with self._lock:
            self._saves += 1
            if epoch in self._taken_over:
                self._taken_over.remove(epoch)

    def failed(self, handle: SaveHandle) -> None:
        """The save of ``handle`` failed."""
        with self._lock:
            self._failed += 1
            self._last_error = handle._error
            if handle._was_read or handle.epoch in self._taken_over:
                return
            self._unread.append(handle)
            self._pending.append((time.monotonic() + GRACE_S, handle))
            if self._reporter is not None or self._closed.is_set():
                return
            self._reporter = threading.Thread(
                target=self._report_late, name="groupio-failures", daemon=True
            )
            # Refused at the end of the interpreter, whose close reports.
            with contextlib.suppress(RuntimeError):
                self._reporter.start()

    def durable(self, handle: SaveHandle, *, after_failure: bool) -> None:
        """The epoch of ``handle`` is DURABLE, possibly after the handle had failed."""
        with self._lock:
            self._failed -= after_failure
            if self._last_durable is None or handle.epoch > self._last_durable:
                self._last_durable = handle.epoch

    # -- reports ---------------------------------------------------------------------------------

    def unread(self) -> list[tuple[int, GroupIOError]]:
        """Failures that the caller has not read, the newest _KEPT of them, also if logged."""
        with self._lock:
            handles = list(self._unread)
        return [(h.epoch, h._error) for h in handles if h._error is not None and not h._was_read]

    def take_over(self, epochs: Iterable[int]) -> None:
        """The caller reports the failures of ``epochs`` itself, also those still to arrive."""
        with self._lock:
            self._taken_over.extend(epochs)
            kept = [h for h in self._unread if h.epoch not in self._taken_over]
            self._unread = deque(kept, maxlen=_KEPT)
            self._pending = [p for p in self._pending if p[1].epoch not in self._taken_over]

    def report(self) -> tuple[str, ...]:
        """Log all failures that were not read; notes about them for the next save."""
        return self._report(float("inf"))

    def _report(self, until: float) -> tuple[str, ...]:
        with self._lock:
            due = [handle for at, handle in self._pending if at <= until]
            self._pending = [p for p in self._pending if p[0] > until]
        notes = []
        for handle in due:
            error = handle._error
            if error is None or handle._was_read:
                continue
            self._unread_reported = True
            may_be = "may not have been" if error.outcome is Outcome.UNKNOWN else "was not"
            kind = type(error).__name__
            say_error(f"epoch {handle.epoch} {may_be} saved ({self._where}): {kind}: {error}")
            notes.append(f"epoch {handle.epoch} before it {may_be} saved: {kind}")
        return tuple(notes)

    def _report_late(self) -> None:
        while True:
            with self._lock:
                if not self._pending:
                    self._reporter = None
                    return
                due = self._pending[0][0]
            self._closed.wait(due - time.monotonic())
            self._report(time.monotonic())
            if self._closed.is_set():
                return

    def close(self) -> None:
        """Report what was not read, and sum up where a save failed."""
        self._closed.set()
        self.report()
        with self._lock:
            saves, failed, error = self._saves, self._failed, self._last_error
            last, self._saves, self._failed = self._last_durable, 0, 0
        if not failed or error is None:
            return
        durable = "none is durable" if last is None else f"the last durable epoch is {last}"
        text = (
            f"{failed} of {saves} saves of this process failed ({self._where}), last with "
            f"{type(error).__name__}; {durable}"
        )
        if self._unread_reported:
            say_error(text)
        else:
            log.warning("%s", text)


def say_error(text: str) -> None:
    """Log ``text`` at ERROR; on stderr where no handler of ``logging`` would show it.

    Only a level above ERROR that is set on groupio's own loggers silences it.
    """
    loggers = [logging.getLogger(name) for name in _OWN_LOGGERS]
    if any(logger.level > logging.ERROR for logger in loggers):
        return
    if _is_shown():
        log.error("%s", text)
    else:
        # stderr may be closed or missing, in a daemon, or a signal handler may have interrupted it.
        with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):
            sys.stderr.write(f"groupio: ERROR: {text}\n")
            sys.stderr.flush()


def _is_shown() -> bool:
    """Whether an ERROR of this logger comes to a handler that shows it."""
    if not log.isEnabledFor(logging.ERROR):
        return False
    last_resort = logging.lastResort
    if not log.hasHandlers():
        return last_resort is not None and last_resort.level <= logging.ERROR
    logger: logging.Logger | None = log
    while logger is not None:
        for handler in logger.handlers:
            if handler.level <= logging.ERROR and not isinstance(handler, logging.NullHandler):
                return True
        logger = logger.parent if logger.propagate else None
    return False
