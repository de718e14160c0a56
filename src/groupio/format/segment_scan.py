"""Looks at every byte between the header of a segment and the end of its frames."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from groupio.errors import IntegrityError
from groupio.format.columns import damaged
from groupio.format.frames import LOCAL_HEADER, Frames
from groupio.format.limits import SCAN_BYTES

_LEAD = len(LOCAL_HEADER)


@dataclass(frozen=True, slots=True)
class Scan:
    """What the data of a segment must be.

    ``offsets`` and ``lengths`` int64[n] and ``digests`` uint8[n, 32] of its chunks, in ascending
    order, in the data from ``start`` to ``end``. In a segment with ``frames`` their region
    follows, ``frames_digest`` is the BLAKE3 of it, and the header of a run stands before each
    chunk that a row starts a run at; it may stand before others.
    """

    offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    digests: npt.NDArray[np.uint8]
    start: int
    end: int
    path: str
    frames: Frames | None = None
    frames_digest: bytes = b""

    def damage(
        self, read: Callable[[int, int], bytes], progress: Callable[[int], None] | None
    ) -> Iterator[IntegrityError]:
        """Reads everything once, in pieces of SCAN_BYTES, and yields each damaged part.

        ``progress(n)`` is called when ``n`` more bytes have been checked.
        """
        ends = self.offsets + self.lengths
        leads = self._leads(ends)
        runs = self.frames.table.run_offsets if self.frames is not None else ()
        must = np.isin(self.offsets, runs)
        at, row = self.start, 0
        while at < self.end:
            end = min(at + SCAN_BYTES, self.end)
            # Whole chunks only, with the header before them: the piece ends before a chunk that
            # does not fit into it. A piece is larger than a chunk, so each makes progress.
            last = int(np.searchsorted(ends, end, "right"))
            if last < len(ends):
                end = min(end, int(self.offsets[last] - leads[last]))
            piece = memoryview(read(at, end - at))
            yield from self._check_piece(piece, at, row, leads[row:last], must)
            if progress is not None:
                progress(end - at)
            at, row = end, last
        if self.frames is not None:
            yield from self._check_frames(self.frames, read)
            if progress is not None:
                progress(self.frames.length)

    def _leads(self, ends: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """How many bytes before each chunk may be the header of a run."""
        if self.frames is None:
            return np.zeros(len(ends), np.int64)
        before = np.concatenate((np.array([self.start]), ends))[: len(ends)]
        return np.where(self.offsets - before >= _LEAD, _LEAD, 0)

    def _check_piece(
        self,
        piece: memoryview,
        at: int,
        row: int,
        leads: npt.NDArray[np.int64],
        must: npt.NDArray[np.bool_],
    ) -> Iterator[IntegrityError]:
        """The damage in ``piece``, which starts at ``at`` and has as many chunks as ``leads``,
        from the one at ``row`` on; ``must`` says which chunks need a header before them."""
        done = 0
        for k, lead in enumerate(leads.tolist(), row):
            start = int(self.offsets[k]) - at
            end = start + int(self.lengths[k])
            yield from self._check_gap(piece, at, done, start - lead)
            if lead and piece[start - lead : start] != LOCAL_HEADER:
                if must[k]:
                    where = f"the header before the chunk at {at + start} is not right"
                    yield damaged(self.path, where)
                else:
                    yield from self._check_gap(piece, at, start - lead, start)
            expected = self.digests[k].tobytes()
            if blake3(piece[start:end]).digest() != expected:
                where = f"the chunk of {end - start} bytes at {at + start} has another digest"
                yield damaged(self.path, where, expected)
            done = end
        yield from self._check_gap(piece, at, done, len(piece))

    def _check_gap(
        self, piece: memoryview, at: int, start: int, end: int
    ) -> Iterator[IntegrityError]:
        if bytes(piece[start:end]).count(0) != end - start:
            yield damaged(self.path, f"bytes {at + start} to {at + end} are not zero")

    def _check_frames(
        self, frames: Frames, read: Callable[[int, int], bytes]
    ) -> Iterator[IntegrityError]:
        region = read(frames.start, frames.length)
        if blake3(region).digest() != self.frames_digest:
            yield damaged(self.path, "the digest of its frames does not match")
        elif region != frames.encode():
            yield damaged(self.path, "its frames are not those of its rows")
