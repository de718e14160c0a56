"""Few classes, whose runs have within one chunk the bytes that a plan counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from groupio.plan.bundles import BUNDLES, bundle
from groupio.plan.ordering import number_keys, stable_order

SETS = [(0,), (0, 1), (1, 2), (2,)]


@given(
    seed=st.integers(0, 1 << 20),
    chunks=st.integers(0, 400),
    longest=st.sampled_from([1, 5, 3000, 1 << 22]),
    wanted=st.sampled_from([0.0, 0.5, 1.0]),
    limit=st.sampled_from([1, 4, 40, 100, 10_000]),
)
@example(seed=1, chunks=400, longest=3000, wanted=1.0, limit=100)
@example(seed=1, chunks=400, longest=5, wanted=1.0, limit=10)
@settings(deadline=None, max_examples=150)
def test_units_are_the_wanted_chunks(
    seed: int, chunks: int, longest: int, wanted: float, limit: int
) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, chunks)
    holder_set = rng.integers(0, len(SETS), chunks).astype(np.int32)
    asked = rng.random(chunks) < wanted
    classes, unit = bundle(lengths, holder_set, SETS, asked, limit)
    assert (classes.counts > 0).all()
    row = classes.chunk_class
    assert np.bincount(row[row >= 0], minlength=len(classes.counts)).tolist() == (
        classes.counts.tolist()
    )
    # Together they have exactly the bytes that are wanted, holder set by holder set.
    for number, holders in enumerate(SETS):
        mine = [c for c, there in enumerate(classes.holders) if there == holders]
        counted = int((classes.lengths[mine] * classes.counts[mine]).sum())
        assert counted == lengths[asked & (holder_set == number)].sum()
    if unit is None:
        assert (row >= 0).tolist() == asked.tolist()
        for c in np.flatnonzero(asked).tolist():
            assert classes.holders[row[c]] == SETS[holder_set[c]]
            assert classes.lengths[row[c]] == lengths[c]
        return
    assert len(classes.counts) <= max(limit, 2 * len(SETS))
    assert (unit >= 0).tolist() == asked.tolist()
    assert set(unit[asked].tolist()) == set(range(len(row)))
    for c in np.flatnonzero(asked).tolist():
        assert classes.holders[row[unit[c]]] == SETS[holder_set[c]]
    # Any run of units of one class is within one chunk of what the plan counts.
    for number in range(len(classes.counts)):
        units = np.flatnonzero(row == number)
        assert len(units) <= BUNDLES + 1
        for count in {1, len(units) // 2, len(units)} - {0}:
            run = np.isin(unit, units[:count])
            planned = count * int(classes.lengths[number])
            assert abs(int(lengths[run].sum()) - planned) < lengths[asked].max()


@pytest.mark.parametrize("highest", [3, 1 << 16, 1 << 40])
def test_columns_of_integers(highest: int) -> None:
    keys = np.random.default_rng(1).integers(0, highest, 1000)
    kinds, which = number_keys(keys)
    assert kinds.tolist() == sorted(set(keys.tolist()))
    assert (kinds[which] == keys).all()
    assert stable_order(keys).tolist() == sorted(range(1000), key=lambda i: (keys[i], i))
    assert not len(number_keys(keys[:0])[0])
    assert not len(stable_order(keys[:0]))
