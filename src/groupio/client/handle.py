"""The handle of one save: its levels, its times and its error."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from groupio.client import nesting
from groupio.errors import (
    GroupIOError,
    InvalidInput,
    LevelUnreachable,
    Outcome,
    StagingFull,
    WaitTimeout,
)
from groupio.model import Level, Timeline

if TYPE_CHECKING:
    from groupio.client.failures import Failures

log = logging.getLogger("groupio.client")

NESTED_WAIT_S = 60.0
"""In a call that interrupted another one of groupio, a wait without a limit ends after this."""

DOOR_WAIT_S = 60.0
"""A wait for DURABLE waits so much longer for the door of the epoch, where one was asked for."""

DOOR_LATE = "door: not published yet, it may still come; `groupio export --dcp` makes it, too"

_IMPLIED_BY = {
    Level.RELEASED: (Level.RELEASED,),
    Level.STAGED: (Level.STAGED, Level.REPLICATED, Level.REMOTE, Level.DURABLE),
    Level.REPLICATED: (Level.REPLICATED,),
    Level.REMOTE: (Level.REMOTE, Level.DURABLE),
    Level.DURABLE: (Level.DURABLE,),
}
"""Reaching any of these satisfies the level. The order is partial: STAGED < REPLICATED and
STAGED < REMOTE < DURABLE."""


class SaveHandle:
    """One save of one member: where it stands, and why it failed if it did.

    A failed save never raises out of ``Client.save``; it stands here. An error that is read
    neither here nor through :meth:`wait` is logged. All methods may be called from any thread.
    A handle belongs to the process that saved.
    """

    def __init__(
        self,
        epoch: int,
        called_at: float,
        replicas: int = 1,
        *,
        one_node: bool = True,
        failures: Failures | None = None,
    ) -> None:
        """Made by ``Client.save``; ``called_at`` is a reading of ``time.monotonic``."""
        self._epoch = epoch
        self._called_at = called_at
        self._replicas = replicas
        self._cannot: GroupIOError | None = None
        """Why REPLICATED will not be reached, once that is known."""
        if one_node and replicas > 1:
            self._cannot = unreachable(epoch, replicas)
        self._pid = os.getpid()
        self._condition = threading.Condition()
        self._reached: dict[Level, float] = {}
        self._arrivals: tuple[float | None, float | None] = (None, None)
        self._notes: tuple[str, ...] = ()
        self._error: GroupIOError | None = None
        self._was_read = False
        """Whether the caller has read the error."""
        self._failures = failures
        self._hurry: Callable[[], None] = lambda: None
        """Called when a nested call waits for a nested save."""
        self._callbacks: list[tuple[Level, Callable[[SaveHandle], Any]]] = []
        self._listener: threading.Thread | None = None
        self._door_pending = False

    # -- what is known ---------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch that was saved."""
        return self._epoch

    @property
    @nesting.call
    def error(self) -> GroupIOError | None:
        """Why the save failed; None while it has not. A skipped save has not failed."""
        with self._condition:
            if self._error is None or self._is_skipped():
                return None
            self._was_read = True
            return self._error

    @property
    @nesting.call
    def skipped(self) -> bool:
        """True when ``when_full="skip"`` left this epoch out because the memory was full."""
        with self._condition:
            return self._is_skipped()

    @property
    @nesting.call
    def outcome(self) -> Outcome:
        """What is known of the epoch: "committed", "not_committed", or "unknown" (yet)."""
        with self._condition:
            if Level.DURABLE in self._reached:
                return Outcome.COMMITTED
            return Outcome.UNKNOWN if self._error is None else self._error.outcome

    @property
    @nesting.call
    def times(self) -> Timeline:
        """When each level was reached, in seconds since the call; None: not reached (yet)."""
        with self._condition:
            return self._timeline()

    def _is_skipped(self) -> bool:
        return isinstance(self._error, StagingFull) and bool(self._error.skipped)

    def _timeline(self) -> Timeline:
        def since(at: float | None) -> float | None:
            return None if at is None else at - self._called_at

        return Timeline(
            released=since(self._reached.get(Level.RELEASED)),
            staged=since(self._reached.get(Level.STAGED)),
            replicated=since(self._reached.get(Level.REPLICATED)),
            remote=since(self._reached.get(Level.REMOTE)),
            durable=since(self._reached.get(Level.DURABLE)),
            first_arrival=since(self._arrivals[0]),
            last_arrival=since(self._arrivals[1]),
            notes=self._notes,
        )

    def __repr__(self) -> str:
        with self._condition:
            times = self._timeline()
            reached = ", ".join(
                f"{level} {at - self._called_at:.3f} s" for level, at in self._reached.items()
            )
            if self._is_skipped():
                state = "skipped: no room in memory"
            elif self._error is not None:
                state = f"{type(self._error).__name__}, {self._error.outcome}"
            else:
                state = "durable" if times.durable is not None else "in flight"
            return f"<SaveHandle epoch={self._epoch} {state}{'; ' if reached else ''}{reached}>"

    # -- waiting ---------------------------------------------------------------------------------

    @nesting.call
    def wait(self, level: str = "durable", timeout_s: float | None = None) -> Timeline:
        """Wait until the save reached ``level``, and say when each level was reached.

        Raises the typed error of a failed save (StagingFull for a skipped one), WaitTimeout after
        ``timeout_s`` seconds (the save goes on), LevelUnreachable for "replicated" as soon as it
        is known that there are fewer failure domains than the settings ask for. Without
        ``timeout_s`` it waits as long as the agent lives. A save that asked for a door waits for
        that too once it is DURABLE, at most DOOR_WAIT_S; without a door the notes say why.
        In a signal handler that interrupted another call of groupio it waits NESTED_WAIT_S at
        most: that call may hold what the save needs. In a callback it cannot wait (InvalidInput).
        """
        if nesting.is_nested():
            self._hurry()
            timeout_s = NESTED_WAIT_S if timeout_s is None else timeout_s
        try:
            return self._wait(level, timeout_s)
        except GroupIOError as error:
            if error is self._error:
                self._was_read = True
            raise

    def _wait(self, level: str, timeout_s: float | None = None) -> Timeline:
        """As :meth:`wait`; an error that it raises does not count as read by the caller."""
        wanted = as_level(level)
        if timeout_s is not None and not timeout_s >= 0:
            raise InvalidInput(f"timeout_s={timeout_s!r} must be 0 or more, or None")
        self._check_process()
        end = None if timeout_s is None else time.monotonic() + timeout_s
        with self._condition:
            while True:
                if self._error is not None:
                    raise self._error.with_traceback(None)
                wanted = self._reachable(wanted)
                if self._has(wanted):
                    if wanted is Level.DURABLE:
                        self._await_door(end)
                    return self._timeline()
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    raise WaitTimeout(
                        f"epoch {self._epoch} was not {wanted} after {timeout_s} s; the save goes "
                        "on, wait again",
                        level=str(wanted),
                        epoch=self._epoch,
                    )
                if threading.current_thread() is self._listener:
                    raise InvalidInput(
                        f"wait for epoch {self._epoch} to be {wanted} was called in a callback, "
                        "whose thread brings that news; wait in another thread"
                    )
                self._condition.wait(left)

    def _await_door(self, end: float | None) -> None:
        """With the lock held, wait for news of the door; its lateness fails nothing."""
        if threading.current_thread() is self._listener:
            return  # this thread brings the news
        limit = self._reached[Level.DURABLE] + DOOR_WAIT_S
        if end is not None:
            limit = min(limit, end)
        while self._door_pending:
            left = limit - time.monotonic()
            if left <= 0:
                self._notes += () if DOOR_LATE in self._notes else (DOOR_LATE,)
                return
            self._condition.wait(left)

    @nesting.call
    def add_done_callback(self, level: str, fn: Callable[[SaveHandle], Any]) -> None:
        """Call ``fn(handle)`` once: when ``level`` is reached, or when the save failed.

        At once, in this thread, when that is so already; else from the thread that listens to
        the agent, so keep it short. An exception in it is logged.
        """
        wanted = as_level(level)
        self._check_process()
        with self._condition:
            if self._error is None:
                try:
                    over = self._has(self._reachable(wanted))
                except LevelUnreachable:
                    over = True
                if not over:
                    self._callbacks.append((wanted, fn))
                    return
        self._call(fn)

    def _has(self, level: Level) -> bool:
        return any(reached in self._reached for reached in _IMPLIED_BY[level])

    def _reachable(self, level: Level) -> Level:
        """``level``, or the one it amounts to on a single node."""
        if level is not Level.REPLICATED or Level.REPLICATED in self._reached:
            return level
        if self._replicas == 1:
            return Level.STAGED
        if self._cannot is not None:
            raise self._cannot.with_traceback(None)
        return level

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise InvalidInput(
                f"the save of epoch {self._epoch} belongs to process {self._pid}, which forked "
                "this one; wait for it there"
            )

    def _call(self, fn: Callable[[SaveHandle], Any]) -> None:
        try:
            fn(self)
        except Exception:
            log.exception("a callback of the save of epoch %d failed", self._epoch)

    # -- news, from the rest of the client -------------------------------------------------------

    def _reach(
        self,
        level: Level,
        at: float,
        first_arrival: float | None = None,
        last_arrival: float | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        """The group reached ``level`` at ``at`` (monotonic); repetitions change nothing."""
        with self._condition:
            if self._error is not None and level is not Level.DURABLE:
                return
            had_failed = self._error is not None and not self._is_skipped()
            if level is Level.DURABLE:
                # A commit that was found after all outweighs an error of the way to it.
                self._error = None
            is_first = level not in self._reached
            self._reached.setdefault(level, at)
            if first_arrival is not None:
                self._arrivals = (first_arrival, last_arrival)
            self._notes += tuple(note for note in notes if note not in self._notes)
            due = [fn for wanted, fn in self._callbacks if self._amounts_to(wanted)]
            self._callbacks = [c for c in self._callbacks if not self._amounts_to(c[0])]
            if level is Level.DURABLE and is_first and self._failures is not None:
                self._failures.durable(self, after_failure=had_failed)
            self._condition.notify_all()
        for fn in due:
            self._call(fn)

    def _add_notes(self, notes: Iterable[str]) -> None:
        """What the caller should know of the save, from who made its items."""
        with self._condition:
            self._notes += tuple(note for note in notes if note not in self._notes)

    def _amounts_to(self, level: Level) -> bool:
        one = level is Level.REPLICATED and self._replicas == 1
        return self._has(Level.STAGED if one else level)

    def _fail(self, error: GroupIOError) -> None:
        """The save failed; the first error stays, a later one can only settle its outcome."""
        with self._condition:
            if Level.DURABLE in self._reached:
                return
            if self._error is not None:
                if self._error.outcome is Outcome.UNKNOWN:
                    self._error.with_outcome(error.outcome)
                return
            self._error = error
            due = [fn for _, fn in self._callbacks]
            self._callbacks = []
            if self._failures is not None and not self._is_skipped():
                self._failures.failed(self)
            self._condition.notify_all()
        for fn in due:
            self._call(fn)

    def _rule_out(self, error: GroupIOError) -> None:
        """REPLICATED will not be reached; the save itself goes on."""
        with self._condition:
            self._cannot = error
            due = [fn for wanted, fn in self._callbacks if wanted is Level.REPLICATED]
            self._callbacks = [c for c in self._callbacks if c[0] is not Level.REPLICATED]
            self._condition.notify_all()
        for fn in due:
            self._call(fn)

    def _expect_door(self) -> None:
        """The save asks for a door."""
        with self._condition:
            self._door_pending = True

    def _door_done(self, error: str = "") -> None:
        """The door is published, or will not be because of ``error``."""
        with self._condition:
            if self._door_pending and error and Level.DURABLE in self._reached:
                self._notes += (f"door: {error}",)
            self._door_pending = False
            self._condition.notify_all()

    def _awaits_door(self) -> bool:
        with self._condition:
            return self._door_pending

    def _has_failed(self) -> bool:
        with self._condition:
            return self._error is not None

    def _abandon_in_child(self) -> None:
        self._condition = threading.Condition()


def as_level(level: str) -> Level:
    """``level`` as a Level; InvalidInput lists the levels when it is none."""
    try:
        return Level(level)
    except ValueError:
        raise InvalidInput(
            f"there is no level {level!r}; the levels are {', '.join(Level)}"
        ) from None


def unreachable(epoch: int, replicas: int) -> LevelUnreachable:
    """The error of a save or wait for REPLICATED on one node with several replicas asked."""
    return LevelUnreachable(
        f"epoch {epoch} cannot be replicated: the settings ask for {replicas} nodes and there is "
        "one; set replicas=1, or wait for another level",
        level=str(Level.REPLICATED),
    )
