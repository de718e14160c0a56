"""Collects what a load wants, as chunks of the manifest's table and the memory that they go to.

A chunk whose bytes lie side by side in the memory to be filled is read straight into it. Of any
other the part that is wanted is copied, once the whole chunk has been read and verified.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from groupio.client.chunk_reader import Wants
from groupio.model import ItemSpec
from groupio.plan.chunks import chunk_grid
from groupio.plan.read import Box, overlap

Rows = npt.NDArray[np.int64]
"""The rows in the manifest's table of an item's chunks, in the order of the item's bytes."""

_WORDS = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8", 16: "<c16"}


class Collector:
    """Collects wants; :meth:`finish` gives them all."""

    def __init__(self) -> None:
        self._rows: list[Rows] = []
        self._counts: list[int] = []
        self._starts: list[npt.NDArray[np.int64]] = []
        self._views: list[memoryview] = []
        self._copies: list[tuple[int, Callable[[memoryview], None]]] = []

    def add_whole(self, spec: ItemSpec, rows: Rows, view: memoryview) -> None:
        """All bytes of the item go to ``view``."""
        if not len(rows):
            return
        if len(rows) == 1:
            starts = _ZERO
        else:
            lengths = chunk_grid(spec)
            starts = np.cumsum(lengths) - lengths
        self._add(view, rows, starts)

    def add_box(self, spec: ItemSpec, rows: Rows, box: Box, array: np.ndarray[Any, Any]) -> None:
        """The part ``box`` of the item's own box goes to ``array``, which has its shape.

        The array may have any strides; its elements are as large as the item's and are filled bit
        for bit, whatever dtype they have.
        """
        if (spec.offsets, spec.shape) == box and array.flags.c_contiguous:
            self.add_whole(spec, rows, flat_bytes(array))
            return
        words = _words(array)
        found = overlap(spec, box)
        columns = zip(
            rows[found.chunks].tolist(),
            (found.offsets - np.array(box.offsets, np.int64)).tolist(),
            (found.offsets - found.chunk_offsets).tolist(),
            found.shapes.tolist(),
            found.chunk_shapes.tolist(),
            strict=True,
        )
        for row, at, start, shape, chunk_shape in columns:
            target = words[_slices(at, shape)]
            if shape == chunk_shape and target.flags.c_contiguous:
                self._add(flat_bytes(target), np.array([row], np.int64), _ZERO)
            else:
                copy = _Copy(target, tuple(chunk_shape), _slices(start, shape))
                self._copies.append((row, copy))

    def finish(self) -> Wants:
        """All that was added."""
        nothing = [np.empty(0, np.int64)]
        return Wants(
            np.concatenate(self._rows or nothing),
            np.repeat(np.arange(len(self._views)), self._counts),
            np.concatenate(self._starts or nothing),
            self._views,
            self._copies,
        )

    def _add(self, view: memoryview, rows: Rows, starts: npt.NDArray[np.int64]) -> None:
        self._rows.append(rows)
        self._starts.append(starts)
        self._counts.append(len(rows))
        self._views.append(view)


class _Copy:
    """Takes a part of a chunk's elements."""

    __slots__ = ("part", "shape", "target")

    def __init__(
        self, target: np.ndarray[Any, Any], shape: tuple[int, ...], part: tuple[slice, ...]
    ) -> None:
        self.target = target
        self.shape = shape
        self.part = part

    def span(self) -> tuple[int, int]:
        """The bytes of the chunk that it looks at, from and to; equal when there are none."""
        stride = self.target.dtype.itemsize
        low, high = 0, stride if self.target.size else 0
        for size, part in zip(reversed(self.shape), reversed(self.part), strict=True):
            low += part.start * stride
            high += (part.stop - 1) * stride
            stride *= size
        return (low, high) if self.target.size else (0, 0)

    def __call__(self, chunk: memoryview) -> None:
        elements: np.ndarray[Any, Any] = np.ndarray(self.shape, self.target.dtype, buffer=chunk)
        self.target[...] = elements[self.part]


_ZERO = np.zeros(1, np.int64)


def flat_bytes(array: np.ndarray[Any, Any]) -> memoryview:
    """The memory of a contiguous array as one range of bytes."""
    if not array.nbytes:
        return memoryview(bytearray())
    return array.reshape(-1).view(np.uint8).data


def _words(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same memory in a dtype whose copies keep every bit."""
    size = array.dtype.itemsize
    return array.view(_WORDS.get(size, f"V{size}"))


def _slices(start: list[int], shape: list[int]) -> tuple[slice, ...]:
    return tuple(slice(lo, lo + size) for lo, size in zip(start, shape, strict=True))
