"""The window of a read: who gets which memory, what makes room, what stays while it is used."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from groupio.agent.read_memory import ReadMemory
from groupio.agent.read_window import (
    WINDOW_BYTES_MAX,
    WINDOW_BYTES_MIN,
    Area,
    ReadWindow,
    Slot,
    why_no_window,
    window_bytes,
)
from groupio.model import CHUNK_BYTES

SIZE = 8 * CHUNK_BYTES
ARRIVING = 6 * CHUNK_BYTES


@pytest.fixture
def memory() -> Iterator[ReadMemory]:
    window = ReadWindow(SIZE)
    yield ReadMemory(window, threading.Condition())
    window.close()


def bring(memory: ReadMemory, row: int, length: int = CHUNK_BYTES, start: int = 0) -> bool:
    view = memory.reserve(row, "a", start, start + length)
    if view is None:
        return False
    view[:] = bytes([row % 256]) * length
    assert memory.land(row, "a", keep=True) == length
    return True


def test_ranges_never_overlap_and_all_come_back() -> None:
    rng = np.random.default_rng(5)
    area = Area(4096, 1 << 20)
    held: list[Slot] = []
    for _ in range(4000):
        if held and rng.random() < 0.5:
            area.give(held.pop(int(rng.integers(len(held)))))
            continue
        length = int(rng.integers(1, 60_000))
        slot = area.take(100, 100 + length)
        if slot is not None:
            assert slot.length == length
            assert slot.offset >= 4096
            assert slot.offset + length <= 4096 + (1 << 20)
            for other in held:
                assert (
                    slot.offset + length <= other.offset
                    or other.offset + other.length <= slot.offset
                )
            held.append(slot)
    for slot in held:
        area.give(slot)
    assert area.take(0, 1 << 20) is not None


def test_what_nobody_waits_for_makes_room_the_oldest_first(memory: ReadMemory) -> None:
    assert all(bring(memory, row) for row in range(6))
    assert not bring(memory, 6)
    memory.release([3, 1])
    assert bring(memory, 6)
    assert memory.evicted() == [3]
    memory.keep([1])
    assert not bring(memory, 7)
    assert sorted(memory.rows()) == [0, 1, 2, 4, 5, 6]


def test_what_is_lent_is_not_used_again(memory: ReadMemory) -> None:
    for row in range(6):
        bring(memory, row)
    memory.release(range(6))
    slot = memory.lend(0)
    assert slot is not None
    served = memory.serve(1, CHUNK_BYTES)
    assert served is not None
    for row in range(10, 15):
        bring(memory, row)
    assert bytes(memory.window.view(slot)[:4]) == bytes(4)
    assert bytes(served.view[:4]) == b"\1\1\1\1"
    assert served.view.readonly
    assert memory.busy
    memory.take_back(slot)
    served.release()
    assert not memory.busy


def test_parts_are_served_to_no_peer(memory: ReadMemory) -> None:
    assert bring(memory, 2, 100, start=50)
    slot = memory.lend(2)
    assert slot is not None
    assert (slot.start, slot.stop) == (50, 150)
    assert memory.serve(2, CHUNK_BYTES) is None
    assert memory.serve(9, CHUNK_BYTES) is None
    assert memory.lend(9) is None
    assert bring(memory, 2)  # the whole of it: the part goes with its last user
    memory.take_back(slot)
    assert memory.serve(2, CHUNK_BYTES) is not None


def test_useless_bytes_are_given_back_at_once(memory: ReadMemory) -> None:
    for _ in range(20):
        view = memory.reserve(1, "b", 0, CHUNK_BYTES)
        assert view is not None
        assert memory.land(1, "b", keep=False) == CHUNK_BYTES
    assert memory.land(1, "b", keep=False) == 0
    assert memory.rows() == []


def test_copies_for_ranks_have_room_of_their_own(memory: ReadMemory) -> None:
    for row in range(6):
        bring(memory, row)
    first, second = memory.stage(CHUNK_BYTES), memory.stage(CHUNK_BYTES)
    assert first is not None
    assert second is not None
    assert first.offset >= ARRIVING
    assert memory.stage(CHUNK_BYTES) is None
    memory.share(first)
    memory.take_back(first)
    assert memory.stage(CHUNK_BYTES) is None
    memory.take_back(first)
    assert memory.stage(CHUNK_BYTES) is not None


def test_windows_keep_to_a_part_of_the_budget() -> None:
    assert window_bytes(1 << 40, 1 << 40, 0) == WINDOW_BYTES_MAX
    assert window_bytes(512 << 20, 512 << 20, 0) == 64 << 20
    assert window_bytes(512 << 20, 512 << 20, 64 << 20) == 0
    assert window_bytes(512 << 20, WINDOW_BYTES_MIN - 1, 0) == 0
    assert window_bytes(512 << 20, 40 << 20, 0) == 40 << 20


def test_a_budget_that_never_has_room_for_a_window_is_named() -> None:
    assert window_bytes(255 << 20, 255 << 20, 0) == 0
    assert why_no_window(128 << 20) == (
        "the memory budget of 128 MiB is too small for it; give the agent at least 256 MiB"
    )
    assert window_bytes(256 << 20, 256 << 20, 0) > 0
    assert why_no_window(256 << 20) == "the memory budget has no room now"
