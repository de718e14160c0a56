"""From chunks in the arena to what a direct write takes: whole pages at page boundaries.

A chunk that starts on a page is written from where it lies, but for its last partial page. The
rest is copied into a bounce buffer: small chunks, and those that start in the middle of a page.
Padding is always zeroed, so that no stale memory reaches the store.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from groupio.agent.hashing import Placement
from groupio.model import PAGE_BYTES

_JOIN_BYTES = 16 << 10
"""Chunks smaller than this on average are joined by one call, larger ones copied one by one."""


class Gathered(NamedTuple):
    """Views to write one after the other, and the bounce buffer that some of them look into."""

    views: list[memoryview]
    bounce: mmap.mmap | None


def gather(
    view: memoryview,
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    placement: Placement,
    take_bounce: Callable[[], mmap.mmap | None],
) -> Gathered | None:
    """The placed chunks as whole pages; None when ``take_bounce`` gave no buffer.

    ``view`` is page-aligned memory and ``starts`` are relative to it. The chunks are those of one
    task, so that they fit one bounce buffer.
    """
    views: list[memoryview] = []
    bounce: mmap.mmap | None = None
    used = 0
    bounds = [*placement.first.tolist(), len(lengths)]
    for lo, hi, size in zip(bounds[:-1], bounds[1:], placement.sizes.tolist(), strict=True):
        start, length = int(starts[lo]), int(lengths[lo])
        if hi - lo == 1 and start % PAGE_BYTES == 0 and length >= PAGE_BYTES:
            body = length // PAGE_BYTES * PAGE_BYTES
            views.append(view[start : start + body])
            if body == size:
                continue
            pieces = np.array([start + body]), np.array([length - body])
            size = PAGE_BYTES
        else:
            pieces = starts[lo:hi], lengths[lo:hi]
        if bounce is None and (bounce := take_bounce()) is None:
            return None
        room = memoryview(bounce)[used : used + size]
        _copy(room, view, *pieces)
        views.append(room)
        used += size
    return Gathered(views, bounce)


def _copy(
    room: memoryview,
    view: memoryview,
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
) -> None:
    """Fill ``room`` with the pieces of ``view`` and then zeros."""
    filled = int(lengths.sum())
    ends = (starts + lengths).tolist()
    if filled <= _JOIN_BYTES * len(lengths):
        pieces = [view[start:end] for start, end in zip(starts.tolist(), ends, strict=True)]
        room[:filled] = b"".join(pieces)
    else:
        # numpy, because it frees the interpreter lock while it copies.
        source, target = np.frombuffer(view, np.uint8), np.frombuffer(room, np.uint8)
        at = 0
        for start, end in zip(starts.tolist(), ends, strict=True):
            target[at : at + end - start] = source[start:end]
            at += end - start
    room[filled:] = bytes(len(room) - filled)
