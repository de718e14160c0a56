"""Cuts items into chunks.

The cuts lie on a grid in the *global* coordinates of a tensor, so that a rank that holds another
part of it (after a change of world size) finds the same inner chunks, byte for byte, and they
deduplicate against what was saved before.

Inner dimensions are taken whole as long as their byte product fits CHUNK_BYTES. The first one that
does not fit is cut at multiples of as many of its rows as fit; dimensions outside it are cut at
every index. Each chunk is therefore one contiguous run of the row-major local buffer, and the
chunks in row-major order of the grid are that buffer from its first byte to its last.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from groupio.errors import InvalidInput
from groupio.model import CHUNK_BYTES, ItemKind, ItemSpec

ITEM_CHUNKS_MAX = 1 << 24
"""More chunks than this in one item of one member are refused (64 TiB of whole chunks)."""


class Cuts(NamedTuple):
    """How one item is cut: ``outer`` times the same row of ``blocks`` consecutive pieces.

    ``dim`` is the dimension that is cut (``ndim`` of the item when single elements are), at
    multiples of ``step`` in global coordinates; the member has ``size`` indices of it from
    ``start`` on, each of ``row`` bytes.
    """

    dim: int
    outer: int
    blocks: int
    step: int
    start: int
    size: int
    row: int

    @property
    def n_chunks(self) -> int:
        """The number of chunks."""
        return self.outer * self.blocks


def find_cuts(spec: ItemSpec) -> Cuts:
    """The cuts of ``spec`` in a few microseconds, without arrays.

    InvalidInput names the item when its shape, offsets and size contradict each other or when it
    would be cut into more than ITEM_CHUNKS_MAX chunks.
    """
    nbytes = spec.nbytes
    whole = nbytes <= CHUNK_BYTES and (
        spec.kind is not ItemKind.TENSOR or spec.shape == spec.global_shape
    )
    if whole:
        if nbytes < 0:
            raise InvalidInput(f"item {spec.name!r} has a negative size of {nbytes} bytes")
        return Cuts(0, 1, 1 if nbytes else 0, max(nbytes, 1), 0, nbytes, 1)
    if spec.kind is not ItemKind.TENSOR:
        cuts = _cut(0, 1, CHUNK_BYTES, 0, nbytes, 1)
    else:
        cuts = _tensor_cuts(spec)
    if cuts.n_chunks > ITEM_CHUNKS_MAX:
        raise InvalidInput(
            f"item {spec.name!r} of {nbytes} bytes would be cut into {cuts.n_chunks} chunks, more"
            f" than {ITEM_CHUNKS_MAX}; shard it along an outer dimension"
        )
    return cuts


def chunk_grid(spec: ItemSpec) -> npt.NDArray[np.int64]:
    """Lengths in bytes (int64[n]) of the chunks of ``spec``, in the order of its local buffer.

    They add up to ``spec.nbytes``; each is between 1 and CHUNK_BYTES. An empty item has none.
    Raises InvalidInput like :func:`find_cuts`.
    """
    return cut_sizes(find_cuts(spec))


def cut_sizes(cuts: Cuts) -> npt.NDArray[np.int64]:
    """The lengths in bytes (int64[n]) of the chunks that ``cuts`` makes."""
    sizes = np.diff(cut_edges(cuts)) * cuts.row
    return np.tile(sizes, cuts.outer) if cuts.outer > 1 else sizes


def chunk_boxes(
    spec: ItemSpec,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Corners and extents (both int64[n, ndim]) of the chunks of ``spec`` in global coordinates.

    In the order of :func:`chunk_grid`. Items other than tensors are one dimension of bytes. A
    tensor element larger than CHUNK_BYTES takes several chunks in a row, all with its box.
    Raises InvalidInput like :func:`find_cuts`.
    """
    cuts = find_cuts(spec)
    if spec.kind is not ItemKind.TENSOR:
        edges = cut_edges(cuts)
        return edges[:-1, None], np.diff(edges)[:, None]
    _checked_item_bytes(spec)
    n, ndim = cuts.n_chunks, len(spec.shape)
    starts = np.tile(np.array(spec.offsets, np.int64), (n, 1))
    shapes = np.tile(np.array(spec.shape, np.int64), (n, 1))
    if n > 1:
        # One chunk is the whole local box already.
        outer = np.unravel_index(np.arange(n) // cuts.blocks, spec.shape[: cuts.dim] or (1,))
        for d in range(cuts.dim):
            starts[:, d] += outer[d]
            shapes[:, d] = 1
        if cuts.dim < ndim:
            edges = cut_edges(cuts)
            starts[:, cuts.dim] = np.tile(edges[:-1], cuts.outer)
            shapes[:, cuts.dim] = np.tile(np.diff(edges), cuts.outer)
    return starts, shapes


def cut_edges(cuts: Cuts) -> npt.NDArray[np.int64]:
    """The borders of the blocks in the cut dimension, in global coordinates: int64[blocks + 1]."""
    first = cuts.start // cuts.step
    lines = np.arange(first, first + cuts.blocks + 1, dtype=np.int64) * cuts.step
    return np.clip(lines, cuts.start, cuts.start + cuts.size)


def _cut(dim: int, outer: int, step: int, start: int, size: int, row: int) -> Cuts:
    blocks = (start + size - 1) // step - start // step + 1
    return Cuts(dim, outer, blocks, step, start, size, row)


def _tensor_cuts(spec: ItemSpec) -> Cuts:
    item_bytes = _checked_item_bytes(spec)
    if item_bytes == 0:
        return Cuts(0, 1, 0, 1, 0, 0, 1)
    # The bytes of an element are one more, innermost dimension: an element larger than a chunk
    # (a long fixed-size string) is cut by the same rule.
    shape = (*spec.shape, item_bytes)
    extent = (*spec.global_shape, item_bytes)
    offsets = (*spec.offsets, 0)
    inner = 1
    dim = len(shape) - 1
    while dim >= 0 and inner * extent[dim] <= CHUNK_BYTES:
        inner *= extent[dim]
        dim -= 1
    if dim < 0:
        return Cuts(0, 1, 1, spec.nbytes, 0, spec.nbytes, 1)
    return _cut(
        dim,
        prod(shape[:dim]),
        CHUNK_BYTES // inner,
        offsets[dim],
        shape[dim],
        prod(shape[dim + 1 :]),
    )


def _checked_item_bytes(spec: ItemSpec) -> int:
    """Bytes of one element, 0 for an empty tensor; InvalidInput when the spec is not sound."""
    if not len(spec.shape) == len(spec.global_shape) == len(spec.offsets):
        raise InvalidInput(
            f"item {spec.name!r} has shape {spec.shape}, global shape {spec.global_shape} and"
            f" offsets {spec.offsets}; they must have the same number of dimensions"
        )
    for size, extent, offset in zip(spec.shape, spec.global_shape, spec.offsets, strict=True):
        if not 0 <= offset <= offset + size <= extent:
            raise InvalidInput(
                f"item {spec.name!r} of shape {spec.shape} at {spec.offsets} lies outside its"
                f" global shape {spec.global_shape}"
            )
    elements = prod(spec.shape)
    item_bytes = spec.nbytes // elements if elements else 0
    if item_bytes * elements != spec.nbytes:
        raise InvalidInput(
            f"item {spec.name!r} of shape {spec.shape} cannot have {spec.nbytes} bytes;"
            " the size must be a multiple of the number of elements"
        )
    if item_bytes * prod(spec.global_shape) >= 1 << 63:
        raise InvalidInput(
            f"item {spec.name!r} has a global shape {spec.global_shape} of more than 2**63 bytes"
        )
    return item_bytes
