"""Which tensors the frames of a segment show: boxes that start at each chunk of a run.

A run is some chunks of one item that follow each other in memory and in the file. Torch can read
a box of the item out of it wherever the elements of the box are one stretch of the run. From each
chunk on that is the largest such box: so a later reader finds one, whichever chunks of the run it
is still interested in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from groupio.format.frames import DTYPE_BYTES, FrameTable, Kind
from groupio.model import ItemKind, ItemSpec
from groupio.plan.chunks import Cuts, cut_edges, find_cuts


class Run(NamedTuple):
    """``chunks`` chunks from number ``first`` on of ``spec``, from byte ``offset`` of a file on."""

    spec: ItemSpec
    first: int
    chunks: int
    offset: int


def framable(items: Sequence[ItemSpec]) -> npt.NDArray[np.bool_]:
    """Which of ``items`` torch can read from the bytes alone: arrays of a dtype that it knows."""
    tensor = ItemKind.TENSOR
    return np.fromiter(
        (
            item.kind is tensor
            and (element := DTYPE_BYTES.get(item.dtype)) is not None
            and item.nbytes == element * prod(item.shape)
            for item in items
        ),
        np.bool_,
        len(items),
    )


def run_kinds(spec: ItemSpec, cuts: Cuts, first: int, count: int) -> list[Kind]:
    """The tensors that start at the chunks of a run, one for each, in their order.

    ``cuts`` are those of ``spec``, which is :func:`framable`. A box that starts with a whole index
    of the dimensions outside the cut goes on over as many of them as the run has; any other one
    ends with its index.
    """
    if cuts.n_chunks == 1:
        return [Kind(spec.dtype, spec.shape, 0, prod(spec.shape))]
    dim, blocks, end = cuts.dim, cuts.blocks, first + count
    inner = spec.shape[dim + 1 :]
    row = prod(inner)
    edges = (cut_edges(cuts) - cuts.start).tolist()

    def rows_before(chunk: int) -> int:
        """Indices of the cut dimension before ``chunk``, over the whole item."""
        outer, block = divmod(chunk, blocks)
        return int(outer * cuts.size + edges[block])

    start = rows_before(first)
    record = (rows_before(end) - start) * row
    kinds = []
    for chunk in range(first, end):
        outer, block = divmod(chunk, blocks)
        at = rows_before(chunk)
        whole = (end - chunk) // blocks
        if dim and whole and not block:
            beside = spec.shape[dim - 1]
            indices = min(whole, beside - outer % beside)
            shape = (1,) * (dim - 1) + (indices, *spec.shape[dim:])
        else:
            stop = rows_before(min(end, (outer + 1) * blocks))
            shape = (1,) * dim + (stop - at, *inner)
        kinds.append(Kind(spec.dtype, shape, (at - start) * row, record))
    return kinds


def frame_table(runs: Iterable[Run]) -> FrameTable:
    """The frames of a file with these ``runs``: a row for each chunk of them.

    The runs repeat a few shapes, layer after layer, and each is worked out once.
    """
    kind_rows: dict[Kind, int] = {}
    known: dict[tuple[object, ...], tuple[list[int], list[int]]] = {}
    chunk_offsets: list[int] = []
    run_offsets: list[int] = []
    kinds: list[int] = []
    for spec, first, count, offset in runs:
        key = (spec.dtype, spec.shape, spec.global_shape, spec.offsets, first, count)
        found = known.get(key)
        if found is None:
            made = run_kinds(spec, find_cuts(spec), first, count)
            element = DTYPE_BYTES[spec.dtype]
            rows = [kind_rows.setdefault(kind, len(kind_rows)) for kind in made]
            found = known[key] = rows, [kind.skip * element for kind in made]
        rows, skips = found
        kinds += rows
        run_offsets += [offset] * count
        chunk_offsets += [offset + skip for skip in skips]
    return FrameTable(
        np.array(chunk_offsets, np.int64),
        np.array(run_offsets, np.int64),
        np.array(kinds, np.int32),
        tuple(kind_rows),
    )
