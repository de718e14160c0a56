"""Finds the saved boxes that a tensor or value of the state dict is filled from.

This rank's own items are preferred; what they do not have comes from the other members. Values
that differ between the members and were not declared equal belong to the ranks: rank r gets rank
r's, and a rank that saved none has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from groupio.client.parts import Parts, Saved
from groupio.format.structure import Leaf
from groupio.model import ItemKind, ItemSpec
from groupio.plan.read import Box, cover
from groupio.torch.tensors import Local

CACHED = 1 << 10
"""So many different ways of covering a tensor are remembered; layer after layer has the same."""


class Read(NamedTuple):
    """The part ``box`` of a saved item goes to piece number ``piece`` of the local tensor."""

    saved: Saved
    box: Box
    piece: int = 0


class Fill(NamedTuple):
    """A tensor that is filled in place, and from what."""

    local: Local
    reads: tuple[Read, ...]


class Take(NamedTuple):
    """A value that is made anew: a tensor or array from ``reads``, anything else from one item."""

    spec: ItemSpec
    reads: tuple[Read, ...]


class Missing(NamedTuple):
    """There is no such value for this rank; ``reason`` says why when its name was saved."""

    reason: str = ""


def fill_of(local: Local, leaf: Leaf, parts: Parts) -> Fill | Missing | str:
    """From what a tensor of the state dict is filled; a text says how it differs from ``leaf``."""
    boxes = [piece.box for piece in local.pieces]
    own = parts.own(leaf.name)
    if own:
        spec = own[0].spec
        difference = _difference(local, leaf, spec)
        if difference:
            return difference
        box = boxes[0]
        if len(boxes) == 1 and (spec.offsets, spec.shape) == box:
            return Fill(local, (Read(own[0], box),) if 0 not in box.shape else ())
    reads = _reads(boxes, own) if own else None
    if reads is None:
        found = parts.everyone(leaf.name, boxes)
        if not own:
            if found.differs or not found.saved:
                return _missing(leaf.name, found.differs)
            difference = _difference(local, leaf, found.saved[0].spec)
            if difference:
                return difference
        reads = _reads(boxes, found.saved)
        if reads is None:
            return _hole(boxes, found.saved)
        if found.differs:
            return "ranks saved different values of parts that this rank needs"
    return Fill(local, tuple(reads))


def take_of(leaf: Leaf, parts: Parts) -> Take | Missing | str:
    """From what the saved value ``leaf`` is made anew, sharded tensors whole."""
    saved: Sequence[Saved] = parts.own(leaf.name)
    whole = saved and _whole(saved[0].spec)
    if not whole or saved[0].box != whole:
        found = parts.everyone(leaf.name)
        if found.differs or not found.saved:
            return _missing(leaf.name, found.differs)
        saved = found.saved
    spec = saved[0].spec
    if spec.kind is not ItemKind.TENSOR:
        return Take(spec, (Read(saved[0], saved[0].box),))
    box = _whole(spec)
    reads = _reads([box], saved)
    return _hole([box], saved) if reads is None else Take(spec, tuple(reads))


def same_content(one: Fill, other: Fill, parts: Parts) -> bool:
    """Whether two tensors are filled with equal bytes."""

    def content(fill: Fill) -> list[tuple[object, ...]]:
        return [
            (read.piece, read.box, read.saved.box, parts.rows(read.saved).tobytes())
            for read in fill.reads
        ]

    return content(one) == content(other)


def _reads(boxes: Sequence[Box], saved: Sequence[Saved]) -> list[Read] | None:
    """The reads that together are ``boxes``; None when something of them was not saved."""
    found = _covered(tuple(boxes), tuple([one.box for one in saved]))
    return None if found is None else [Read(saved[n], part, piece) for n, part, piece in found]


@lru_cache(CACHED)
def _covered(
    boxes: tuple[Box, ...], there: tuple[Box, ...]
) -> tuple[tuple[int, Box, int], ...] | None:
    """For each read the number of the saved box, the part of it, and the piece it goes to."""
    reads: list[tuple[int, Box, int]] = []
    for piece, box in enumerate(boxes):
        found = cover(box, there)
        if found.hole is not None:
            return None
        reads += [(number, part, piece) for number, part in found.pieces]
    return tuple(reads)


def _hole(boxes: Sequence[Box], saved: Sequence[Saved]) -> str:
    there = [one.box for one in saved]
    hole = next(filter(None, (cover(box, there).hole for box in boxes)))
    return (
        f"what was saved does not cover the tensor: the part {list(hole.shape)} at "
        f"{list(hole.offsets)} is in none of its {len(saved)} saved parts"
    )


def _whole(spec: ItemSpec) -> Box:
    if spec.kind is not ItemKind.TENSOR:
        return Box(spec.offsets, spec.shape)
    return Box((0,) * len(spec.global_shape), spec.global_shape)


def _missing(name: str, differs: bool) -> Missing:
    if not differs:
        return Missing()
    return Missing(
        f"{name} and the like were saved with different values by several ranks, and this rank "
        "saved none"
    )


def _difference(local: Local, leaf: Leaf, spec: ItemSpec) -> str:
    if spec.kind is not ItemKind.TENSOR:
        return "a tensor here, a plain value saved"
    here, there = local.note or local.dtype, leaf.note or spec.dtype
    if here == there and local.global_shape == spec.global_shape:
        return ""
    return f"{here} {list(local.global_shape)} here, {there} {list(spec.global_shape)} saved"
