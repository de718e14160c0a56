"""Tries at an epoch that ended before all members came, for those that come too late.

The others went on. A member that began a group of its own would wait for them, and they for it
with their next epoch: all would miss each other from then on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from groupio.errors import GroupIOError
from groupio.protocol import events as ev
from groupio.protocol import reasons
from groupio.protocol.group import Group

EPOCHS_REMEMBERED = 16
"""So many epochs are remembered, the newest ones."""


@dataclass(slots=True)
class _Try:
    """Why it ended, and the ranks that know it."""

    error: GroupIOError
    ranks: set[int]
    clients: set[str]
    """Members that the store refused, maybe before there was an incarnation: it is over when one
    of them is gone."""
    launch_id: str | None = None
    """Their launch of the job."""


@dataclass(slots=True)
class Missed:
    """By epoch, the last try of the present incarnation that ended incomplete."""

    _tries: dict[int, _Try] = field(default_factory=dict)

    def note(self, group: Group) -> None:
        """A group is over: remember it if members did not come to it."""
        if len(group.seats) < group.world_size:
            assert group.error is not None
            self._remember(group.epoch, _Try(group.error, set(group.seats), set()))

    def refused(
        self,
        opens: Iterable[ev.MemberOpened],
        error: GroupIOError,
        seated: Mapping[int, set[int]] | None = None,
    ) -> None:
        """The store refused these that waited for it: remember it for the rest of their groups.

        ``seated`` are ranks that know it too, by epoch: their groups were given up with it.
        """
        waited: dict[int, list[ev.MemberOpened]] = {}
        for opened in opens:
            waited.setdefault(opened.epoch, []).append(opened)
        for epoch, of_epoch in waited.items():
            ranks = {opened.rank for opened in of_epoch} | (seated or {}).get(epoch, set())
            if len(ranks) < of_epoch[0].world_size:
                clients = {opened.client for opened in of_epoch}
                self._remember(epoch, _Try(error, ranks, clients, of_epoch[0].launch_id))

    def disagreed(
        self, event: ev.MemberOpened, first: ev.MemberOpened, error: GroupIOError
    ) -> None:
        """Two members of a group that never was contradict each other."""
        self._remember(event.epoch, _Try(error, {event.rank, first.rank}, set()))

    def _remember(self, epoch: int, over: _Try) -> None:
        self._tries[epoch] = over
        if len(self._tries) > EPOCHS_REMEMBERED:
            del self._tries[min(self._tries)]

    def tell(self, event: ev.MemberOpened) -> GroupIOError | None:
        """Why the try ended that this member comes too late for; told once."""
        over = self._tries.get(event.epoch)
        if over is None or event.rank in over.ranks:
            return None
        over.ranks.add(event.rank)
        return reasons.missed(event.rank, over.error)

    def lose(self, client: str) -> None:
        """A client is gone: whoever comes now may belong to the next life of the job."""
        self._tries = {e: over for e, over in self._tries.items() if client not in over.clients}

    def forget(self, launch_id: str | None) -> None:
        """A new incarnation of this launch begins: it missed no group of another one."""
        self._tries = {
            e: over
            for e, over in self._tries.items()
            if over.clients and over.launch_id == launch_id
        }
