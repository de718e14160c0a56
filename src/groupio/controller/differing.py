"""Replicas that are none: which items, on which members, and from which byte on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from groupio.errors import InvalidInput, ReplicaDivergence
from groupio.format.structure import SAMPLE
from groupio.model import NodeReport
from groupio.plan.dedup import Divergence, divergence
from groupio.plan.difference import Difference, first_differences
from groupio.plan.merge import Merged
from groupio.plan.splits import SPLIT, unshared

See = Callable[[int, int, int], memoryview | None]
"""The ``length`` bytes at a virtual offset of a rank's lease: ``see(rank, place, length)``. None
when they are not in this node's memory: of a member elsewhere, or of a wave that has passed."""

LOCATED_MAX = 64
"""Of so many items the differing byte is looked up; an epoch that drifted as a whole has more."""

NAMED_MAX = 5
"""So many items stand in the message; all of them stand in the error's ``items``."""


def check_replicas(epoch: int, reports: Sequence[NodeReport], merged: Merged, see: See) -> None:
    """Compare what was declared equal.

    ReplicaDivergence when items differ; InvalidInput when members divided replicas among each
    other and not all of them handed over their part.
    """
    found = divergence(reports, merged)
    torn = sorted({rank for one in found if one.item.startswith(SPLIT) for rank in one.ranks})
    if torn:
        raise InvalidInput(
            f"Epoch {epoch}: rank(s) {_listed(torn)} divide their replicated tensors otherwise "
            "than the others, so their state dicts differ in names, shapes or placements; give "
            'the same on all ranks, or verify_replicas="full".'
        )
    if found:
        places = first_differences(reports, merged, found[:LOCATED_MAX])
        bytes_at = [None if place is None else first_byte(place, see) for place in places]
        told = [_told(*one) for one in zip(found, places, bytes_at, strict=False)]
        # A sample lies somewhere within its tensor: the message says where.
        offsets = [
            None if one.item.startswith(SAMPLE) else at
            for one, at in zip(found, bytes_at, strict=False)
        ]
        ranks = sorted({rank for one in found for rank in one.ranks})
        more = f" and {len(found) - NAMED_MAX} more" if len(found) > NAMED_MAX else ""
        raise ReplicaDivergence(
            f"Epoch {epoch}: {len(found)} item(s) declared replicated differ between members: "
            f"{'; '.join(told[:NAMED_MAX])}{more}; on rank(s) {_listed(ranks)}. Declare them per "
            "rank, or find out why the replicas drifted apart.",
            items=[one.item.removeprefix(SAMPLE) for one in found],
            members=ranks,
            epoch=epoch,
            offsets=[*offsets, *[None] * (len(found) - len(offsets))],
        )
    for lack in unshared(reports):
        raise InvalidInput(
            f"Epoch {epoch}: {lack.holders} ranks divided their replicated tensors among each "
            f"other and only rank(s) {_listed(lack.ranks)} handed over their parts; save the same "
            'tensors on all ranks that hold them, or give verify_replicas="full".'
        )


def first_byte(place: Difference, see: See) -> int | None:
    """The first byte of the item's local bytes that is not the same on all of ``place.ranks``.

    None when it cannot be looked up, because not all of the bytes are in this node's memory.
    """
    length = place.stop - place.start
    views = [see(r, at, length) for r, at in zip(place.ranks, place.places, strict=True)]
    arrays = [np.frombuffer(view, np.uint8) for view in views if view is not None]
    if len(arrays) < len(views):
        return None
    unequal = np.zeros(length, np.bool_)
    for array in arrays[1:]:
        unequal |= array != arrays[0]
    # Digests that differ mean bytes that differ, unless something else is wrong with the memory.
    return place.start + int(unequal.argmax()) if unequal.any() else None


def _told(found: Divergence, place: Difference | None, offset: int | None) -> str:
    name = repr(found.item.removeprefix(SAMPLE))
    if place is None:
        return f"{name} (in kind, dtype, shape or size)"
    if found.item.startswith(SAMPLE):
        shape, corner = list(place.spec.shape), list(place.spec.offsets)
        name += f", of which the part {shape} at {corner} was compared,"
    ranks = f"rank {place.ranks[0]} and rank(s) {_listed(place.ranks[1:])}"
    if offset is None:
        return f"{name} ({ranks} first differ within bytes {place.start} to {place.stop - 1})"
    return f"{name} ({ranks} first differ at byte {offset})"


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:16])) + (" ..." if len(ranks) > 16 else "")
