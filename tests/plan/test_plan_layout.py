"""A member's items in its lease: no overlap, alignment, chunk order, waves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_help import raw, tensor

from groupio.errors import InvalidInput
from groupio.model import CHUNK_BYTES, PACK_ITEM_BYTES, PAGE_BYTES, ItemSpec
from groupio.plan.chunks import chunk_grid
from groupio.plan.layout import PACK_ALIGN, Wave, lay_out, lease_bytes, waves

SIZES = st.one_of(
    st.integers(0, 200),
    st.sampled_from([PACK_ITEM_BYTES - 1, PACK_ITEM_BYTES, CHUNK_BYTES, CHUNK_BYTES + 1]),
    st.integers(0, 5 * CHUNK_BYTES),
)


@st.composite
def item_tables(draw: st.DrawFn) -> list[ItemSpec]:
    items: list[ItemSpec] = []
    for i in range(draw(st.integers(0, 12))):
        replicated = draw(st.booleans())
        what = draw(st.sampled_from(["raw", "tensor", "shard", "alias"]))
        if what == "alias" and items:
            target = draw(st.integers(0, len(items) - 1))
            other = items[target]
            items.append(
                ItemSpec(
                    f"i{i}",
                    other.kind,
                    other.dtype,
                    other.shape,
                    other.global_shape,
                    other.offsets,
                    other.nbytes,
                    replicated,
                    alias=target,
                )
            )
        elif what == "tensor":
            items.append(tensor(f"i{i}", (draw(SIZES),), item_bytes=2, replicated=replicated))
        elif what == "shard":
            rows = draw(st.integers(0, 900))
            at = draw(st.integers(0, 1000 - rows))
            columns = draw(st.sampled_from([1, 1000, 9000]))
            items.append(
                tensor(f"i{i}", (rows, columns), of=(1000, columns), at=(at, 0), item_bytes=1)
            )
        else:
            items.append(raw(f"i{i}", draw(SIZES), replicated=replicated))
    return items


def root_of(items: list[ItemSpec], i: int) -> int:
    while items[i].alias != -1:
        i = items[i].alias
    return i


@given(items=item_tables())
@settings(deadline=None)
def test_layout_holds_every_item_once(items: list[ItemSpec]) -> None:
    layout = lay_out(items)
    assert layout.total_bytes % PAGE_BYTES == 0
    columns = (
        np.array([item.nbytes for item in items], np.int64),
        np.array([item.replicated for item in items], np.bool_),
        np.array([item.alias for item in items], np.int32),
    )
    assert lease_bytes(*columns) == layout.total_bytes
    end = 0
    owners = [i for i in range(len(items)) if items[i].alias == -1]
    for i in sorted(owners, key=lambda i: (layout.item_start[i], items[i].nbytes)):
        assert layout.item_start[i] >= end
        end = int(layout.item_start[i]) + items[i].nbytes
        large = items[i].nbytes >= PACK_ITEM_BYTES
        assert layout.item_start[i] % (PAGE_BYTES if large else PACK_ALIGN) == 0
    assert end <= layout.total_bytes < end + 2 * PAGE_BYTES
    for i, item in enumerate(items):
        lo, hi = layout.chunk_range(i)
        assert layout.chunk_length[lo:hi].tolist() == chunk_grid(item).tolist()
        assert layout.item_start[i] == layout.item_start[root_of(items, i)]
        # The chunks follow each other through the item's bytes.
        starts = layout.item_start[i] + np.cumsum(layout.chunk_length[lo:hi])
        assert layout.chunk_start[lo:hi].tolist() == (starts - layout.chunk_length[lo:hi]).tolist()
        assert set(layout.chunk_item[lo:hi].tolist()) <= {root_of(items, i)}
    assert (np.diff(layout.chunk_start) > 0).all()
    assert len(layout.chunk_start) == sum(len(chunk_grid(items[i])) for i in owners)


@given(items=item_tables())
@settings(deadline=None)
def test_regions_come_in_order_and_packs_do_not_mix(items: list[ItemSpec]) -> None:
    layout = lay_out(items)
    regions: list[list[int]] = [[], [], []]
    for i, item in enumerate(items):
        if item.alias == -1 and item.nbytes:
            which = 0 if item.nbytes >= PACK_ITEM_BYTES else 1 if item.replicated else 2
            regions[which].append(i)
    end = 0
    for region in regions:
        starts = [int(layout.item_start[i]) for i in region]
        # Items keep their order within a region, so equal tables give equal packs.
        assert starts == sorted(starts)
        if region:
            assert starts[0] // PAGE_BYTES * PAGE_BYTES >= end
            end = starts[-1] + items[region[-1]].nbytes


@given(items=item_tables(), pages=st.integers(2 * CHUNK_BYTES // PAGE_BYTES, 3000))
@settings(deadline=None)
def test_waves_cover_the_chunks_in_windows(items: list[ItemSpec], pages: int) -> None:
    layout = lay_out(items)
    window = pages * PAGE_BYTES
    cut = waves(layout, window)
    at = 0
    for wave in cut:
        assert wave.chunk_lo == at
        at = wave.chunk_hi
        assert wave.virt_lo % PAGE_BYTES == wave.virt_hi % PAGE_BYTES == 0
        assert wave.virt_hi - wave.virt_lo <= window
        for c in range(wave.chunk_lo, wave.chunk_hi):
            assert wave.virt_lo <= layout.chunk_start[c]
            assert layout.chunk_start[c] + layout.chunk_length[c] <= wave.virt_hi
    assert at == len(layout.chunk_start)
    assert all(wave.chunk_lo < wave.chunk_hi for wave in cut) or cut == [Wave(0, 0, 0, 0)]
    if layout.total_bytes <= window:
        assert len(cut) == 1


def test_waves_of_an_uneven_window_end_on_pages() -> None:
    layout = lay_out([raw(f"i{i}", CHUNK_BYTES) for i in range(4)])
    cut = waves(layout, 3 * CHUNK_BYTES - 1)
    assert [(wave.chunk_lo, wave.chunk_hi) for wave in cut] == [(0, 2), (2, 4)]


def test_a_window_below_two_chunks_is_refused() -> None:
    with pytest.raises(InvalidInput, match="memory_bytes"):
        waves(lay_out([]), 2 * CHUNK_BYTES - 1)


def test_nothing_to_save() -> None:
    layout = lay_out([])
    assert layout.total_bytes == 0
    assert len(layout.chunk_start) == len(layout.item_start) == 0
    assert waves(layout, 2 * CHUNK_BYTES) == [Wave(0, 0, 0, 0)]


def test_an_alias_of_an_alias_has_the_owners_chunks() -> None:
    tied = [raw(name, 5 << 20, alias=alias) for name, alias in (("a", -1), ("b", 1), ("c", 2))]
    layout = lay_out([raw("x", 10), *tied])
    assert layout.chunk_range(1) == layout.chunk_range(2) == layout.chunk_range(3) == (0, 2)
    assert layout.chunk_range(0) == (2, 3)


def test_an_alias_may_have_another_shape_over_the_same_cuts() -> None:
    items = [tensor("a", (2048, 1024)), tensor("b", (2, 1024, 1024), alias=0)]
    layout = lay_out(items)
    assert layout.chunk_range(1) == (0, 2)


@pytest.mark.parametrize(
    "items",
    [
        [raw("a", 4), raw("bad", 5, alias=0)],
        [raw("a", 4), raw("bad", 4, alias=1)],
        [raw("a", 4), raw("bad", 4, alias=2)],
        [raw("a", 4), raw("bad", 4, alias=-2)],
        # Equal sizes, but grids of 3 and 2 or of differently long chunks.
        [raw("a", 5 << 20), tensor("bad", (5, 1 << 20), item_bytes=1, alias=0, of=(5, 3 << 20))],
        [
            tensor("a", (5 << 20,), of=(9 << 20,), at=(0,), item_bytes=1),
            tensor("bad", (5 << 20,), of=(9 << 20,), at=(3 << 20,), item_bytes=1, alias=0),
        ],
    ],
)
def test_unlike_aliases_are_refused(items: list[ItemSpec]) -> None:
    with pytest.raises(InvalidInput, match="'bad'"):
        lay_out(items)


def test_absurd_sizes_are_refused() -> None:
    with pytest.raises(InvalidInput, match="no lease"):
        lay_out([raw("x", 1 << 44)] * (1 << 18))
    with pytest.raises(InvalidInput, match="negative"):
        lay_out([raw("x", -4)])


def test_twenty_thousand_small_items_are_one_pack() -> None:
    items = [tensor(f"p{i}", (16,), replicated=i % 2 == 0) for i in range(20_000)]
    layout = lay_out(items)
    pack = -(-10_000 * 64 // PAGE_BYTES) * PAGE_BYTES
    assert layout.total_bytes == 2 * pack
    assert layout.chunk_range(0) == (0, 1)
    assert layout.chunk_range(1) == (10_000, 10_001)
    assert int(layout.item_start[1]) == pack
