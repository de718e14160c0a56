"""From chunks in the arena to what a direct write takes: whole pages at page boundaries.

The whole pages of a large run are written from where they lie. The rest is copied into a bounce
buffer: small runs, and the partial pages at both ends of a large one. Padding is always zeroed,
so that no stale memory reaches the store.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from groupio.agent.placing import Placement
from groupio.format.frames import LOCAL_HEADER
from groupio.model import PAGE_BYTES

_JOIN_BYTES = 16 << 10
"""Runs smaller than this on average are joined by one call, larger ones copied one by one."""


def _header_page() -> memoryview:
    page = mmap.mmap(-1, PAGE_BYTES)  # page-aligned, as a direct write needs it
    page[-len(LOCAL_HEADER) :] = LOCAL_HEADER
    return memoryview(page).toreadonly()


HEADER_PAGE = _header_page()
"""Zeros, and the header of the run that starts on the page behind it."""


class Gathered(NamedTuple):
    """Views to write one after the other, and the bounce buffer that some of them look into."""

    views: list[memoryview]
    bounce: mmap.mmap | None


class _Bounce:
    """Hands out a bounce buffer from front to back, as pages that end with zeros."""

    def __init__(self, buffer: mmap.mmap) -> None:
        self._buffer = memoryview(buffer)
        self._used = 0

    def fill(self, size: int, at: int, pieces: list[bytes | memoryview]) -> memoryview:
        """The next ``size`` bytes: zeros, but for the ``pieces`` from ``at`` on."""
        room = self._buffer[self._used : self._used + size]
        self._used += size
        room[:at] = bytes(at)
        filled = sum(map(len, pieces))
        if filled <= _JOIN_BYTES * len(pieces):
            room[at : at + filled] = b"".join(pieces)
        else:
            # numpy, because it frees the interpreter lock while it copies.
            target = np.frombuffer(room, np.uint8)
            to = at
            for piece in pieces:
                target[to : to + len(piece)] = np.frombuffer(piece, np.uint8)
                to += len(piece)
        room[at + filled :] = bytes(size - at - filled)
        return room


def gather(
    view: memoryview,
    placement: Placement,
    take_bounce: Callable[[], mmap.mmap | None],
) -> Gathered | None:
    """The placed runs as whole pages; None when ``take_bounce`` gave no buffer.

    ``view`` is page-aligned memory in which the runs start where ``placement`` says. They are
    those of one task, so that they fit one bounce buffer.
    """
    whole = placement.alone & (placement.starts % PAGE_BYTES == 0)
    whole &= placement.nbytes % PAGE_BYTES == 0
    bounce = None
    if not whole.all() and (bounce := take_bounce()) is None:
        return None
    room = None if bounce is None else _Bounce(bounce)
    views: list[memoryview] = []
    bounds = [*placement.groups.tolist(), len(placement.starts)]
    for lo, hi, size in zip(bounds[:-1], bounds[1:], placement.sizes.tolist(), strict=True):
        if placement.alone[lo]:
            views += _large_run(view, placement, lo, room)
        else:
            assert room is not None
            views.append(room.fill(size, 0, _pieces(view, placement, lo, hi)))
    return Gathered(views, bounce)


def _large_run(
    view: memoryview, placement: Placement, run: int, room: _Bounce | None
) -> list[memoryview]:
    """A run with pages of its own: at most its first and its last page are copied."""
    start, nbytes = int(placement.starts[run]), int(placement.nbytes[run])
    lead, framed = int(placement.leads[run]), bool(placement.framed[run])
    body = -(-start // PAGE_BYTES) * PAGE_BYTES
    tail = (start + nbytes) // PAGE_BYTES * PAGE_BYTES
    views = []
    if body > start:
        assert room is not None
        pieces: list[bytes | memoryview] = [view[start:body]]
        if framed:
            pieces.insert(0, LOCAL_HEADER)
            lead -= len(LOCAL_HEADER)
        size = lead + sum(map(len, pieces))
        views.append(room.fill(size, lead, pieces))
    elif framed:
        views.append(HEADER_PAGE)
    views.append(view[body:tail])
    if tail < start + nbytes:
        assert room is not None
        views.append(room.fill(PAGE_BYTES, 0, [view[tail : start + nbytes]]))
    return views


def _pieces(view: memoryview, placement: Placement, lo: int, hi: int) -> list[bytes | memoryview]:
    """Small runs as they follow each other, with their headers."""
    pieces: list[bytes | memoryview] = []
    starts = placement.starts[lo:hi]
    ends = (starts + placement.nbytes[lo:hi]).tolist()
    framed = placement.framed[lo:hi].tolist()
    for start, end, headed in zip(starts.tolist(), ends, framed, strict=True):
        if headed:
            pieces.append(LOCAL_HEADER)
        pieces.append(view[start:end])
    return pieces
