"""Tasks, placement and gathering, against plain Python models."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from groupio.agent import hashing
from groupio.agent.flush import gather
from groupio.agent.hashing import TASK_CHUNKS_MAX, digest_chunks, split_tasks
from groupio.agent.placing import NewChunks, Placement, find_runs, place
from groupio.agent.workers import BOUNCE_BYTES
from groupio.format.frames import LOCAL_HEADER
from groupio.model import CHUNK_BYTES, PACK_ITEM_BYTES, PAGE_BYTES

CHUNKS = st.one_of(
    st.integers(1, 5000),
    st.sampled_from([PAGE_BYTES, PACK_ITEM_BYTES - 1, PACK_ITEM_BYTES, CHUNK_BYTES]),
    st.integers(PACK_ITEM_BYTES, CHUNK_BYTES),
)
ITEMS = st.lists(st.lists(CHUNKS, min_size=1, max_size=12), min_size=1, max_size=12)


def joined(items: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """The lengths of all chunks, and the item of each."""
    owners = [i for i, chunks in enumerate(items) for _ in chunks]
    return np.array([n for chunks in items for n in chunks], np.int64), np.array(owners, np.int64)


@given(ITEMS)
def test_tasks_cover_all_chunks_and_cut_only_large_items(items: list[list[int]]) -> None:
    lengths, owners = joined(items)
    tasks = split_tasks(lengths, owners)
    assert [lo for lo, _ in tasks] == [0, *(hi for _, hi in tasks[:-1])]
    assert tasks[-1][1] == len(lengths)
    for lo, hi in tasks:
        assert lo < hi
        if hi < len(lengths) and owners[hi - 1] == owners[hi]:
            assert owners[lo] == owners[hi], "the item begins with the task"
            assert int(lengths[lo : hi + 1].sum()) + PAGE_BYTES + 38 * 13 > BOUNCE_BYTES


def test_four_whole_chunks_are_one_task() -> None:
    lengths = np.full(10, CHUNK_BYTES)
    assert split_tasks(lengths, np.zeros(10, np.int64)) == [(0, 4), (4, 8), (8, 10)]


def test_no_chunks_are_one_empty_task_and_tiny_ones_are_limited() -> None:
    nothing = np.empty(0, np.int64)
    assert split_tasks(nothing, nothing) == [(0, 0)]
    n = 3 * TASK_CHUNKS_MAX + 1
    for owners in (np.arange(n), np.zeros(n, np.int64)):
        tasks = split_tasks(np.full(n, 8, np.int64), owners)
        assert [hi - lo for lo, hi in tasks] == [TASK_CHUNKS_MAX] * 3 + [1]


def test_runs_end_at_gaps_and_with_their_item() -> None:
    chunks = np.array([3, 4, 5, 7, 8, 9, 10], np.int64)
    items = np.array([0, 0, 1, 1, 1, 2, 2], np.int64)
    assert find_runs(chunks, items).tolist() == [0, 2, 3, 5]


@st.composite
def laid_out(draw: st.DrawFn) -> tuple[NewChunks, bool]:
    """New chunks of one task, as the layout of a member puts them in the arena."""
    lengths, owners = joined(draw(ITEMS))
    hi = split_tasks(lengths, owners)[0][1]
    lengths, owners = lengths[:hi], owners[:hi]
    align = draw(st.sampled_from([64, PAGE_BYTES]))
    starts, at, previous = [], draw(st.integers(0, 9)) * 64, -1
    for length, owner in zip(lengths.tolist(), owners.tolist(), strict=True):
        if owner != previous:
            at = -(-at // align) * align
        starts.append(at)
        at, previous = at + length, owner
    own = np.flatnonzero(draw(st.lists(st.booleans(), min_size=hi, max_size=hi)))
    own = own if len(own) else np.arange(hi)
    first = find_runs(own, owners[own])
    framed = np.array([owner % 3 != 0 for owner in owners[own][first].tolist()], np.bool_)
    with_frames = draw(st.booleans())
    framed &= with_frames
    return NewChunks(np.array(starts)[own], lengths[own], first, framed), with_frames


def runs_of(new: NewChunks) -> list[tuple[int, int, bool]]:
    """The first chunk of each run, the one behind its last, and whether it is framed."""
    bounds = [*new.first.tolist(), len(new.lengths)]
    return list(zip(bounds[:-1], bounds[1:], new.framed.tolist(), strict=True))


@given(laid_out())
def test_runs_stay_whole_and_large_ones_lie_in_their_pages_as_before(
    case: tuple[NewChunks, bool],
) -> None:
    new, _ = case
    placed = place(new)
    end, packing = 0, False
    for lo, hi, framed in runs_of(new):
        head = 38 if framed else 0
        length = int(new.lengths[lo:hi].sum())
        offset, start = int(placed.offsets[lo]), int(new.starts[lo])
        if length >= PACK_ITEM_BYTES:
            assert offset >= -(-end // PAGE_BYTES) * PAGE_BYTES + head
            assert (offset - start) % PAGE_BYTES == 0
            assert offset - end < 3 * PAGE_BYTES
        else:
            assert offset == (end if packing else -(-end // PAGE_BYTES) * PAGE_BYTES) + head
        for k in range(lo, hi):
            assert placed.offsets[k] == offset
            offset += int(new.lengths[k])
        end, packing = offset, length < PACK_ITEM_BYTES
    assert placed.total == -(-end // PAGE_BYTES) * PAGE_BYTES == int(placed.sizes.sum())


def written(new: NewChunks, placed: Placement, memory: mmap.mmap) -> bytes:
    """What the placement means, byte by byte."""
    expected = bytearray(placed.total)
    triples = zip(placed.offsets.tolist(), new.starts.tolist(), new.lengths.tolist(), strict=True)
    for offset, start, length in triples:
        expected[offset : offset + length] = memory[start : start + length]
    for lo, _, framed in runs_of(new):
        if framed:
            offset = int(placed.offsets[lo])
            assert not any(expected[offset - 38 : offset])
            expected[offset - 38 : offset] = LOCAL_HEADER
    return bytes(expected)


@given(laid_out())
@settings(max_examples=50, deadline=None)
def test_gathered_pages_are_the_chunks_headers_and_zeros(case: tuple[NewChunks, bool]) -> None:
    new, _ = case
    memory = mmap.mmap(-1, 2 * BOUNCE_BYTES)
    memory[:] = np.random.default_rng(0).bytes(len(memory))
    bounce = mmap.mmap(-1, BOUNCE_BYTES)
    bounce[:] = b"\xff" * BOUNCE_BYTES
    placed = place(new)
    gathered = gather(memoryview(memory), placed, lambda: bounce)
    assert gathered is not None
    for view in gathered.views:
        assert len(view) % PAGE_BYTES == 0
        assert np.frombuffer(view, np.uint8).ctypes.data % PAGE_BYTES == 0
    assert b"".join(gathered.views) == written(new, placed, memory)


def one_run(start: int, *lengths: int, framed: bool = False) -> NewChunks:
    sizes = np.array(lengths, np.int64)
    starts = start + np.cumsum(sizes) - sizes
    return NewChunks(starts, sizes, np.zeros(1, np.int64), np.array([framed]))


@pytest.mark.parametrize("framed", [False, True])
def test_whole_pages_need_no_bounce_buffer(framed: bool) -> None:
    memory = memoryview(mmap.mmap(-1, 4 * CHUNK_BYTES))
    new = one_run(0, *[CHUNK_BYTES] * 4, framed=framed)
    gathered = gather(memory, place(new), lambda: pytest.fail("not needed"))
    assert gathered is not None
    assert gathered.bounce is None
    assert [len(view) for view in gathered.views] == [PAGE_BYTES] * framed + [4 * CHUNK_BYTES]
    assert np.shares_memory(np.frombuffer(gathered.views[-1]), np.frombuffer(memory))


@pytest.mark.parametrize("framed", [False, True])
@pytest.mark.parametrize("start", [0, 1, 37, 38, 64, PAGE_BYTES - 1])
def test_of_a_large_run_only_the_partial_pages_are_copied(start: int, framed: bool) -> None:
    memory = memoryview(mmap.mmap(-1, 2 * CHUNK_BYTES))
    bounce = mmap.mmap(-1, BOUNCE_BYTES)
    new = one_run(start, PACK_ITEM_BYTES, PACK_ITEM_BYTES + 5, framed=framed)
    gathered = gather(memory, place(new), lambda: bounce)
    assert gathered is not None
    copied = [v for v in gathered.views if np.shares_memory(np.frombuffer(v), bounce)]
    assert sum(map(len, copied)) <= 3 * PAGE_BYTES
    assert sum(map(len, gathered.views)) == place(new).total


def test_a_stop_gives_nothing() -> None:
    memory = memoryview(mmap.mmap(-1, CHUNK_BYTES))
    assert gather(memory, place(one_run(0, CHUNK_BYTES - 1)), lambda: None) is None


def test_digests_are_blake3_of_each_chunk() -> None:
    data = memoryview(bytes(range(256)) * 40)
    starts, lengths = np.array([0, 64, 5000]), np.array([64, 1, 5240])
    assert digest_chunks(data, starts, lengths) == [
        blake3(data[0:64]).digest(),
        blake3(data[64:65]).digest(),
        blake3(data[5000:10240]).digest(),
    ]
    assert hashing.digest_chunks(data, starts[:0], lengths[:0]) == []
