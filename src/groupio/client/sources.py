"""Sources of an item's bytes, and how a range of them is copied to an address.

All copies run on the thread that calls: it is the one whose tensors must not change meanwhile.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any, Protocol

import numpy as np


class Source(Protocol):
    """The bytes of one item, in row-major order."""

    def copy_range(self, lo: int, hi: int, address: int) -> None:
        """Copy bytes ``lo <= b < hi`` of the item to memory at ``address``."""
        ...


class Flat:
    """Contiguous memory of an array or tensor, which is kept alive."""

    __slots__ = ("keep", "pointer")

    def __init__(self, pointer: int, keep: object) -> None:
        self.pointer = pointer
        self.keep = keep

    def copy_range(self, lo: int, hi: int, address: int) -> None:
        """See :class:`Source`."""
        ctypes.memmove(address, self.pointer + lo, hi - lo)


class Blob:
    """A bytes object."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data

    def copy_range(self, lo: int, hi: int, address: int) -> None:
        """See :class:`Source`."""
        data = self.data if hi - lo == len(self.data) else self.data[lo:hi]
        ctypes.memmove(address, data, hi - lo)


class Strided:
    """A numpy array of any strides."""

    __slots__ = ("array",)

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def copy_range(self, lo: int, hi: int, address: int) -> None:
        """See :class:`Source`."""
        size = self.array.dtype.itemsize
        if lo % size or hi % size:
            # Only an element larger than a chunk is cut: copy it whole and take the part.
            first, last = lo // size, -(-hi // size)
            whole = np.empty(last - first, self.array.dtype)
            _copy_elements(self.array, first, last, whole)
            start = whole.__array_interface__["data"][0] + lo - first * size
            ctypes.memmove(address, start, hi - lo)
            return
        memory = memoryview((ctypes.c_char * (hi - lo)).from_address(address))
        target: np.ndarray[Any, Any] = np.ndarray(
            ((hi - lo) // size,), self.array.dtype, buffer=memory
        )
        _copy_elements(self.array, lo // size, hi // size, target)


class Tensor:
    """A torch tensor of any strides and device; conjugate and negative views are resolved."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def copy_range(self, lo: int, hi: int, address: int) -> None:
        """See :class:`Source`."""
        torch = sys.modules["torch"]
        size = self.tensor.element_size()
        memory = (ctypes.c_char * (hi - lo)).from_address(address)
        target = torch.frombuffer(memory, dtype=self.tensor.dtype)
        around = DEVICE_COPIES.get(self.tensor.device.type)
        with nullcontext() if around is None else around(self.tensor, address, hi - lo):
            _copy_elements(self.tensor, lo // size, hi // size, target)


DEVICE_COPIES: dict[str, Callable[[Any, int, int], AbstractContextManager[None]]] = {}
"""By type of device: the context in which its tensors are copied to ``size`` bytes at ``address``.
``groupio.torch`` puts in here how to copy fast; without an entry the copy is a plain one."""


def _copy_elements(source: Any, lo: int, hi: int, target: Any) -> None:
    """Copy elements ``lo <= e < hi`` of ``source``, counted row by row, to the flat ``target``."""
    shape = tuple(source.shape)
    if lo == 0 and hi == prod(shape):
        target.reshape(shape)[...] = source
        return
    if len(shape) == 1:
        target[:] = source[lo:hi]
        return
    inner = prod(shape[1:])
    first, head = divmod(lo, inner)
    last, tail = divmod(hi, inner)
    if first == last:
        _copy_elements(source[first], head, tail, target)
        return
    done = 0
    if head:
        done = inner - head
        _copy_elements(source[first], head, inner, target[:done])
        first += 1
    rows = last - first
    if rows:
        target[done : done + rows * inner].reshape(rows, *shape[1:])[...] = source[first:last]
        done += rows * inner
    if tail:
        _copy_elements(source[last], 0, tail, target[done:])
