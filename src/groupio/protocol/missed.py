"""Groups that were given up before all their members came, for those that come too late.

The others went on. A member that began a group of its own would wait for them, and they for it
with their next epoch: all would miss each other from then on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from groupio.errors import GroupIOError
from groupio.protocol import events as ev
from groupio.protocol import reasons
from groupio.protocol.group import Group, Seat

EPOCHS_REMEMBERED = 16
"""So many epochs are remembered, the newest ones."""


@dataclass(slots=True)
class Missed:
    """By epoch, the last group of the present incarnation that ended incomplete."""

    _groups: dict[int, Group] = field(default_factory=dict)

    def note(self, group: Group) -> None:
        """A group is over: remember it if members did not come to it."""
        if len(group.seats) < group.world_size:
            self._groups[group.epoch] = group
        if len(self._groups) > EPOCHS_REMEMBERED:
            del self._groups[min(self._groups)]

    def tell(self, event: ev.MemberOpened) -> GroupIOError | None:
        """Why the group was given up that this member comes too late for; told once."""
        group = self._groups.get(event.epoch)
        if group is None or event.rank in group.seats:
            return None
        group.seats[event.rank] = Seat(event)
        assert group.error is not None
        return reasons.missed(event.rank, group.error)

    def forget(self) -> None:
        """A new incarnation begins: it missed nothing."""
        self._groups.clear()
