"""Few classes of chunks to write, even where chunks have thousands of different lengths.

A class is a holder set and an exact length. When there are too many, chunks of the same holders and
about the same length are strung together and the string is cut into *bundles* of one length at the
nearest borders of chunks. A run of bundles has, within one chunk, the bytes that the plan counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from groupio.plan.ordering import number_keys, stable_order
from groupio.plan.write import WriteClasses

Number = TypeVar("Number", np.int32, np.int64)

CLASSES_MAX = 512
"""More exact classes than this are bundled: planning takes time per class."""

BUNDLES = 256
"""A string is cut into at most about so many bundles, none shorter than its longest chunk."""


class Bundled(NamedTuple):
    """Classes, and the *unit* of each chunk: a row of ``classes.chunk_class``, int64[n].

    ``unit`` is -1 for chunks that need no writing; it is None when each chunk is its own unit.
    """

    classes: WriteClasses
    unit: npt.NDArray[np.int64] | None


def bundle(
    lengths: npt.NDArray[np.int64],
    holder_set: npt.NDArray[np.int32],
    holder_sets: Sequence[tuple[int, ...]],
    wanted: npt.NDArray[np.bool_],
    classes_max: int = CLASSES_MAX,
) -> Bundled:
    """The classes of the ``wanted`` (bool[n]) chunks, about ``classes_max`` of them at most.

    Chunk ``c`` of ``lengths[c]`` bytes is held by the nodes ``holder_sets[holder_set[c]]``. There
    are more classes only where there are more holder sets.
    """
    chunks = None if wanted.all() else np.flatnonzero(wanted)
    spans = lengths if chunks is None else lengths[chunks]
    sets = holder_set if chunks is None else holder_set[chunks]
    different, number = number_keys(spans)
    if len(different) <= classes_max:
        width = max(len(different), 1)
        kinds, row = number_keys(sets.astype(np.int64) * width + number)
        if len(kinds) <= classes_max:
            classes = WriteClasses(
                holders=tuple(holder_sets[s] for s in (kinds // width).tolist()),
                lengths=different[kinds % width],
                counts=np.bincount(row, minlength=len(kinds)),
                chunk_class=row if chunks is None else _spread(row, chunks, len(lengths)),
            )
            return Bundled(classes, None)
    # Lengths within a factor of two, or all lengths where that is not few enough either.
    sizes = np.frexp(spans.astype(np.float64))[1]
    kinds, row = number_keys(sets.astype(np.int64) * 64 + sizes)
    if 2 * len(kinds) > classes_max:
        kinds, row = number_keys(sets.astype(np.int64) * 64)
    order = stable_order(row)
    units, classes = _cut(spans[order], row[order], [holder_sets[k // 64] for k in kinds.tolist()])
    return Bundled(
        classes, _spread(units, order if chunks is None else chunks[order], len(lengths))
    )


def _spread(
    values: npt.NDArray[Number], chunks: npt.NDArray[np.int64], n: int
) -> npt.NDArray[Number]:
    """``values`` of these chunks, -1 for the others."""
    spread = np.full(n, -1, values.dtype)
    spread[chunks] = values
    return spread


def _cut(
    spans: npt.NDArray[np.int64],
    string: npt.NDArray[np.int32],
    holders: Sequence[tuple[int, ...]],
) -> tuple[npt.NDArray[np.int64], WriteClasses]:
    """Cut each string, whose chunks stand together, into bundles: the unit of each chunk."""
    count = len(holders)
    starts = np.searchsorted(string, np.arange(count))
    amounts = np.add.reduceat(spans, starts)
    longest = np.maximum.reduceat(spans, starts)
    step = np.maximum(longest, -(-amounts // BUNDLES))
    begins = np.cumsum(spans) - spans
    begins -= begins[starts][string]
    # No bundle is empty: none is shorter than a chunk.
    within = begins // step[string]
    bundles = within[np.append(starts[1:], len(spans)) - 1] + 1
    first = np.cumsum(bundles) - bundles
    # All bundles but the last one of a string have one length: two classes.
    chunk_class = np.repeat(2 * np.arange(count), bundles)
    chunk_class[first + bundles - 1] += 1
    sizes = np.stack((step, amounts - (bundles - 1) * step), axis=1).reshape(-1)
    counts = np.stack((bundles - 1, np.ones(count, np.int64)), axis=1).reshape(-1)
    kept = counts > 0
    renumber = (np.cumsum(kept) - 1).astype(np.int32)
    return first[string] + within, WriteClasses(
        holders=tuple(holders[c // 2] for c in np.flatnonzero(kept).tolist()),
        lengths=sizes[kept],
        counts=counts[kept],
        chunk_class=renumber[chunk_class],
    )
