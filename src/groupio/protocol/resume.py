"""State that a new controller takes over: attempts in the store, groups in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from groupio.errors import GroupIOError
from groupio.model import DecisionKey
from groupio.plan.grouped import missing_chunks
from groupio.protocol import effects as fx
from groupio.protocol import events as ev

RESUME_S = 10.0
"""So long nodes are waited for that hold parts of an undecided attempt."""

RESUME_TIMER = "resume"

REFUSALS_REMEMBERED = 4096
"""So many failures are remembered, for members that were cut off when they were told."""


@dataclass(frozen=True, slots=True)
class Rest:
    """What is left of an undecided attempt: on which nodes, and whether it is all there."""

    holders: dict[str, ev.HeldGroup]
    record: ev.SealedRecord | None
    complete: bool
    why: str
    """What is missing, in words."""

    def opened(self) -> dict[int, ev.MemberOpened]:
        """The members that are known, by rank."""
        known = [o for held in self.holders.values() for o in held.opened]
        if self.record is not None:
            known += self.record.opened
        return {opened.rank: opened for opened in sorted(known, key=lambda o: o.rank)}


@dataclass(slots=True)
class Resume:
    """Attempts that are still to be judged, and what living nodes hold of earlier controllers."""

    attempts: dict[DecisionKey, ev.UndecidedAttempt] = field(default_factory=dict)
    held: dict[str, dict[DecisionKey, ev.HeldGroup]] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    """Nodes that are known to be lost, with what they held."""

    def add(self, node: str, held: ev.HeldGroup) -> None:
        """A living node holds a group of an earlier controller."""
        self.held.setdefault(node, {})[held.key] = held

    def take(self, key: DecisionKey, rest: Rest) -> None:
        """The attempt is judged; what is left of it is up to its group."""
        del self.attempts[key]
        for node in rest.holders:
            del self.held[node][key]

    def leftovers(self) -> Iterable[tuple[str, ev.HeldGroup]]:
        """All that nobody will resume."""
        held, self.held = self.held, {}
        for node in sorted(held):
            for key in sorted(held[node]):
                yield node, held[node][key]

    def rest(self, attempt: ev.UndecidedAttempt) -> Rest:
        """What is there of an attempt now.

        Parts of two lives of the job never make one epoch: key, incarnation and world size must
        be equal.
        """
        holders = {
            node: groups[attempt.key]
            for node, groups in sorted(self.held.items())
            if attempt.key in groups and _same(groups[attempt.key], attempt)
        }
        records = [h.record for h in holders.values() if h.record is not None]
        record = next((r for r in records if _same(r, attempt)), None)
        copied = {rank for held in holders.values() for rank in held.copied}
        absent = [rank for rank in range(attempt.world_size) if rank not in copied]
        if not absent:
            return Rest(holders, record, True, "")
        if record is None:
            why = f"the bytes of {len(absent)} of {attempt.world_size} rank(s) are not in memory"
            return Rest(holders, None, False, why)
        missing = _missing(record, holders)
        why = f"{missing} chunks are in the memory of no node any more" if missing else ""
        return Rest(holders, record, not missing, why)

    def is_all(self, attempt: ev.UndecidedAttempt) -> bool:
        """All nodes of the attempt have come and said what they hold of it, or are lost."""
        here = {node for node, groups in self.held.items() if attempt.key in groups}
        return bool(attempt.nodes) and (here | self.gone).issuperset(attempt.nodes)


def _same(part: ev.HeldGroup | ev.SealedRecord, attempt: ev.UndecidedAttempt) -> bool:
    return (part.key, part.incarnation, part.world_size) == (
        attempt.key,
        attempt.incarnation,
        attempt.world_size,
    )


def _missing(record: ev.SealedRecord, holders: Mapping[str, ev.HeldGroup]) -> int:
    """How many chunks of a sealed group neither the nodes that are left nor the store have."""
    lost = frozenset(r.node for r in record.reports if not _has_own(holders.get(r.node)))
    done = [h.stored for h in holders.values() if h.stored is not None]
    copies = {node: held.copies for node, held in holders.items()}
    return missing_chunks(record.reports, lost, done, copies).chunks


def _has_own(held: ev.HeldGroup | None) -> bool:
    """The node still has what its own members copied."""
    return held is not None and len(held.copied) == len(held.opened) > 0


@dataclass(slots=True)
class Refusals:
    """The newest failures that members were told, by client and save."""

    _told: dict[tuple[str, int], GroupIOError] = field(default_factory=dict)

    def note(self, effects: Iterable[fx.Effect]) -> None:
        """Remember the failures among these effects."""
        for effect in effects:
            if isinstance(effect, fx.TellFailed):
                self._told[effect.seat.client, effect.seat.save_id] = effect.error
        while len(self._told) > REFUSALS_REMEMBERED:
            del self._told[next(iter(self._told))]

    def of(self, client: str, save_id: int) -> GroupIOError | None:
        """What became of this save, if it is remembered."""
        return self._told.get((client, save_id))
