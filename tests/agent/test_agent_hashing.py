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
from groupio.agent.hashing import TASK_CHUNKS_MAX, digest_chunks, place, split_tasks
from groupio.agent.workers import BOUNCE_BYTES
from groupio.model import CHUNK_BYTES, PACK_ITEM_BYTES, PAGE_BYTES

LENGTHS = st.lists(
    st.one_of(
        st.integers(1, 5000),
        st.sampled_from([PAGE_BYTES, PACK_ITEM_BYTES - 1, PACK_ITEM_BYTES, CHUNK_BYTES]),
        st.integers(PACK_ITEM_BYTES, CHUNK_BYTES),
    ),
    min_size=1,
    max_size=40,
).map(lambda values: np.array(values, np.int64))


@given(LENGTHS)
def test_tasks_cover_all_chunks_and_fit_a_bounce_buffer(lengths: np.ndarray) -> None:
    tasks = split_tasks(lengths)
    assert [lo for lo, _ in tasks] == [0, *(hi for _, hi in tasks[:-1])]
    assert tasks[-1][1] == len(lengths)
    for lo, hi in tasks:
        assert lo < hi
        for chosen in (slice(lo, hi), slice(lo, hi, 2)):  # duplicates leave gaps
            assert place(lengths[chosen]).nbytes <= BOUNCE_BYTES


def test_no_chunks_are_one_empty_task_and_tiny_ones_are_limited() -> None:
    assert split_tasks(np.empty(0, np.int64)) == [(0, 0)]
    tasks = split_tasks(np.full(3 * TASK_CHUNKS_MAX + 1, 8, np.int64))
    assert [hi - lo for lo, hi in tasks] == [TASK_CHUNKS_MAX] * 3 + [1]


@given(LENGTHS)
def test_large_chunks_and_starts_of_runs_lie_on_pages(lengths: np.ndarray) -> None:
    placed = place(lengths)
    end = 0
    previous_large = True
    for offset, length in zip(placed.offsets.tolist(), lengths.tolist(), strict=True):
        large = length >= PACK_ITEM_BYTES
        if large or previous_large:
            assert offset == -(-end // PAGE_BYTES) * PAGE_BYTES
        else:
            assert offset == end
        end = offset + length
        previous_large = large
    assert placed.nbytes == -(-end // PAGE_BYTES) * PAGE_BYTES
    assert int(placed.sizes.sum()) == placed.nbytes


@st.composite
def laid_out(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Starts and lengths of chunks in memory, some on pages, some not; one task's worth."""
    lengths = draw(LENGTHS)
    lengths = lengths[: split_tasks(lengths)[0][1]]
    align = draw(st.sampled_from([64, PAGE_BYTES]))
    room = -(-lengths // align) * align
    return np.cumsum(room) - room, lengths


@given(laid_out())
@settings(max_examples=50, deadline=None)
def test_gathered_pages_are_the_chunks_and_zeros(case: tuple[np.ndarray, np.ndarray]) -> None:
    starts, lengths = case
    memory = mmap.mmap(-1, 2 * BOUNCE_BYTES)
    memory[:] = np.random.default_rng(0).bytes(len(memory))
    bounce = mmap.mmap(-1, BOUNCE_BYTES)
    bounce[:] = b"\xff" * BOUNCE_BYTES
    placed = place(lengths)
    gathered = gather(memoryview(memory), starts, lengths, placed, lambda: bounce)
    assert gathered is not None
    for view in gathered.views:
        assert len(view) % PAGE_BYTES == 0
        assert np.frombuffer(view, np.uint8).ctypes.data % PAGE_BYTES == 0
    expected = bytearray(placed.nbytes)
    triples = zip(placed.offsets.tolist(), starts.tolist(), lengths.tolist(), strict=True)
    for offset, start, length in triples:
        expected[offset : offset + length] = memory[start : start + length]
    assert b"".join(gathered.views) == expected


def test_whole_pages_need_no_bounce_buffer_and_a_stop_gives_nothing() -> None:
    memory = memoryview(mmap.mmap(-1, CHUNK_BYTES))
    starts, lengths = np.array([0]), np.array([CHUNK_BYTES])
    gathered = gather(memory, starts, lengths, place(lengths), lambda: pytest.fail("not needed"))
    assert gathered is not None
    assert gathered.bounce is None
    assert len(gathered.views) == 1
    odd = np.array([CHUNK_BYTES - 1])
    assert gather(memory, starts, odd, place(odd), lambda: None) is None


def test_digests_are_blake3_of_each_chunk() -> None:
    data = memoryview(bytes(range(256)) * 40)
    starts, lengths = np.array([0, 64, 5000]), np.array([64, 1, 5240])
    assert digest_chunks(data, starts, lengths) == [
        blake3(data[0:64]).digest(),
        blake3(data[64:65]).digest(),
        blake3(data[5000:10240]).digest(),
    ]
    assert hashing.digest_chunks(data, starts[:0], lengths[:0]) == []
