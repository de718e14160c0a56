"""Saves of one client that interrupt another call: their bytes are copied at once, and a thread
hands them over when the saves that were called before have opened their groups."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from groupio.errors import StagingFull

if TYPE_CHECKING:
    from groupio.client.handle import SaveHandle
    from groupio.protocol import messages as msg

BEHIND_NESTED_S = 2.0
"""A save waits at most so long for nested ones that were called before it to open."""

BEHIND_INTERRUPTED_S = 30.0
"""A nested save waits at most so long for the one that it interrupted to open: as long as a
handler runs that one cannot go on."""

_LOOK_S = 0.02

NESTED_MAX = 16
"""A handler that saves in a loop is refused when so many of its saves are on their way."""

NESTED_BYTES_MAX = 8 << 30
"""Their copies together, where it is more than one."""

NOTE = (
    "released: called inside another call of groupio (a signal handler, a callback or a "
    "finalizer); copied, and handed over beside it"
)


class Turn:
    """The place of one save among those of its client, until it has opened its group.

    The context ends it, unless it was passed on to another thread.
    """

    def __init__(self, turns: list[Turn], earlier: list[Turn], *, nested: bool) -> None:
        self.is_nested = nested
        self._turns = turns
        self._earlier = earlier
        self._limit_s = BEHIND_INTERRUPTED_S if nested else BEHIND_NESTED_S
        self._is_urgent = False
        self._is_passed_on = False
        self._open = threading.Lock()
        self._open.acquire()
        turns.append(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._is_passed_on:
            self.over()

    def pass_on(self) -> None:
        """From here on another thread ends it."""
        self._is_passed_on = True

    def wait(self) -> None:
        """Wait until the earlier saves have opened, or the limit of this one is over."""
        end = time.monotonic() + self._limit_s
        for turn in self._earlier:
            while not self._is_urgent and time.monotonic() < end:
                if turn._open.acquire(timeout=_LOOK_S):
                    turn._open.release()
                    break

    def hurry(self) -> None:
        """Wait no longer: the earlier saves wait for this one, in their thread."""
        self._is_urgent = True

    def over(self) -> None:
        """The group is open, or will not be. Safe to repeat, by one thread."""
        if self in self._turns:
            self._turns.remove(self)
            self._open.release()


class NestedSaves:
    """The nested saves of one client, and the order in which its saves open their groups.

    Takes no lock that is held for longer than one operation of a list or dict.
    """

    def __init__(self) -> None:
        self._bytes: dict[SaveHandle, int] = {}
        self._turns: list[Turn] = []
        self._nested_turns: list[Turn] = []

    def turn(self, *, nested: bool) -> Turn:
        """The place of the next save: behind nested ones, and if it is one, behind all."""
        earlier = list(self._nested_turns)
        if nested:
            return Turn(self._nested_turns, self._turns + earlier, nested=True)
        return Turn(self._turns, earlier, nested=False)

    def handles(self) -> list[SaveHandle]:
        """The nested saves that are not handed over yet."""
        return list(self._bytes)

    def add(self, handle: SaveHandle, nbytes: int) -> None:
        """Take a save on; StagingFull when there are too many."""
        waiting = list(self._bytes.values())
        too_large = waiting and sum(waiting) + nbytes > NESTED_BYTES_MAX
        if len(waiting) >= NESTED_MAX or too_large:
            raise StagingFull(
                f"epoch {handle.epoch} ({nbytes} bytes) was not saved: {len(waiting)} saves "
                f"({sum(waiting)} bytes) that were called inside other calls of groupio, in "
                "signal handlers or callbacks, are still on their way; save less often there",
                needed=nbytes,
                budget=NESTED_BYTES_MAX,
                epoch=handle.epoch,
            )
        self._bytes[handle] = nbytes

    def remove(self, handle: SaveHandle) -> None:
        """The save is handed over, or failed."""
        self._bytes.pop(handle, None)


def no_copy(opened: msg.OpenSave) -> StagingFull:
    """The error of a nested save for whose copy there is no memory."""
    return StagingFull(
        f"epoch {opened.epoch} was called inside another call of groupio, and there is no memory "
        f"to copy its {opened.total_bytes} bytes meanwhile; save it again after that call",
        needed=opened.total_bytes,
        epoch=opened.epoch,
    )
