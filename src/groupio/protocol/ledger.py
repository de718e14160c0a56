"""The memory ledger of a node: which ranges of which arena hold memory, and for whom.

An arena is a sparse file; only extents hold memory. An extent is FREE (warm: its pages exist and
are reused without a first touch), LEASED to a save, or QUARANTINED: its save is over, but its
writer has not said that it stopped. The sum over all extents never exceeds the budget.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from groupio.model import DecisionKey

EXTENT_ALIGN = 2 << 20
"""Extents start and end at multiples of this, so that few sizes occur and reuse is likely."""


def extent_bytes(length: int) -> int:
    """The size of an extent that holds ``length`` bytes."""
    return max(EXTENT_ALIGN, -(-length // EXTENT_ALIGN) * EXTENT_ALIGN)


class Use(StrEnum):
    """What an extent's memory is for."""

    FREE = "free"
    LEASED = "leased"
    QUARANTINED = "quarantined"


@dataclass(slots=True)
class Extent:
    """A range of an arena that holds memory; ``freed_at`` orders the free ones by age.

    ``content`` is the committed epoch whose chunks a free one still holds, None if it holds none.
    """

    arena: int
    offset: int
    length: int
    use: Use = Use.LEASED
    freed_at: int = 0
    content: DecisionKey | None = None


@dataclass(slots=True)
class Ledger:
    """Extents of all arenas under one budget, in bytes."""

    budget: int
    extents: list[Extent] = field(default_factory=list)
    reserved: int = 0
    """Bytes that the agent itself uses, outside of all arenas: windows of reads."""
    _ends: dict[int, int] = field(default_factory=dict)
    _clock: int = 0

    def total(self, use: Use | None = None) -> int:
        """Bytes held for this use, or for all uses."""
        return sum(e.length for e in self.extents if use is None or e.use is use)

    @property
    def available(self) -> int:
        """Bytes that a new group could get now, free extents given back if need be."""
        held = self.total(Use.LEASED) + self.total(Use.QUARANTINED)
        return self.budget - self.reserved - held

    def lease(self, arena: int, length: int, spare: int = 0, *, sparing: bool = False) -> Extent:
        """An extent of at least ``length`` bytes; a free one of the arena if one fits.

        A free extent may be larger than asked, but by no more than ``spare`` bytes: what the
        caller has left when everything else that it was promised is leased. The caller gives back
        what :meth:`overcommit` names before the memory is touched. ``sparing``: use memory
        without content first, then the oldest content, and the newest content not at all as long
        as the budget has room for a new extent.
        """
        length = extent_bytes(length)
        largest = min(2 * length, length + spare)
        warm = [
            e
            for e in self.extents
            if e.arena == arena and e.use is Use.FREE and length <= e.length <= largest
        ]
        if sparing and self.total() + self.reserved + length <= self.budget:
            newest = max(self.extents, key=_age, default=None)
            kept = None if newest is None else newest.content
            warm = [e for e in warm if e.content is None or e.content != kept]
        if warm:
            extent = min(warm, key=lambda e: (_age(e) if sparing else 0, e.length, e.offset))
            extent.use = Use.LEASED
            return extent
        extent = Extent(arena, self._ends.get(arena, 0), length)
        self._ends[arena] = extent.offset + length
        self.extents.append(extent)
        return extent

    def discard(self, extent: Extent) -> None:
        """Take a free extent out; the caller punches it."""
        assert extent.use is Use.FREE
        self.extents.remove(extent)

    def overcommit(self) -> list[Extent]:
        """Take free extents out, oldest first, until the budget holds; the caller punches them."""
        over = self.total() + self.reserved - self.budget
        out: list[Extent] = []
        for extent in sorted(self.extents, key=lambda e: (e.content is not None, e.freed_at)):
            if over <= 0:
                break
            if extent.use is Use.FREE:
                self.discard(extent)
                out.append(extent)
                over -= extent.length
        assert over <= 0, "more memory is leased than the budget allows"
        return out

    def free(self, extent: Extent, content: DecisionKey | None = None) -> None:
        """The extent's writer stopped: its memory may be reused; until then it has ``content``."""
        self._clock += 1
        extent.use, extent.freed_at, extent.content = Use.FREE, self._clock, content

    def quarantine(self, extent: Extent) -> None:
        """The extent's save is over, but its writer may still write."""
        extent.use = Use.QUARANTINED

    def drop_arena(self, arena: int) -> None:
        """Forget an arena; it must not be leased or quarantined any more."""
        assert all(e.use is Use.FREE for e in self.extents if e.arena == arena)
        self.extents = [e for e in self.extents if e.arena != arena]
        self._ends.pop(arena, None)

    def held(self, arena: int) -> bool:
        """The arena has leased or quarantined memory."""
        return any(e.arena == arena and e.use is not Use.FREE for e in self.extents)


def _age(extent: Extent) -> int:
    """Orders extents by how new their content is; those without any come first."""
    return 0 if extent.content is None else extent.freed_at
