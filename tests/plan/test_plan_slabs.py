"""Members that share equal tensors hand over equal parts of them, on the chunk grid."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_help import report, tensor

from groupio.errors import InvalidInput
from groupio.model import CHUNK_BYTES, ItemSpec
from groupio.plan import chunks
from groupio.plan.chunks import chunk_boxes
from groupio.plan.slabs import Box, samples, slabs
from groupio.plan.splits import Unshared, split_name, unshared

MIB = 1 << 20


def all_shares(specs: list[ItemSpec], holders: int) -> list[list[list[Box]]]:
    return [slabs(specs, holders, index) for index in range(holders)]


def carried(specs: list[ItemSpec], share: list[list[Box]]) -> int:
    """Bytes of one holder."""
    return sum(
        prod(box.shape) * (spec.nbytes // prod(spec.shape))
        for spec, boxes in zip(specs, share, strict=True)
        for box in boxes
    )


def grid_of(spec: ItemSpec, box: Box | None = None) -> set[tuple[tuple[int, ...], ...]]:
    """The chunks of a tensor, or of a box of it: corners and extents."""
    if box is not None:
        nbytes = prod(box.shape) * (spec.nbytes // prod(spec.shape))
        spec = tensor(spec.name, box.shape, of=spec.global_shape, at=box.offsets)
        assert spec.nbytes == nbytes
    starts, shapes = chunk_boxes(spec)
    pairs = zip(starts.tolist(), shapes.tolist(), strict=True)
    return {(tuple(start), tuple(shape)) for start, shape in pairs}


def test_a_large_tensor_is_split_evenly_and_on_its_grid() -> None:
    spec = tensor("w", (4096, 4096))  # 64 MiB: 16 chunks of 256 rows
    shares = all_shares([spec], 4)
    assert [share[0] for share in shares] == [[Box((1024 * k, 0), (1024, 4096))] for k in range(4)]
    found = [grid_of(spec, share[0][0]) for share in shares]
    assert set().union(*found) == grid_of(spec)


def test_middling_tensors_go_round() -> None:
    """One chunk each: cutting each of them would be of no use, giving all to the first worse."""
    specs = [tensor(f"w{i}", (1 << 19,)) for i in range(40)]  # 2 MiB
    shares = all_shares(specs, 4)
    assert [carried(specs, share) for share in shares] == [20 * MIB] * 4
    assert all(len(boxes) <= 1 for share in shares for boxes in share)


def test_outer_dimensions_larger_than_a_chunk() -> None:
    spec = tensor("experts", (3, 5, 1024, 1024))  # 15 matrices of 4 MiB
    shares = all_shares([spec], 4)
    assert [carried([spec], share) // (4 * MIB) for share in shares] == [4, 3, 4, 4]
    assert shares[0][0] == [Box((0, 0, 0, 0), (1, 4, 1024, 1024))]
    assert shares[1][0] == [
        Box((0, 4, 0, 0), (1, 1, 1024, 1024)),
        Box((1, 0, 0, 0), (1, 2, 1024, 1024)),
    ]


def test_whole_rows_of_the_outer_dimension_stay_one_box() -> None:
    spec = tensor("experts", (6, 2, 1024, 1024))
    assert slabs([spec], 2, 0)[0] == [Box((0, 0, 0, 0), (3, 2, 1024, 1024))]
    odd = slabs([tensor("experts", (6, 3, 1024, 1024))], 4, 1)[0]
    assert odd == [
        Box((1, 1, 0, 0), (1, 2, 1024, 1024)),
        Box((2, 0, 0, 0), (1, 3, 1024, 1024)),
    ]


def test_a_shard_is_split_on_the_grid_of_the_whole() -> None:
    """Of a hybrid mesh: rows 100 to 700 of 1000, whose grid lines are at multiples of 256."""
    spec = tensor("w", (600, 4096), of=(1000, 4096), at=(100, 0))
    shares = all_shares([spec], 2)
    assert [share[0] for share in shares] == [
        [Box((100, 0), (156 + 256, 4096))],
        [Box((512, 0), (188, 4096))],
    ]


def test_more_holders_than_chunks_and_nothing_to_share() -> None:
    spec = tensor("w", (MIB,))
    shares = all_shares([spec], 3)
    assert sorted(len(share[0]) for share in shares) == [0, 0, 1]
    assert [Box((0,), (MIB,))] in [share[0] for share in shares]
    assert slabs([], 3, 1) == []


def test_elements_larger_than_a_chunk_are_not_cut() -> None:
    spec = tensor("text", (2,), item_bytes=CHUNK_BYTES + 4, dtype="<U1048577")
    shares = all_shares([spec], 2)
    assert sorted(len(share[0]) for share in shares) == [0, 1]
    assert samples([spec], 5) == {0: Box((0,), (2,))}


def test_samples_are_chunks_of_the_grid_and_each_has_its_turn() -> None:
    spec = tensor("w", (600, 4096), of=(1000, 4096), at=(100, 0))
    seen = {samples([spec], step)[0] for step in range(50)}
    assert {(box.offsets, box.shape) for box in seen} == grid_of(spec)


def test_samples_are_a_small_part_of_many_tensors() -> None:
    """A tensor of 64 MiB has one in every step, one of 2 MiB in every sixteenth."""
    specs = [tensor("large", (4096, 4096)), *(tensor(f"w{i}", (1 << 19,)) for i in range(200))]
    found = [samples(specs, step) for step in range(20)]
    assert all(0 in one for one in found)
    counts = [len(one) - 1 for one in found]
    assert 0.7 * 200 / 16 < sum(counts) / 20 < 1.3 * 200 / 16
    assert len({tuple(one) for one in found}) == 20
    assert samples(specs, 3) == found[3]


def test_there_is_always_a_sample() -> None:
    specs = [tensor(f"w{i}", (1 << 19,)) for i in range(3)]
    assert all(samples(specs, step) for step in range(40))
    assert samples([], 1) == {}


@settings(deadline=None, max_examples=150)
@given(
    shapes=st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=4),
    holders=st.integers(1, 5),
    data=st.data(),
)
def test_the_shares_make_up_the_whole(
    shapes: list[list[int]], holders: int, data: st.DataObject
) -> None:
    """Every element exactly once, all chunks on the grid, equal bytes within one chunk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK_BYTES", 32)  # 8 elements: many chunks in a small tensor
        specs = []
        for i, shape in enumerate(shapes):
            at = tuple(data.draw(st.integers(0, 3)) for _ in shape)
            extent = tuple(
                a + s + data.draw(st.integers(0, 3)) for a, s in zip(at, shape, strict=True)
            )
            specs.append(tensor(f"w{i}", tuple(shape), of=extent, at=at))
        shares = all_shares(specs, holders)
        for i, spec in enumerate(specs):
            times = np.zeros(spec.global_shape, np.int64)
            boxes = [box for share in shares for box in share[i]]
            for box in boxes:
                corner = zip(box.offsets, box.shape, strict=True)
                times[tuple(slice(lo, lo + size) for lo, size in corner)] += 1
            inside = tuple(
                slice(lo, lo + size) for lo, size in zip(spec.offsets, spec.shape, strict=True)
            )
            assert times[inside].all()
            assert times.sum() == prod(spec.shape)
            assert set().union(*(grid_of(spec, box) for box in boxes)) == grid_of(spec)
        loads = [carried(specs, share) for share in shares]
        assert max(loads) - min(loads) <= 2 * 32


def test_ranges_cover_every_dimension_once() -> None:
    """A stretch in the middle of a deep grid needs a box or two per level."""
    spec = tensor("w", (3, 4, 5, 1024, 1024))
    inner = slabs([spec], 7, 3)[0]
    places = {
        (box.offsets[0] + a, box.offsets[1] + b, box.offsets[2] + c)
        for box in inner
        for a, b, c in product(*map(range, box.shape[:3]))
    }
    flat = sorted(a * 20 + b * 5 + c for a, b, c in places)
    assert flat == list(range(flat[0], flat[0] + len(flat)))
    assert len(inner) <= 5


def test_a_bad_tensor_is_named() -> None:
    with pytest.raises(InvalidInput, match="'w'"):
        slabs([tensor("w", (MIB, 2), of=(MIB, 1))], 2, 0)


def test_a_missing_holder_is_found() -> None:
    own = tensor("own", (4,))
    name = split_name(3, "abc")
    record = tensor(name, (4,), replicated=True)
    saved = {r: ([own, record], ["s", f"o{r}"]) for r in range(3)}
    nodes = [report("n0", {0: saved[0], 1: saved[1]}), report("n1", {2: saved[2]})]
    assert unshared(nodes) == []
    nodes[1] = report("n1", {2: ([own], ["o2"])})
    assert unshared(nodes) == [Unshared((0, 1), 3)]
    # An item that a caller happens to name so divides nothing.
    odd = tensor(split_name(3, "abc").replace("3:", "x:"), (4,))
    assert unshared([report("n0", {0: ([odd], ["a"])})]) == []
