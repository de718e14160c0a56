"""What a node serves of its memory, and when it stops."""

from __future__ import annotations

import threading
import time

import numpy as np
from blake3 import blake3

from groupio.agent.holdings import Holdings, Places

SCOPE = "5" * 32
SIZE = 64


class Memory:
    """One arena of bytes."""

    def __init__(self, chunks: int) -> None:
        self.bytes = bytearray(np.random.default_rng(1).bytes(chunks * SIZE))
        self.names = [blake3(self.bytes[i * SIZE : (i + 1) * SIZE]).digest() for i in range(chunks)]

    def view(self, arena: int, offset: int, length: int) -> memoryview | None:
        return memoryview(self.bytes)[offset : offset + length] if arena == 1 else None

    def places(self, *numbers: int) -> Places:
        n = len(numbers)
        names = np.frombuffer(b"".join(self.names[i] for i in numbers), np.uint8).reshape(-1, 32)
        offsets = np.array(numbers, np.int64) * SIZE
        return Places(names, np.ones(n, np.int64), offsets, np.full(n, SIZE, np.int64))


def served(holdings: Holdings, name: bytes, scope: str = SCOPE, wait_s: float = 0.0) -> bytes:
    found = holdings.find(scope, name, wait_s)
    return b"" if found is None else bytes(found.view)


def test_a_chunk_is_served_to_its_own_job_only() -> None:
    memory = Memory(3)
    holdings = Holdings(memory.view)
    holdings.hold(7, SCOPE, memory.places(2, 0))
    assert served(holdings, memory.names[0]) == memory.bytes[:SIZE]
    assert served(holdings, memory.names[2]) == memory.bytes[2 * SIZE :]
    assert served(holdings, memory.names[1]) == b""
    assert served(holdings, memory.names[0], "6" * 32) == b""
    names = np.frombuffer(b"".join(memory.names), np.uint8).reshape(-1, 32)
    assert holdings.has(SCOPE, names).tolist() == [True, False, True]


def test_names_that_begin_alike_are_told_apart() -> None:
    memory = Memory(2)
    memory.names = [memory.names[0][:8] + bytes([i]) * 24 for i in range(2)]
    holdings = Holdings(memory.view)
    holdings.hold(1, SCOPE, memory.places(0, 1))
    for number, name in enumerate(memory.names):
        start = number * SIZE
        assert served(holdings, name) == memory.bytes[start : start + SIZE]
    assert served(holdings, memory.names[0][:8] + bytes([9]) * 24) == b""


def test_a_group_that_was_not_committed_is_served_no_more() -> None:
    memory = Memory(2)
    holdings = Holdings(memory.view)
    holdings.hold(1, SCOPE, memory.places(0))
    holdings.hold(2, SCOPE, memory.places(1))
    holdings.settle(2)
    holdings.release(1)
    holdings.release(2)
    assert served(holdings, memory.names[0]) == b""
    assert served(holdings, memory.names[1]) == memory.bytes[SIZE:]


def test_what_was_committed_is_copied_out_and_ends_with_its_memory() -> None:
    memory = Memory(2)
    holdings = Holdings(memory.view)
    holdings.hold(1, SCOPE, memory.places(0, 1))
    holdings.settle(1)
    before = bytes(memory.bytes[:SIZE])
    found = holdings.find(SCOPE, memory.names[0], 0.0)
    assert found is not None
    holdings.drop(1, 0, 1)
    memory.bytes[:SIZE] = bytes(SIZE)
    assert bytes(found.view) == before, "a reader still has what it was given"
    assert served(holdings, memory.names[0]) == b""
    assert served(holdings, memory.names[1]) == memory.bytes[SIZE:]
    holdings.drop(2, 0, 1 << 20)
    assert served(holdings, memory.names[1]) != b"", "that was another arena"


def test_who_asks_early_waits() -> None:
    memory = Memory(1)
    holdings = Holdings(memory.view)
    names = memory.places(0).digests
    holdings.expect(SCOPE, names)
    holdings.expect(SCOPE, names)
    assert holdings.expects(SCOPE, memory.names[0])
    got: list[bytes] = []
    asks = threading.Thread(
        target=lambda: got.append(served(holdings, memory.names[0], wait_s=30.0))
    )
    asks.start()
    holdings.hold(1, SCOPE, memory.places(0))
    asks.join(30.0)
    assert got == [bytes(memory.bytes)]
    holdings.expect_no_more(SCOPE, names)
    holdings.release(1)
    assert holdings.expects(SCOPE, memory.names[0]), "another fetch still brings it"
    holdings.expect_no_more(SCOPE, names)
    assert not holdings.expects(SCOPE, memory.names[0])
    began = time.monotonic()
    assert served(holdings, memory.names[0], wait_s=0.05) == b""
    assert time.monotonic() - began >= 0.05


def test_memory_that_is_gone_is_not_served() -> None:
    memory = Memory(1)
    holdings = Holdings(memory.view)
    places = memory.places(0)
    holdings.hold(1, SCOPE, places._replace(arenas=np.full(1, 3, np.int64)))
    assert served(holdings, memory.names[0]) == b""


def test_what_comes_in_many_pieces_is_looked_up_in_few() -> None:
    memory = Memory(300)
    holdings = Holdings(memory.view)
    for number in range(0, 300, 2):
        holdings.hold(1, SCOPE, memory.places(number, number + 1))
        if number == 100:
            assert served(holdings, memory.names[50]) == memory.bytes[50 * SIZE : 51 * SIZE]
            holdings.drop(1, 60 * SIZE, 1)
    holdings.hold(2, SCOPE, memory.places(0))
    holdings.hold(1, "6" * 32, memory.places(1))
    assert len(holdings._holdings) < 12
    names = np.frombuffer(b"".join(memory.names), np.uint8).reshape(-1, 32)
    assert np.flatnonzero(~holdings.has(SCOPE, names)).tolist() == [60]
    holdings.release(1)
    assert np.flatnonzero(holdings.has(SCOPE, names)).tolist() == [0]
    holdings.settle(2)
    holdings.hold(2, SCOPE, memory.places(1))
    holdings.release(2)
    assert np.flatnonzero(holdings.has(SCOPE, names)).tolist() == [0], "only that was committed"


def test_expected_by_two_fetches_until_both_are_over() -> None:
    memory = Memory(1)
    holdings = Holdings(memory.view)
    names = memory.places(0).digests
    for _ in range(2):
        holdings.expect(SCOPE, names)
    holdings.expect_no_more(SCOPE, names)
    assert holdings.expects(SCOPE, memory.names[0])
    assert not holdings.expects("6" * 32, memory.names[0])
    holdings.expect_no_more(SCOPE, names)
    assert not holdings.expects(SCOPE, memory.names[0])
    holdings.hold(1, SCOPE, memory.places(0))
    assert holdings.expects(SCOPE, memory.names[0])


def test_a_chunk_is_copied_to_memory_of_its_size_only() -> None:
    memory = Memory(1)
    holdings = Holdings(memory.view)
    holdings.hold(1, SCOPE, memory.places(0))
    into = memoryview(bytearray(SIZE))
    assert holdings.read_into(SCOPE, memory.names[0], into)
    assert into == memory.bytes
    assert not holdings.read_into(SCOPE, memory.names[0], memoryview(bytearray(SIZE - 1)))
    assert not holdings.read_into("6" * 32, memory.names[0], into)


def test_a_sealed_group_lends_nothing_more_and_waits_for_what_is_lent() -> None:
    memory = Memory(2)
    holdings = Holdings(memory.view)
    holdings.hold(1, SCOPE, memory.places(0))
    holdings.hold(2, SCOPE, memory.places(1))
    lent = [holdings.find(SCOPE, memory.names[0], 0.0) for _ in range(2)]
    other = holdings.find(SCOPE, memory.names[1], 0.0)
    ended: list[int] = []
    holdings.seal(1, lambda: ended.append(1))
    before = bytes(memory.bytes[:SIZE])
    late = holdings.find(SCOPE, memory.names[0], 0.0)
    for one in lent:
        assert ended == []
        assert one is not None
        assert one.view == before
        one.release()
    assert ended == [1], "the copy that was made later keeps nobody waiting"
    memory.bytes[:SIZE] = bytes(SIZE)
    assert late is not None
    assert late.view == before
    late.release()
    holdings.release(1)
    assert other is not None
    other.release()
    holdings.seal(2, lambda: ended.append(2))
    assert ended == [1, 2]
