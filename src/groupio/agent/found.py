"""The unique chunks that a flush job has found, and where each is."""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt

from groupio.model import DIGEST_BYTES, ChunkTable, SegmentRef

IN_NO_SEGMENT = -1
"""The segment number of a chunk that is only hashed."""


def older_segment(numbers: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Segment numbers for entries ``numbers`` of the known segments, while own ones still grow."""
    return -2 - numbers


class FoundChunks:
    """The unique chunks of one job, in the order found. Not thread-safe.

    ``rows`` maps a digest to its row.
    """

    def __init__(self) -> None:
        self.rows: dict[bytes, int] = {}
        self._lengths = array("q")
        self._segments = array("i")
        self._offsets = array("q")

    def claim(self, digests: list[bytes]) -> tuple[list[int], list[int]]:
        """The rows of ``digests``, and which of them are new and need :meth:`fill`, in order."""
        rows = self.rows
        found, new = [], []
        for i, digest in enumerate(digests):
            row = rows.get(digest)
            if row is None:
                row = rows[digest] = len(rows)
                new.append(i)
            found.append(row)
        return found, new

    def fill(
        self,
        lengths: npt.NDArray[np.int64],
        segments: npt.NDArray[np.int32],
        offsets: npt.NDArray[np.int64],
    ) -> None:
        """Say where the chunks that :meth:`claim` found new are.

        ``segments`` are numbers of own segments, ``IN_NO_SEGMENT`` or :func:`older_segment`.
        """
        self._lengths.frombytes(lengths.tobytes())
        self._segments.frombytes(segments.tobytes())
        self._offsets.frombytes(offsets.tobytes())

    def finish(
        self, own: tuple[SegmentRef, ...], known: tuple[SegmentRef, ...]
    ) -> tuple[tuple[SegmentRef, ...], ChunkTable]:
        """The chunk table, and the segments that it uses: own ones first."""
        segments = np.array(self._segments, np.int32)
        used, places = np.unique(-2 - segments[segments < IN_NO_SEGMENT], return_inverse=True)
        segments[segments < IN_NO_SEGMENT] = len(own) + places
        digests = np.frombuffer(b"".join(self.rows), np.uint8).reshape(-1, DIGEST_BYTES)
        chunks = ChunkTable(
            digests,
            np.array(self._lengths, np.int64),
            segments,
            np.array(self._offsets, np.int64),
        )
        return own + tuple(known[i] for i in used.tolist()), chunks
