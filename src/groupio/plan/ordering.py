"""Sorting and numbering of columns of integers, as fast as small integers allow."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_TABLE_MAX = 1 << 23
"""Keys below this are looked up in a table; chunks are shorter than that."""


def stable_order(keys: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """The rows by ascending ``keys`` (integers, -1 or more), equal ones in their order."""
    # Sixteen bits are sorted by their digits, several times faster.
    small = len(keys) == 0 or int(keys.max()) < 1 << 15
    return np.argsort(keys.astype(np.int16) if small else keys, kind="stable")


def number_keys(
    keys: npt.NDArray[Any],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """The different keys (integers, 0 or more), ascending, and int32[n]: which of them each is."""
    highest = int(keys.max(initial=0))
    if highest > len(keys):
        # Most chunks are as long as chunks can be: a table for the others alone is much smaller.
        others = np.flatnonzero(keys != highest)
        if 2 * len(others) < len(keys):
            kinds, those = number_keys(keys[others])
            which = np.full(len(keys), len(kinds), np.int32)
            which[others] = those
            return np.append(kinds, highest), which
    if highest >= _TABLE_MAX:
        kinds, number = np.unique(keys, return_inverse=True)
        return kinds, number.astype(np.int32)
    there = np.zeros(highest + 1, np.bool_)
    there[keys] = True
    kinds = np.flatnonzero(there)
    number = np.empty(highest + 1, np.int32)
    number[kinds] = np.arange(len(kinds), dtype=np.int32)
    return kinds, number[keys]
