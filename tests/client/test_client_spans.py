"""Which bytes of a chunk a load asks an agent for."""

from __future__ import annotations

import numpy as np
import pytest

from groupio.client.agent_read import _spans
from groupio.client.wants import Collector
from groupio.model import ChunkTable, ItemKind, ItemSpec
from groupio.plan.read import Box

SHAPE = (40, 50)


def spec() -> ItemSpec:
    return ItemSpec(
        name="t",
        kind=ItemKind.TENSOR,
        dtype="<f4",
        shape=SHAPE,
        global_shape=SHAPE,
        offsets=(0, 0),
        nbytes=4 * SHAPE[0] * SHAPE[1],
    )


def table() -> ChunkTable:
    return ChunkTable(
        np.zeros((1, 32), np.uint8),
        np.array([4 * SHAPE[0] * SHAPE[1]], np.int64),
        np.zeros(1, np.int32),
        np.zeros(1, np.int64),
    )


@pytest.mark.parametrize("seed", range(20))
def test_the_span_holds_all_that_the_copy_looks_at(seed: int) -> None:
    rng = np.random.default_rng(seed)
    corner = rng.integers(0, 20, 2)
    size = rng.integers(1, 20, 2)
    array = np.zeros(tuple(size), np.float32)
    wants = Collector()
    box = Box(tuple(map(int, corner)), tuple(map(int, size)))
    wants.add_box(spec(), np.zeros(1, np.int64), box, array)
    made = wants.finish()
    starts, stops = _spans(made, made.all_rows(), table())
    source = np.arange(SHAPE[0] * SHAPE[1], dtype=np.float32).reshape(SHAPE)
    whole = np.full(source.nbytes, 255, np.uint8)
    lo, hi = int(starts[0]), int(stops[0])
    whole[lo:hi] = source.reshape(-1).view(np.uint8)[lo:hi]
    for _, copy in made.copies:
        copy(whole.data)
    x, y = corner
    assert np.array_equal(array, source[x : x + size[0], y : y + size[1]])
    first = 4 * (x * SHAPE[1] + y)
    last = 4 * ((x + size[0] - 1) * SHAPE[1] + y + size[1])
    assert (lo, hi) == (first, last)


def test_a_chunk_that_is_also_wanted_whole_is_asked_for_whole() -> None:
    array, part = np.zeros(SHAPE, np.float32), np.zeros((2, 2), np.float32)
    wants = Collector()
    wants.add_box(spec(), np.zeros(1, np.int64), Box((3, 3), (2, 2)), part)
    wants.add_box(spec(), np.zeros(1, np.int64), Box((0, 0), SHAPE), array)
    made = wants.finish()
    starts, stops = _spans(made, made.all_rows(), table())
    assert (starts.tolist(), stops.tolist()) == ([0], [array.nbytes])
