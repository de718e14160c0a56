"""The memory ledger of a node: which ranges of which arena hold memory, and for whom.

An arena is a sparse file; only extents hold memory. An extent is FREE (warm: its pages exist and
are reused without a first touch), LEASED to a save, or QUARANTINED: its save is over, but its
writer has not said that it stopped. The sum over all extents never exceeds the budget.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

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
    """A range of an arena that holds memory; ``freed_at`` orders the free ones by age."""

    arena: int
    offset: int
    length: int
    use: Use = Use.LEASED
    freed_at: int = 0


@dataclass(slots=True)
class Ledger:
    """Extents of all arenas under one budget, in bytes."""

    budget: int
    extents: list[Extent] = field(default_factory=list)
    _ends: dict[int, int] = field(default_factory=dict)
    _clock: int = 0

    def total(self, use: Use | None = None) -> int:
        """Bytes held for this use, or for all uses."""
        return sum(e.length for e in self.extents if use is None or e.use is use)

    @property
    def available(self) -> int:
        """Bytes that a new group could get now, free extents given back if need be."""
        return self.budget - self.total(Use.LEASED) - self.total(Use.QUARANTINED)

    def lease(self, arena: int, length: int, spare: int = 0) -> Extent:
        """An extent of at least ``length`` bytes; a free one of the arena if one fits.

        A free extent may be larger than asked, but by no more than ``spare`` bytes: what the
        caller has left when everything else that it was promised is leased. The caller gives back
        what :meth:`overcommit` names before the memory is touched.
        """
        length = extent_bytes(length)
        largest = min(2 * length, length + spare)
        warm = [
            e
            for e in self.extents
            if e.arena == arena and e.use is Use.FREE and length <= e.length <= largest
        ]
        if warm:
            extent = min(warm, key=lambda e: (e.length, e.offset))
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
        over = self.total() - self.budget
        out: list[Extent] = []
        for extent in sorted(self.extents, key=lambda e: e.freed_at):
            if over <= 0:
                break
            if extent.use is Use.FREE:
                self.discard(extent)
                out.append(extent)
                over -= extent.length
        assert over <= 0, "more memory is leased than the budget allows"
        return out

    def free(self, extent: Extent) -> None:
        """The extent's writer stopped: its memory may be reused."""
        self._clock += 1
        extent.use, extent.freed_at = Use.FREE, self._clock

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
