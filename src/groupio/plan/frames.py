"""Finds the tensors that the frames of a segment show: boxes that start at each chunk of a run.

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


class Runs(NamedTuple):
    """Runs of ``items`` in the file: ``rows`` int64[r, 5] has one for each.

    Its columns: the item, the number of its shape (:func:`shapes_of`), the first chunk of it, how
    many chunks, and the byte of the file from which on they stand there.
    """

    items: Sequence[ItemSpec]
    rows: npt.NDArray[np.int64]


def shapes_of(items: Sequence[ItemSpec]) -> npt.NDArray[np.int64]:
    """A number for each item: equal ones have the same dtype, shapes and offsets, int64[n].

    It is -1 for those that torch cannot read from the bytes alone: no arrays, or of a dtype that
    it does not know.
    """
    tensor = ItemKind.TENSOR
    numbers: dict[tuple[object, ...], int] = {}
    return np.fromiter(
        (
            numbers.setdefault(
                (item.dtype, item.shape, item.global_shape, item.offsets), len(numbers)
            )
            if item.kind is tensor
            and (element := DTYPE_BYTES.get(item.dtype)) is not None
            and item.nbytes == element * prod(item.shape)
            else -1
            for item in items
        ),
        np.int64,
        len(items),
    )


def framable(items: Sequence[ItemSpec]) -> npt.NDArray[np.bool_]:
    """Which of ``items`` torch can read from the bytes alone."""
    return shapes_of(items) >= 0


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


def frame_table(batches: Iterable[Runs]) -> FrameTable:
    """The frames of a file with these runs, of :func:`framable` items: a row for each chunk.

    The runs repeat a few shapes, layer after layer, and each is worked out once.
    """
    kind_rows: dict[Kind, int] = {}
    columns: list[npt.NDArray[np.int64]] = [np.empty((3, 0), np.int64)]
    for items, rows in batches:
        if not len(rows):
            continue
        owners, shapes, firsts, counts, offsets = rows.T
        codes = (shapes * (firsts.max(initial=0) + 1) + firsts) * (counts.max(initial=0) + 1)
        _, examples, which = np.unique(codes + counts, return_index=True, return_inverse=True)
        order = np.argsort(examples)  # kinds are listed as they first appear
        examples, which = examples[order], np.argsort(order)[which]
        made = []
        for run in examples.tolist():
            spec = items[owners[run]]
            kinds = run_kinds(spec, find_cuts(spec), int(firsts[run]), int(counts[run]))
            element = DTYPE_BYTES[spec.dtype]
            numbered = [kind_rows.setdefault(kind, len(kind_rows)) for kind in kinds]
            made.append((numbered, [kind.skip * element for kind in kinds]))
        sizes = counts[examples]
        starts = np.cumsum(sizes) - sizes
        in_run = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        take = np.repeat(starts[which], counts) + in_run
        kinds_of_all, skips = np.concatenate([np.array(one, np.int64) for one in made], axis=1)
        runs = np.repeat(offsets, counts)
        columns.append(np.stack((runs + skips[take], runs, kinds_of_all[take])))
    chunk_offsets, run_offsets, kinds_column = np.concatenate(columns, axis=1)
    return FrameTable(chunk_offsets, run_offsets, kinds_column.astype(np.int32), tuple(kind_rows))
