"""The members of a job by their Hellos, so that no group waits for a rank that will not come.

A rank is known here from its connection on, long before its first save. When it goes away before
it came to a group that waits for it, the group gives it a short while to come back and then fails
naming it. That a rank merely has not connected yet says nothing: the group's deadline is for that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol.group import Group

ENDED_GRACE_S = 5.0
"""A rank whose process ended may be started again; so long a group waits for it."""

LEFT_GRACE_S = 20.0
"""A process that only closed its client may connect again, and has more to do before its save."""


class Way(StrEnum):
    """How a rank went away."""

    ENDED = "ended before calling save and did not come back"
    LEFT = "closed the connection before calling save and did not come back"
    GAVE_UP = "lost the agent during this save and did not repeat it"


_GRACE_S = {Way.ENDED: ENDED_GRACE_S, Way.LEFT: LEFT_GRACE_S, Way.GAVE_UP: ENDED_GRACE_S}


class Life(NamedTuple):
    """What all members of one life of the job say alike when they connect."""

    job: str
    world_size: int
    launch_id: str | None

    def includes(self, arrived: ev.ClientArrived) -> bool:
        """The client is of this life, as far as its Hello tells."""
        return (
            arrived.job in (None, self.job)
            and arrived.world_size == self.world_size
            and arrived.launch_id == self.launch_id
        )


@dataclass(slots=True)
class _Person:
    """A client; ``number`` and ``lost`` are moments: when it came, and when it went (0: never)."""

    arrived: ev.ClientArrived
    number: int
    lost: int = 0
    process_gone: bool = False

    @property
    def life(self) -> tuple[str | None, int, str | None]:
        return self.arrived.job, self.arrived.world_size, self.arrived.launch_id


class Watch(NamedTuple):
    """A timer: the group gives the rank time to come back."""

    group: int
    rank: int
    way: Way


@dataclass(slots=True)
class Presence:
    """The clients of one job, and the groups that wait for some of them to come back."""

    _persons: dict[str, _Person] = field(default_factory=dict)
    _watches: dict[str, Watch] = field(default_factory=dict)
    _moment: int = 0

    def arrive(self, event: ev.ClientArrived) -> bool:
        """A client said Hello; False when that is known."""
        if event.client in self._persons:
            return False
        self._moment += 1
        person = self._persons[event.client] = _Person(event, self._moment)
        for old in self._same(person):
            # The same process came back: it saw all that it had seen before.
            person.number = min(person.number, old.number)
            if old.lost:
                del self._persons[old.arrived.client]
        return True

    @property
    def moment(self) -> int:
        """Counts arrivals and losses of clients."""
        return self._moment

    def came(self, client: str) -> int:
        """The moment at which the process of this client came; 0 when that is not known."""
        person = self._persons.get(client)
        return 0 if person is None else person.number

    def until(self, moment: int, life: Life) -> list[ev.ClientArrived]:
        """The clients of this life that are connected and had come by ``moment``."""
        return [
            p.arrived
            for p in self._persons.values()
            if p.number <= moment and not p.lost and life.includes(p.arrived)
        ]

    def on_node(self, node: str) -> list[ev.ClientArrived]:
        """The clients that are connected to this node's agent."""
        return [p.arrived for p in self._persons.values() if p.arrived.node == node and not p.lost]

    def revive(self, client: str) -> None:
        """A client that was given up is there after all: it will be taken for a new one."""
        person = self._persons.get(client)
        if person is not None and person.lost:
            del self._persons[client]

    def _same(self, person: _Person) -> list[_Person]:
        """Other clients of the same process, as long as it lives, with the same place."""
        return [
            other
            for other in self._persons.values()
            if other is not person
            and not other.process_gone
            and other.arrived.process == person.arrived.process
            and other.arrived.node == person.arrived.node
            and (other.life, other.arrived.rank) == (person.life, person.arrived.rank)
        ]

    def lose(self, client: str, *, process_gone: bool) -> int | None:
        """A connection ended, or its process did: the rank, or None when that is no news."""
        person = self._persons.get(client)
        if person is None or person.process_gone or (person.lost and not process_gone):
            return None
        if not process_gone and self._same(person):
            del self._persons[client]
            return None
        self._moment += 1
        person.lost, person.process_gone = self._moment, process_gone
        self._forget()
        return person.arrived.rank

    def _forget(self) -> None:
        """Of the ended ones, keep the newest of each rank, while somebody lives who saw its end."""
        since: dict[object, int] = {}
        for person in self._persons.values():
            if not person.process_gone:
                since[person.life] = min(since.get(person.life, person.number), person.number)
        newest: dict[object, int] = {}
        for person in self._persons.values():
            place = (person.life, person.arrived.rank)
            newest[place] = max(newest.get(place, 0), person.lost)
        self._persons = {
            name: p
            for name, p in self._persons.items()
            if not p.process_gone
            or since.get(p.life, p.lost) < p.lost == newest[p.life, p.arrived.rank]
        }

    # -- groups that wait ---------------------------------------------------------

    def watch(self, group: Group, life: Life, news: int | None) -> list[fx.Effect]:
        """Start the time in which missing ranks may come back.

        ``news`` is the rank of which something was heard just now. Without it the group is what
        is new: that a living process closed its client before then is no reason to miss it.
        """
        effects: list[fx.Effect] = []
        for rank, way in self._absent(group, life).items():
            name = f"{way.name.lower()}-{group.number}-{rank}"
            due = way is not Way.LEFT if news is None else rank == news
            if due and name not in self._watches:
                self._watches[name] = Watch(group.number, rank, way)
                effects.append(fx.StartTimer(name, _GRACE_S[way]))
        return effects

    def expire(self, timer: str) -> Watch | None:
        """What ran out, or None when the timer is none of these."""
        return self._watches.pop(timer, None)

    def given_up(self, over: Watch, group: Group, life: Life) -> dict[int, Way]:
        """The ranks that the group need not wait for any more once ``over`` ran out, and why."""
        absent = self._absent(group, life)
        if absent.get(over.rank) not in (over.way, Way.ENDED):
            return {}
        others = (watch.rank for watch in self._watches.values() if watch.group == over.group)
        return {rank: absent[rank] for rank in sorted({over.rank, *others} & absent.keys())}

    def _absent(self, group: Group, life: Life) -> dict[int, Way]:
        """The missing ranks that went away, as far as the group's members can know.

        A process that ended before any of them connected may be of an earlier life of the job.
        """
        if not any(p.lost or p.arrived.gave_up for p in self._persons.values()):
            return {}  # nobody went away: the usual case, asked for at each member's call
        wanted: dict[int, list[_Person]] = {rank: [] for rank in group.missing}
        for person in self._persons.values():
            if person.arrived.rank in wanted and life.includes(person.arrived):
                wanted[person.arrived.rank].append(person)
        seated = [self._persons.get(seat.opened.client) for seat in group.seats.values()]
        since = min((p.number for p in seated if p is not None), default=self._moment)
        ways = {rank: _way(persons, group.epoch, since) for rank, persons in wanted.items()}
        return {rank: way for rank, way in ways.items() if way is not None}


def _way(persons: list[_Person], epoch: int, since: int) -> Way | None:
    """How the rank of these clients is away, or None when it is here or never was."""
    here = [p for p in persons if not p.lost]
    if here:
        return Way.GAVE_UP if any(epoch in p.arrived.gave_up for p in here) else None
    if any(not p.process_gone for p in persons):
        return Way.LEFT
    return Way.ENDED if any(p.lost > since for p in persons) else None
