"""Reports what a node has stored of a planned group, over all rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from groupio.agent.placing import find_runs
from groupio.agent.segment_writer import SegmentWriter, Tensors
from groupio.model import DIGEST_BYTES, ChunkTable, NodeReport, SegmentRef
from groupio.plan.frames import shapes_of
from groupio.plan.orders import Labels


class Row(NamedTuple):
    """Chunks of one task that have places in segment ``seq``."""

    digests: npt.NDArray[np.uint8]
    lengths: npt.NDArray[np.int64]
    seq: int
    offsets: npt.NDArray[np.int64]


@dataclass(slots=True)
class Stored:
    """What was written in the rounds so far: rows of chunk tables, and the segments of them."""

    node: str
    segments: list[SegmentRef] = field(default_factory=list)
    digests: list[npt.NDArray[np.uint8]] = field(default_factory=list)
    lengths: list[npt.NDArray[np.int64]] = field(default_factory=list)
    numbers: list[npt.NDArray[np.int32]] = field(default_factory=list)
    offsets: list[npt.NDArray[np.int64]] = field(default_factory=list)

    def enter(self, writer: SegmentWriter, rows: Sequence[Row]) -> set[bytes]:
        """Finish a round: its segments are durable on return. The digests of its chunks."""
        base = len(self.segments) - writer.first_seq
        self.segments += writer.finish()
        new: set[bytes] = set()
        for digests, lengths, seq, offsets in rows:
            new.update(digest.tobytes() for digest in digests)
            self.digests.append(digests)
            self.lengths.append(lengths)
            self.numbers.append(np.full(len(lengths), base + seq, np.int32))
            self.offsets.append(offsets)
        return new

    def report(self, own: NodeReport | None) -> NodeReport:
        """``own``, with what is stored by now, and rows for what the node wrote for others."""
        own = own or _empty(self.node)
        digests = np.concatenate([np.empty((0, DIGEST_BYTES), np.uint8), *self.digests])
        numbers = np.concatenate([np.empty(0, np.int32), *self.numbers])
        lengths = np.concatenate([np.empty(0, np.int64), *self.lengths])
        offsets = np.concatenate([np.empty(0, np.int64), *self.offsets])
        table = own.chunks
        row_of = {digest.tobytes(): row for row, digest in enumerate(table.digests)}
        at = np.array([row_of.get(d.tobytes(), -1) for d in digests], np.int64)
        segments, places = table.segments.copy(), table.offsets.copy()
        mine = at >= 0
        segments[at[mine]] = len(own.segments) + numbers[mine]
        places[at[mine]] = offsets[mine]
        other = ~mine
        chunks = ChunkTable(
            np.concatenate([table.digests, digests[other]]),
            np.concatenate([table.lengths, lengths[other]]),
            np.concatenate([segments, (len(own.segments) + numbers[other]).astype(np.int32)]),
            np.concatenate([places, offsets[other]]),
        )
        return NodeReport(self.node, (*own.segments, *self.segments), chunks, own.members)


def find_tensors(
    labels: Labels | None,
    rows: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], Tensors]:
    """Where runs start among moved chunks, int64[r], and what they are (no frames: no labels)."""
    if labels is None:
        none = np.full(len(rows), -1, np.int64)
        return np.arange(len(rows), dtype=np.int64), Tensors((), none, none, none)
    owners, numbers = labels.owners[rows], labels.numbers[rows]
    apart = np.ones(len(rows), np.bool_)
    apart[1:] = starts[1:] != starts[:-1] + lengths[:-1]
    apart[find_runs(numbers, owners)] = True
    first = np.flatnonzero(apart)
    # Behind the last item stands the answer for chunks of none.
    shapes = np.append(shapes_of(labels.items), -1)[owners[first]]
    return first, Tensors(labels.items, owners[first], shapes, numbers[first])


def _empty(node: str) -> NodeReport:
    none = np.empty(0, np.int64)
    chunks = ChunkTable(np.empty((0, DIGEST_BYTES), np.uint8), none, none.astype(np.int32), none)
    return NodeReport(node, (), chunks, ())
