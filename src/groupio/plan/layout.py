"""Layout of a member's items in its lease, and the waves in which they pass through it.

A lease is linear: *virtual offsets* count from its start. Large items come first, each on a page
of its own, so that their chunks go to the disk straight from the arena. Small ones follow in two
packs, declared replicas and per-member values apart: a pack of replicas is then the same bytes on
every member that holds them.

The layout depends on the item table alone. The client that copies, the agent that hashes and the
reader that maps chunks back to items each compute it and get the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from groupio.errors import InvalidInput
from groupio.model import CHUNK_BYTES, PACK_ITEM_BYTES, PAGE_BYTES, ItemKind, ItemSpec
from groupio.plan.chunks import Cuts, chunk_grid, cut_sizes, find_cuts

PACK_ALIGN = 64
"""Small items start at multiples of this, so that any dtype may be viewed in place."""

LEASE_BYTES_MAX = 1 << 62
"""A member's items together may not reach this many bytes."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The virtual offsets of a member's items and chunks; all arrays are int64.

    ``item_start[i]``, ``item_chunk[i]``, ``item_chunks[i]``: where item ``i`` starts, its first
    chunk and how many it has; an alias has those of the item that it shares. ``total_bytes`` is
    the size of the lease, a multiple of PAGE_BYTES. ``chunk_start`` (ascending), ``chunk_length``
    and ``chunk_item`` (the item that owns the bytes, never an alias) have one entry per chunk.
    Chunk order is the order of virtual offsets, which is not the order of the items.
    """

    item_start: npt.NDArray[np.int64]
    item_chunk: npt.NDArray[np.int64]
    item_chunks: npt.NDArray[np.int64]
    total_bytes: int
    chunk_item: npt.NDArray[np.int64]
    chunk_start: npt.NDArray[np.int64]
    chunk_length: npt.NDArray[np.int64]

    def chunk_range(self, item: int) -> tuple[int, int]:
        """The chunks ``lo <= c < hi`` of item ``item``, in the order of its bytes."""
        lo = int(self.item_chunk[item])
        return lo, lo + int(self.item_chunks[item])


@dataclass(frozen=True, slots=True)
class Wave:
    """Chunks ``chunk_lo <= c < chunk_hi`` of a layout, which pass through the arena together.

    They lie in the virtual bytes ``virt_lo <= v < virt_hi``, both multiples of PAGE_BYTES.
    """

    chunk_lo: int
    chunk_hi: int
    virt_lo: int
    virt_hi: int


def lay_out(items: Sequence[ItemSpec]) -> Layout:
    """The layout of ``items``.

    Raises InvalidInput naming the item when a spec contradicts itself, when an alias does not
    point to an earlier item that is cut into the same chunks, or when the sizes are absurd.
    """
    n = len(items)
    sizes = [item.nbytes for item in items]
    counts, many = _count_chunks(items)
    if sum(sizes) >= LEASE_BYTES_MAX:
        raise InvalidInput(f"the {n} items add up to {sum(sizes)} bytes, which no lease can hold")
    roots = _resolve_aliases(items, counts)
    nbytes = np.array(sizes, np.int64)
    n_chunks = np.array(counts, np.int64)

    owner = np.ones(n, np.bool_)
    owner[list(roots)] = False
    replicated = np.fromiter((item.replicated for item in items), np.bool_, n)
    item_start, ordered, total_bytes = _place(nbytes, replicated, owner)
    per_item = n_chunks[ordered]
    first = np.cumsum(per_item) - per_item
    item_chunk = np.zeros(n, np.int64)
    item_chunk[ordered] = first
    chunk_item = np.repeat(ordered, per_item)
    chunk_length = nbytes[chunk_item]
    lengths: dict[Cuts, npt.NDArray[np.int64]] = {}
    for i, cuts in many:
        if owner[i]:
            if cuts not in lengths:
                lengths[cuts] = cut_sizes(cuts)
            lo = item_chunk[i]
            chunk_length[lo : lo + counts[i]] = lengths[cuts]
    before = np.cumsum(chunk_length) - chunk_length
    chunk_start = item_start[chunk_item] + before - before[np.repeat(first, per_item)]
    if roots:
        alias, root = np.array(list(roots.items()), np.int64).T
        item_start[alias] = item_start[root]
        item_chunk[alias] = item_chunk[root]
    return Layout(
        item_start=item_start,
        item_chunk=item_chunk,
        item_chunks=n_chunks,
        total_bytes=total_bytes,
        chunk_item=chunk_item,
        chunk_start=chunk_start,
        chunk_length=chunk_length,
    )


def lease_bytes(
    nbytes: npt.NDArray[np.int64], replicated: npt.NDArray[np.bool_], alias: npt.NDArray[np.int32]
) -> int:
    """``total_bytes`` of the layout of valid items, from these columns of their table alone."""
    return _place(nbytes, replicated, alias < 0)[2]


def waves(layout: Layout, window_bytes: int) -> list[Wave]:
    """``layout`` cut into consecutive chunk ranges that each span at most ``window_bytes``.

    A layout that fits is one wave, also one without chunks; no chunk is cut. Raises InvalidInput
    when the window is smaller than two chunks, which is too little to make progress in.
    """
    if window_bytes < 2 * CHUNK_BYTES:
        raise InvalidInput(
            f"a window of {window_bytes} bytes cannot hold two chunks of {CHUNK_BYTES} bytes;"
            " raise memory_bytes"
        )
    starts = layout.chunk_start
    ends = starts + layout.chunk_length
    n = len(starts)
    if not n:
        return [Wave(0, 0, 0, 0)]
    result = []
    lo = 0
    while lo < n:
        virt_lo = int(starts[lo]) // PAGE_BYTES * PAGE_BYTES
        # The wave may end on a page border only, hence the window in whole pages.
        limit = virt_lo + window_bytes // PAGE_BYTES * PAGE_BYTES
        hi = int(np.searchsorted(ends, limit, side="right"))
        virt_hi = -(-int(ends[hi - 1]) // PAGE_BYTES) * PAGE_BYTES
        result.append(Wave(lo, hi, virt_lo, virt_hi))
        lo = hi
    return result


def _count_chunks(items: Sequence[ItemSpec]) -> tuple[list[int], list[tuple[int, Cuts]]]:
    """Chunks per item, and the cuts of those items that have more than one.

    20,000 small items are common: the first test settles whole ones without further work, and
    sharded ones repeat a few shapes, layer after layer.
    """
    counts = []
    many = []
    seen: dict[tuple[object, ...], Cuts] = {}
    tensor = ItemKind.TENSOR
    for i, item in enumerate(items):
        nbytes = item.nbytes
        shape = item.shape
        if 0 <= nbytes <= CHUNK_BYTES and (shape == item.global_shape or item.kind is not tensor):
            counts.append(1 if nbytes else 0)
            continue
        key = (nbytes, shape, item.global_shape, item.offsets, item.kind)
        cuts = seen.get(key)
        if cuts is None:
            cuts = seen[key] = find_cuts(item)
        count = cuts.n_chunks
        counts.append(count)
        if count > 1:
            many.append((i, cuts))
    return counts, many


def _place(
    nbytes: npt.NDArray[np.int64], replicated: npt.NDArray[np.bool_], owner: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], int]:
    """Start of every item that owns its bytes, those items in virtual order, and the end."""
    large = nbytes >= PACK_ITEM_BYTES
    item_start = np.zeros(len(nbytes), np.int64)
    order = []
    end = 0
    for select, align in (
        (large, PAGE_BYTES),
        (~large & replicated, PACK_ALIGN),
        (~large & ~replicated, PACK_ALIGN),
    ):
        region = np.flatnonzero(select & owner)
        room = -(-nbytes[region] // align) * align
        item_start[region] = end + np.cumsum(room) - room
        end = -(-(end + int(room.sum())) // PAGE_BYTES) * PAGE_BYTES
        order.append(region)
    return item_start, np.concatenate(order), end


def _resolve_aliases(items: Sequence[ItemSpec], counts: Sequence[int]) -> dict[int, int]:
    """Alias -> the item that owns its bytes; InvalidInput when they do not fit each other."""
    roots: dict[int, int] = {}
    for i, item in enumerate(items):
        if item.alias == -1:
            continue
        target = item.alias
        if not 0 <= target < i:
            raise InvalidInput(
                f"item {item.name!r} (number {i}) is an alias of item {target};"
                " an alias must point to an earlier item"
            )
        root = roots.get(target, target)
        other = items[root]
        # The same bytes under another grid would be other chunks, and a reader that asks the
        # alias' own spec for its chunks would be given wrong boxes.
        same = item.nbytes == other.nbytes and counts[i] == counts[root]
        if same and counts[i] > 1 and not _same_cuts(item, other):
            same = False
        if not same:
            raise InvalidInput(
                f"item {item.name!r} is an alias of {other.name!r} but has another size or is cut"
                " into other chunks; give it its own bytes"
            )
        roots[i] = root
    return roots


def _same_cuts(a: ItemSpec, b: ItemSpec) -> bool:
    if (a.kind, a.shape, a.global_shape, a.offsets) == (b.kind, b.shape, b.global_shape, b.offsets):
        return True
    return np.array_equal(chunk_grid(a), chunk_grid(b))
