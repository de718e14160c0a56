"""Saves of this node that no controller takes up: their members hear why when it is time.

While the controller is looked for, members wait, at most until their deadlines. Where a controller
is there and does not take this agent, waiting does not help: they are told after a moment in which
another agent of the same name could end.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from groupio.errors import (
    FormatError,
    GroupIOError,
    GroupTimeout,
    IntegrityError,
    InvalidInput,
    StorageError,
    from_wire,
    to_wire,
)
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol import reasons
from groupio.seldom import REFUSED_LOG_S, Seldom

if TYPE_CHECKING:
    from groupio.agent.driver import Driver
    from groupio.agent.job import Job

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""So often the saves that wait are looked at."""

GRACE_S = 1.0
"""A controller that is there tells its members itself that their time is over."""

UNUSABLE_TRIES = 3
"""A store that fails so often in a row and is not merely away is not waited for."""

REFUSED_S = 12.0
"""A refused agent's members wait so long: until a killed agent's link is known to be dead."""


class Unjoined:
    """The saves of one job that no controller has memory for yet. Runs in the event loop."""

    def __init__(self, driver: Driver, job: Job) -> None:
        self._driver = driver
        self._job = job
        self._why = ""
        self._refused: GroupIOError | None = None
        self._refused_at = 0.0
        self._tries = 0
        self._said = Seldom(REFUSED_LOG_S)

    def unusable(self, error: GroupIOError) -> None:
        """The store cannot be opened; saves are told at once of what waiting does not mend."""
        self._why = error.message
        if self._said.is_due(error.message):
            log.warning("the store %s cannot be used: %s", self._job.path, error.message)
        lasting = isinstance(error, StorageError | IntegrityError | FormatError | InvalidInput)
        waiting = [] if not lasting or reasons.is_away(error) else self.waiting()
        self._tries = self._tries + 1 if waiting else 0
        if self._tries >= UNUSABLE_TRIES:
            for opened in waiting:
                self.fail(opened, from_wire(to_wire(error)))

    def note(self, why: str) -> None:
        """The controller cannot be found or reached, because of this."""
        self._why = why

    def log_refusal(self, address: str, error: GroupIOError) -> None:
        """Say so, but not each of several times a second."""
        if self._said.is_due(error.message):
            log.error("refused by the controller at %s: %s", address, error.message)

    def refused(self, error: GroupIOError) -> None:
        """A controller is there, and does not take this agent."""
        if self._refused is None:
            self._refused_at = time.monotonic()
        self._refused, self._why = error, error.message

    def over(self) -> None:
        """The controller took this agent."""
        self._refused, self._why = None, ""

    @property
    def why(self) -> str:
        """Why there is no controller yet, as far as it is known."""
        return self._why

    @property
    def may_be_taken(self) -> bool:
        """The agent is refused, and its predecessor may only have to be known dead."""
        return self._refused is not None and time.monotonic() - self._refused_at < REFUSED_S

    def waiting(self) -> list[ev.MemberOpened]:
        """The saves for which there is no memory of a group here, as of now."""
        groups = self._driver.machine.groups.values()
        seats = [lease.seat for group in groups for lease in group.leases.values()]
        admitted = {(seat.client, seat.save_id) for seat in seats}
        opens = self._job.opens_now()
        return [opened for opened in opens if (opened.client, opened.save_id) not in admitted]

    def look(self) -> None:
        """Tell those whose time is over; only while there is no controller."""
        now = time.monotonic()
        refused = self._refused if now - self._refused_at >= REFUSED_S else None
        for opened in self.waiting():
            if refused is not None:
                self.fail(opened, from_wire(to_wire(refused)))
            elif opened.elapsed_s > opened.deadline_s + GRACE_S:
                self.fail(opened, self._refused or self._late(opened))

    def drain(self) -> list[ev.MemberFailed]:
        """The agent takes nothing new: what the controller has to hear of saves that wait."""
        return [
            ev.MemberFailed(opened.client, opened.save_id, reasons.draining(opened.epoch))
            for opened in self.waiting()
        ]

    def fail(self, opened: ev.MemberOpened, error: GroupIOError) -> None:
        """The save is over for its member, and for a controller that comes later."""
        job = self._job
        assert job.joining is not None
        job.joining.tell(ev.MemberFailed(opened.client, opened.save_id, error))
        seat = fx.MemberSeat(opened.rank, opened.client, opened.save_id)
        self._driver.obey(job, fx.TellFailed(seat, error))

    def _late(self, opened: ev.MemberOpened) -> GroupTimeout:
        why = f" ({self._why})" if self._why else ""
        return GroupTimeout(
            f"Epoch {opened.epoch} was not staged within {opened.deadline_s:g} s: the job's "
            f"controller could not be reached{why}. Look at the network and at the store, or give "
            "a longer deadline_s.",
            epoch=opened.epoch,
        )
