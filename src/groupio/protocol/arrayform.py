"""Arrays in messages: msgpack extensions, short ones where the numbers are regular.

Columns of a report often count up, are all the same, or are small: such a *run* travels as its
first number and the step, and small numbers travel in as few bytes as the largest one needs.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

WHOLE, RUN, NARROW = 1, 2, 3
"""Codes of the extensions."""

SHORT_MIN = 16
"""Arrays with fewer numbers travel whole."""

_NDIM_MAX = 2
_INTS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_DTYPES = {np.dtype(name).str: np.dtype(name) for name in (*_INTS, "bool", "float32", "float64")}
_WIDE = {np.dtype(name) for name in ("int32", "int64")}
_SMALL = tuple(np.dtype(name) for name in ("uint8", "int8", "uint16", "int16", "uint32", "int32"))
_HEAD = struct.Struct("<4sB")
_RUN = struct.Struct("<4sQqq")
_NARROW = struct.Struct("<4s4s")
_FAR = 1 << 62
"""Numbers nearer to zero than this have differences that int64 holds."""


class ArrayForm:
    """The extensions of one message after the other; ``bytes_max`` is what all of one may take."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self.spread_bytes = 0
        """What the shortened arrays of this message take in memory."""

    def begin(self) -> None:
        """A new message."""
        self.spread_bytes = 0

    def encode(self, array: npt.NDArray[Any]) -> msgspec.msgpack.Ext:
        """The extension of ``array``; TypeError when it is of a kind that cannot travel."""
        if array.dtype.str not in _DTYPES or array.ndim > _NDIM_MAX:
            raise TypeError(f"an array {array.dtype} of shape {array.shape} cannot travel")
        if array.ndim == 1 and len(array) >= SHORT_MIN and array.dtype in _WIDE:
            short = _shortened(array)
            if short is not None:
                self.spread_bytes += array.nbytes
                return short
        head = _HEAD.pack(array.dtype.str.encode(), array.ndim)
        shape = struct.pack(f"<{array.ndim}Q", *array.shape)
        return msgspec.msgpack.Ext(WHOLE, head + shape + array.tobytes())

    def decode(self, code: int, data: memoryview) -> npt.NDArray[Any]:
        """The array in an extension, in memory of its own; ValueError when there is none.

        What it says is checked before memory is taken for it.
        """
        if code == WHOLE:
            return _whole(data)
        if code == RUN and len(data) == _RUN.size:
            return self._run(*_RUN.unpack(data))
        if code == NARROW and len(data) >= _NARROW.size:
            return self._narrow(data)
        raise ValueError("an extension is no array")

    def _run(self, word: bytes, count: int, first: int, step: int) -> npt.NDArray[Any]:
        dtype = _dtype(word)
        if dtype not in _WIDE:
            raise ValueError("an array that counts up is of no known kind")
        limits, last = np.iinfo(dtype), first + step * max(count - 1, 0)
        if not (limits.min <= min(first, last) <= max(first, last) <= limits.max):
            raise ValueError("an array counts beyond what its numbers hold")
        self._take(count, dtype)
        if step == 0:
            return np.full(count, first, dtype)
        return (np.arange(count) * step + first).astype(dtype)

    def _narrow(self, data: memoryview) -> npt.NDArray[Any]:
        dtype, stored = (_dtype(word) for word in _NARROW.unpack_from(data))
        count, rest = divmod(len(data) - _NARROW.size, stored.itemsize)
        if dtype not in _WIDE or stored.kind not in "iu" or not np.can_cast(stored, dtype) or rest:
            raise ValueError("an array of small numbers is of no known kind")
        self._take(count, dtype)
        return np.frombuffer(data, stored, offset=_NARROW.size).astype(dtype)

    def _take(self, count: int, dtype: np.dtype[Any]) -> None:
        self.spread_bytes += count * dtype.itemsize
        if self.spread_bytes > self._bytes_max:
            raise ValueError(f"its arrays take more than {self._bytes_max} bytes")


def _shortened(array: npt.NDArray[Any]) -> msgspec.msgpack.Ext | None:
    """The shorter form of whole numbers, if there is one."""
    low, high = int(array.min()), int(array.max())
    word = array.dtype.str.encode()
    first, step = int(array[0]), int(array[1]) - int(array[0])
    straight = first + step * (len(array) - 1) == int(array[-1]) and -_FAR < low <= high < _FAR
    if straight and bool((np.diff(array) == step).all()):
        return msgspec.msgpack.Ext(RUN, _RUN.pack(word, len(array), first, step))
    fits = (t for t in _SMALL if np.iinfo(t).min <= low and high <= np.iinfo(t).max)
    small = next(fits, array.dtype)
    if small.itemsize == array.itemsize:
        return None
    head = _NARROW.pack(word, small.str.encode())
    return msgspec.msgpack.Ext(NARROW, head + array.astype(small).tobytes())


def _dtype(word: bytes) -> np.dtype[Any]:
    found = _DTYPES.get(word.rstrip(b"\0").decode("latin-1"))
    if found is None:
        raise ValueError("an array is of no known kind")
    return found


def _whole(data: memoryview) -> npt.NDArray[Any]:
    if len(data) < _HEAD.size:
        raise ValueError("an extension is no array")
    word, ndim = _HEAD.unpack_from(data)
    start = _HEAD.size + 8 * ndim
    dtype = _dtype(word)
    if ndim > _NDIM_MAX or len(data) < start:
        raise ValueError("an array is of no known kind")
    shape = struct.unpack_from(f"<{ndim}Q", data, _HEAD.size)
    size = dtype.itemsize
    for extent in shape:
        size *= extent
    if size != len(data) - start or (shape and shape[0] > len(data)):
        raise ValueError(f"an array of shape {shape} does not have {len(data) - start} bytes")
    # A copy: aligned, and the rest of the message is not kept alive by it.
    return np.frombuffer(data, dtype, offset=start).reshape(shape).copy()
