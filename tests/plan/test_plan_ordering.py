"""Columns of integers are numbered as numpy does it, whichever way is the fastest."""

from __future__ import annotations

import numpy as np
import pytest

from groupio.model import CHUNK_BYTES
from groupio.plan.ordering import number_keys, stable_order


@pytest.mark.parametrize("longest", [0.0, 0.4, 0.6, 0.99, 1.0])
@pytest.mark.parametrize("most", [3, 1000, CHUNK_BYTES, 1 << 40])
def test_keys_are_numbered_ascending(longest: float, most: int) -> None:
    rng = np.random.default_rng(7)
    for n in (0, 1, 2, 500):
        keys = rng.integers(0, most, n)
        keys[rng.random(n) < longest] = most
        kinds, number = number_keys(keys)
        expected, which = np.unique(keys, return_inverse=True)
        assert kinds.tolist() == expected.tolist()
        assert number.tolist() == which.tolist()
        assert number.dtype == np.int32


@pytest.mark.parametrize("most", [10, 1 << 20])
def test_equal_keys_keep_their_order(most: int) -> None:
    keys = np.random.default_rng(3).integers(-1, most, 2000, np.int32)
    assert stable_order(keys).tolist() == np.argsort(keys, kind="stable").tolist()
