"""Arrays between nodes: short where they are regular, and never larger than they may be."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from groupio.protocol.arrayform import NARROW, RUN, SHORT_MIN, WHOLE, ArrayForm

MAX = 1 << 20
FAR = (1 << 63) - 1


def there_and_back(array: np.ndarray[Any, Any]) -> tuple[int, int]:
    """The code and the bytes that ``array`` travelled with."""
    form = ArrayForm(MAX)
    sent = form.encode(array)
    back = form.decode(sent.code, memoryview(sent.data))
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert (back == array).all()
    back[:] = 0  # it is in memory of its own
    return sent.code, len(bytes(sent.data))


@pytest.mark.parametrize(
    "array",
    [
        np.arange(1000, dtype=np.int64),
        np.full(1000, -1, np.int32),
        np.zeros(1000, np.int64),
        np.arange(1000, dtype=np.int64)[::-1] * 4096,
    ],
)
def test_a_run_is_a_few_bytes(array: np.ndarray[Any, Any]) -> None:
    assert there_and_back(array) == (RUN, 28)


@pytest.mark.parametrize(
    ("most", "bytes_each"), [(200, 1), (60_000, 2), (4 << 20, 4), (1 << 40, 8)]
)
def test_numbers_take_what_the_largest_needs(most: int, bytes_each: int) -> None:
    array = np.arange(1000, dtype=np.int64) % 7
    array[5] = most
    code, size = there_and_back(array)
    assert code == (NARROW if bytes_each < 8 else WHOLE)
    assert size <= bytes_each * 1000 + 16


def test_negative_numbers_are_narrow_too() -> None:
    array = np.arange(1000, dtype=np.int32) % 7 - 1
    assert there_and_back(array) == (NARROW, 1008)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(SHORT_MIN - 1),
        np.zeros((20, 32), np.uint8),
        np.zeros(20, np.bool_),
        np.array([-FAR, FAR] * 20, np.int64),
        np.array([-1, *[FAR] * 20], np.int64),
    ],
)
def test_others_travel_whole(array: np.ndarray[Any, Any]) -> None:
    assert there_and_back(array)[0] == WHOLE


@given(arrays(np.int64, st.integers(0, 40)) | arrays(np.int32, st.integers(0, 40)))
def test_any_numbers_survive(array: np.ndarray[Any, Any]) -> None:
    there_and_back(array)


@given(
    st.sampled_from([np.int32, np.int64]),
    st.integers(-(1 << 30), 1 << 30),
    st.integers(-1000, 1000),
    st.integers(SHORT_MIN, 100),
)
def test_any_run_survives(kind: type, first: int, step: int, count: int) -> None:
    there_and_back((first + step * np.arange(count)).astype(kind))


def run(word: bytes, count: int, first: int, step: int) -> bytes:
    return struct.pack("<4sQqq", word, count, first, step)


@pytest.mark.parametrize(
    ("code", "data", "why"),
    [
        (RUN, run(b"<i8", 1 << 62, 0, 0), "take more than"),
        (RUN, run(b"<i8", MAX // 8 + 1, 0, 0), "take more than"),
        (RUN, run(b"<i4", 100, 0, 1 << 30), "beyond what its numbers hold"),
        (RUN, run(b"<i8", 100, FAR, 1), "beyond what its numbers hold"),
        (RUN, run(b"<i8", 100, -FAR, -1), "beyond what its numbers hold"),
        (RUN, run(b"|u1", 100, 0, 0), "of no known kind"),
        (RUN, run(b"|O", 100, 0, 0), "of no known kind"),
        (RUN, run(b"<i8", 100, 0, 0)[:-1], "no array"),
        (NARROW, b"<i8\0", "no array"),
        (NARROW, b"<i8\0<i2\0abc", "of no known kind"),
        (NARROW, b"<i4\0<u4\0abcd", "of no known kind"),
        (NARROW, b"<i8\0<f4\0abcd", "of no known kind"),
        (NARROW, b"|u1\0|u1\0abcd", "of no known kind"),
        (NARROW, b"<i8\0|u1\0" + bytes(MAX // 8 + 1), "take more than"),
        (4, b"", "no array"),
    ],
)
def test_what_is_broken_takes_no_memory(code: int, data: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        ArrayForm(MAX).decode(code, memoryview(data))


def test_an_empty_run_is_an_empty_array() -> None:
    assert len(ArrayForm(MAX).decode(RUN, memoryview(run(b"<i8", 0, 5, 3)))) == 0


def test_the_limit_is_of_a_message() -> None:
    form, half = ArrayForm(MAX), memoryview(run(b"<i8", MAX // 16, 0, 0))
    form.decode(RUN, half)
    form.decode(RUN, half)
    with pytest.raises(ValueError, match="take more than"):
        form.decode(RUN, half)
    form.begin()
    form.decode(RUN, half)
