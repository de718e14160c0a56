"""Replicas that are none: the items, the ranks, the first byte; and who kept its part back."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "plan"))
from plan_help import report, tensor

from groupio.controller.differing import check_replicas
from groupio.errors import InvalidInput, ReplicaDivergence, from_wire, to_wire
from groupio.model import ItemSpec, NodeReport
from groupio.plan.dedup import merge
from groupio.plan.splits import split_name

W = tensor("w", (1 << 20, 2), replicated=True)  # two chunks
V = tensor("v", (4,), replicated=True)


class Memory:
    """The leases of ranks, as far as they are in this node's memory."""

    def __init__(self, **leases: bytes) -> None:
        self.leases = {int(name[1:]): lease for name, lease in leases.items()}

    def see(self, rank: int, place: int, length: int) -> memoryview | None:
        lease = self.leases.get(rank)
        return None if lease is None else memoryview(lease)[place : place + length]


def caught(reports: list[NodeReport], memory: Memory) -> ReplicaDivergence:
    with pytest.raises(ReplicaDivergence) as found:
        check_replicas(7, reports, merge(reports), memory.see)
    return found.value


def leases(count: int, nbytes: int, **flips: int) -> Memory:
    """Equal random leases, in each of which one bit of one byte is flipped: ``r2=17``."""
    base = np.random.default_rng(3).integers(0, 256, nbytes, np.uint8)
    made = {}
    for rank in range(count):
        mine = base.copy()
        if (at := flips.get(f"r{rank}")) is not None:
            mine[at] ^= 1
        made[f"r{rank}"] = mine.tobytes()
    return Memory(**made)


def test_the_first_byte_is_looked_up() -> None:
    reports = [report("n0", {0: ([W], "ab"), 1: ([W], "ab"), 2: ([W], "ax")})]
    error = caught(reports, leases(3, W.nbytes, r2=(4 << 20) + 17))
    assert (error.items, error.members, error.first_byte) == (("w",), (2,), (4 << 20) + 17)
    assert error.epoch == 7
    assert f"'w' (rank 0 and rank(s) 2 first differ at byte {(4 << 20) + 17})" in error.message
    again = from_wire(to_wire(error))
    assert isinstance(again, ReplicaDivergence)
    assert again.first_byte == error.first_byte


def test_the_earliest_of_several_ranks_counts() -> None:
    reports = [report("n0", {r: ([W], chunks) for r, chunks in enumerate(["ab", "xb", "yb"])})]
    error = caught(reports, leases(3, W.nbytes, r1=900, r2=20))
    assert error.first_byte == 20
    assert error.members == (0, 1, 2)


def test_bytes_that_are_elsewhere_leave_the_chunk() -> None:
    reports = [
        report("n0", {0: ([W], "ab"), 1: ([W], "ab")}),
        report("n1", {2: ([W], "xb")}),
    ]
    error = caught(reports, Memory(r0=bytes(W.nbytes), r1=bytes(W.nbytes)))
    assert error.first_byte is None
    assert "rank 0 and rank(s) 2 first differ within bytes 0 to 4194303" in error.message


def test_several_items_each_have_an_offset() -> None:
    odd = tensor("v", (5,), replicated=True)
    reports = [report("n0", {0: ([W, V], ["a", "b", "v"]), 1: ([W, odd], ["x", "b", "o"])})]
    error = caught(reports, leases(2, W.nbytes + 4096, r1=5))
    assert dict(zip(error.items, error.offsets, strict=True)) == {"w": 5, "v": None}
    assert "'v' (in kind, dtype, shape or size)" in error.message


def test_a_sample_is_called_by_its_tensor() -> None:
    sample = tensor("groupio:sample:w", (2, 4), of=(8, 4), at=(6, 0), replicated=True)
    reports = [report("n0", {0: ([sample], "a"), 1: ([sample], "b")})]
    error = caught(reports, leases(2, 4096, r1=3))
    assert (error.items, error.offsets, error.first_byte) == (("w",), (None,), None)
    assert "'w', of which the part [2, 4] at [6, 0] was compared, (rank 0 and" in error.message
    assert "at byte 3" in error.message


def test_many_items_are_all_listed_and_few_told() -> None:
    items = [tensor(f"w{i:03}", (4,), replicated=True) for i in range(100)]
    saved = {r: (items, [f"{r}-{i}" for i in range(100)]) for r in range(2)}
    error = caught([report("n0", saved)], leases(2, 100 * 64, r1=2))
    assert len(error.items) == len(error.offsets) == 100
    assert error.offsets[0] == 2
    assert set(error.offsets[1:]) == {None}  # digests differ, these bytes do not
    assert "and 95 more" in error.message
    assert len(error.message) < 1000


def record(holders: int, name: str = "abc") -> ItemSpec:
    return tensor(split_name(holders, name), (4,), replicated=True)


def test_a_holder_that_kept_its_part_back() -> None:
    saved = {0: ([record(3)], ["same"]), 1: ([record(3)], ["same"])}
    reports = [report("n0", {**saved, 2: ([], [])})]
    with pytest.raises(InvalidInput, match=r"3 ranks divided .* only rank\(s\) 0, 1 handed"):
        check_replicas(7, reports, merge(reports), Memory().see)
    complete = [report("n0", {**saved, 2: ([record(3)], ["same"])})]
    check_replicas(7, complete, merge(complete), Memory().see)


def test_holders_that_divide_otherwise() -> None:
    saved = {r: ([record(3)], ["same" if r else "other"]) for r in range(3)}
    reports = [report("n0", saved)]
    with pytest.raises(InvalidInput, match=r"rank\(s\) 0 divide their replicated tensors other"):
        check_replicas(7, reports, merge(reports), leases(3, 4096).see)
