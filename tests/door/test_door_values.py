"""Plain values as pickles: python's own unpicklers get equal values of the same types."""

from __future__ import annotations

import math
import pickle
import pickletools
from collections import (
    Counter,
    OrderedDict,
    UserDict,
    UserList,
    UserString,
    defaultdict,
    deque,
    namedtuple,
)  # fmt: skip
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from groupio.door.values import pickle_value
from groupio.errors import InvalidInput
from groupio.format.containers import kind_of

Point = namedtuple("Point", "x y")

PADDED = np.dtype(
    {"names": ["a", "b"], "formats": ["<f4", ("<i2", (2, 3))], "offsets": [4, 16], "itemsize": 40}
)
ALIGNED = np.dtype([("x", "i1"), ("y", "f8")], align=True)

VALUES = [
    *(None, True, False, 0, 255, 256, 65536, -1, 1 << 31, -(1 << 31), 1 << 63, 1 << 5000),
    *(-(1 << 5000), 1.5, -0.0, math.nan, math.inf, 1j, complex(-0.5, math.nan)),
    *(
        "",
        "é\0\ud800",
        b"",
        b"x" * 300,
        [],
        [1, [2]],
        (),
        (1,),
        (1, 2, 3, 4),
        {},
        {"a": 1, 2: (3,)},
    ),
    *(np.float32(2), np.int64(3), np.bool_(True), np.complex64(1j), np.datetime64("2020-01-01")),
    *(np.str_("a\0"), np.bytes_(b"a\0"), np.void(b"abc"), ml_dtypes.bfloat16(2)),
    *(np.arange(6).reshape(2, 3), np.zeros((0, 3), "u2"), np.array(1.5), np.array([1], ">f4")),
    *(np.ones(3, ml_dtypes.bfloat16), np.array(["ab", "c"]), np.array([b"x", b"yz"])),
    *(np.asfortranarray(np.arange(6).reshape(2, 3)), np.array(["2020"], "M8[D]")),
    *(Counter({5: 2}), OrderedDict({1: 2}), defaultdict(list, {1: []}), defaultdict(None, a=1)),
    *(deque([1], 3), deque(), {1}, frozenset({2}), range(1, 9, 2), slice(None, 2)),
    *(UserDict({1: 2}), UserList([1]), UserString("x"), SimpleNamespace(a=[1]), Point(1, (2,))),
    *(np.zeros(2, PADDED), np.zeros(2, ALIGNED), np.zeros(1, PADDED)[0]),
]


def same(one: Any, other: Any) -> bool:
    kind = kind_of(one)
    if kind is not None:
        return kind_of(other) is kind and same(kind.take(one), kind.take(other))
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        equal = (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
        return equal and other.flags.writeable
    if isinstance(one, str | bytes):
        return len(one) == len(other) and bool(one == other)
    if isinstance(one, np.generic):
        return (one.dtype, one.tobytes()) == (other.dtype, other.tobytes())
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, complex):
        return same(one.real, other.real) and same(one.imag, other.imag)
    if isinstance(one, float):
        alike = one == other or (one != one and other != other)
        return alike and math.copysign(1, one) == math.copysign(1, other)
    return bool(one == other)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{type(value).__name__}")
def test_values_come_back(value: Any) -> None:
    data = pickle_value({"value": value})
    assert same(pickle.loads(data), {"value": value})  # noqa: S301  of this very test
    assert same(pickle._loads(data), {"value": value})  # type: ignore[attr-defined]
    newer = any(op.proto > 2 for op, _, _ in pickletools.genops(data))
    assert data[:2] == (b"\x80\x04" if newer else b"\x80\x02")


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
    ),
    max_leaves=20,
)


@settings(max_examples=150, deadline=None)
@given(plain)
def test_any_nested_value_comes_back(value: Any) -> None:
    assert same(pickle.loads(pickle_value(value)), value)  # noqa: S301  of this very test


@pytest.mark.parametrize("value", [object(), np.array([None]), [{print}], defaultdict(lambda: 1)])
def test_what_is_not_plain_is_refused(value: Any) -> None:
    with pytest.raises(InvalidInput, match="plain"):
        pickle_value(value)
