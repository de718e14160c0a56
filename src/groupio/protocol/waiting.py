"""The opens of a job that wait until its store is open or its new lineage exists."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

from groupio.errors import GroupIOError
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol import reasons

OPENS_WAITING_MAX = 1 << 16
"""How many opens may wait at once."""


@dataclass(slots=True)
class Waiter:
    """An open that waits; ``failed`` once its rank gave up, of which its group must hear."""

    event: ev.MemberOpened
    failed: GroupIOError | None = None


@dataclass(slots=True)
class WaitingRoom:
    """Opens by the name of the timer of their deadline, in the order of arrival."""

    limit: int = OPENS_WAITING_MAX
    waiters: dict[str, Waiter] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def __bool__(self) -> bool:
        return bool(self.waiters)

    @property
    def opens(self) -> list[ev.MemberOpened]:
        """The opens that wait, in the order of arrival."""
        return [waiter.event for waiter in self.waiters.values()]

    def has(self, event: ev.MemberOpened) -> bool:
        """This open waits here."""
        return any((w.client, w.save_id) == (event.client, event.save_id) for w in self.opens)

    def enter(self, event: ev.MemberOpened, timer: str) -> list[fx.Effect]:
        """Let an open wait, or refuse it when too many do; ``timer`` if it waited before."""
        if timer:
            self.waiters[timer] = Waiter(event)
            return []
        if len(self.waiters) >= self.limit:
            return refuse(event, "", reasons.crowded(event.epoch, len(self.waiters)))
        timer = f"open-{next(self._numbers)}"
        self.waiters[timer] = Waiter(event)
        return [fx.StartTimer(timer, event.remaining_s)]

    def leave(self) -> dict[str, Waiter]:
        """Everybody who waits, to be tried again; their timers go on."""
        waiters, self.waiters = self.waiters, {}
        return waiters

    def refuse(
        self, reason: Callable[[ev.MemberOpened], GroupIOError], node: str = ""
    ) -> list[fx.Effect]:
        """Send everybody away, or everybody of one ``node``."""
        effects: list[fx.Effect] = []
        for timer, waiter in list(self.waiters.items()):
            if node in ("", waiter.event.node):
                del self.waiters[timer]
                effects += refuse(waiter.event, timer, reason(waiter.event))
        return effects

    def expire(self, timer: str) -> list[fx.Effect] | None:
        """The timer ran out; None when nobody waits under it."""
        waiter = self.waiters.pop(timer, None)
        if waiter is None:
            return None
        return refuse(waiter.event, "", reasons.unanswered(waiter.event))

    def withdraw(self, client: str, save_id: int, error: GroupIOError) -> None:
        """A rank gave up while it waited: the others hear of it once its group is known."""
        for waiter in self.waiters.values():
            if (waiter.event.client, waiter.event.save_id) == (client, save_id):
                waiter.failed = error

    def lose(self, client: str) -> list[fx.Effect]:
        """The client is gone: nobody waits for its opens any more."""
        timers = [t for t, waiter in self.waiters.items() if waiter.event.client == client]
        for timer in timers:
            del self.waiters[timer]
        return [fx.StopTimer(timer) for timer in timers]


def refuse(event: ev.MemberOpened, timer: str, error: GroupIOError) -> list[fx.Effect]:
    """Tell the member of an open that it has no group; ``timer`` runs if it waited."""
    told = fx.TellFailed(fx.MemberSeat(event.rank, event.client, event.save_id), error)
    return [*([fx.StopTimer(timer)] if timer else []), told]
