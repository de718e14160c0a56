"""What nodes hold and store of planned groups, chunk by chunk; there are no bytes."""

from __future__ import annotations

import errno
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from blake3 import blake3

from groupio.errors import StorageError
from groupio.model import ChunkTable, DecisionKey, MemberTable, NodeReport, SegmentRef
from groupio.protocol import effects as fx
from groupio.protocol import events as ev

CHUNK = 1 << 16


def digest_of(text: str) -> bytes:
    """The name of a chunk with this content."""
    return blake3(text.encode()).digest()


def chunks_of(rank: int, content: str) -> tuple[bytes, ...]:
    """A member has chunks that all members have, that pairs of them have, and its own."""
    return tuple(
        digest_of(text)
        for text in (f"all {content}", f"pair {rank // 2} {content}", f"own {rank} {content}")
    )


def away() -> StorageError:
    """The file server is being restarted."""
    return StorageError("The store does not answer.", path="/store", errno=errno.ENOTCONN)


def replaced() -> StorageError:
    """The path of the store leads to something else now, such as a bare mount point."""
    return StorageError("It is another one.", path="/store", errno=errno.EREMCHG)


def bad_block() -> StorageError:
    """The disk cannot write there, now or later."""
    return StorageError("a bad block", path="/store")


@dataclass
class PlannedJob:
    """The flush job of one group on one node. ``content`` is what its members save, by rank."""

    node: str
    life: str
    key: DecisionKey
    store: bool
    planned: bool
    waves: deque[fx.AddWave] = field(default_factory=deque)
    added: list[fx.AddWave] = field(default_factory=list)
    members: dict[int, tuple[str, int]] = field(default_factory=dict)
    content: dict[int, str] = field(default_factory=dict)
    eager: set[bytes] = field(default_factory=set)
    """Chunks that went through in waves: they are in no memory."""
    finished: bool = False
    cancelled: bool = False
    ended: bool = False
    hashed: bool = False
    order: fx.RunOrder | None = None
    told_copies: bool = False
    kept: set[bytes] = field(default_factory=set)
    written: set[bytes] = field(default_factory=set)

    def repeat(self) -> None:
        """It failed, and begins anew with all that it was given."""
        assert self.ended
        assert not self.cancelled
        assert not self.planned
        self.ended = self.hashed = False
        self.waves = deque(self.added)

    @property
    def has_work(self) -> bool:
        if self.cancelled:
            return not self.ended
        if self.ended and not self.planned:
            return False
        unhashed = self.finished and not self.hashed
        return bool(self.waves) or unhashed or self.order is not None

    def table(self) -> tuple[list[bytes], tuple[MemberTable, ...]]:
        """The node's own chunks, and its members."""
        rows: dict[bytes, int] = {}
        members = []
        for rank, word in sorted(self.content.items()):
            refs = [rows.setdefault(d, len(rows)) for d in chunks_of(rank, word)]
            members.append(
                MemberTable(rank, (), word.encode(), np.array(refs, np.int64), 3 * CHUNK)
            )
        return list(rows), tuple(members)

    def in_memory(self) -> set[bytes]:
        """What peers can fetch from here."""
        own = (
            {d for r, word in self.content.items() for d in chunks_of(r, word)}
            if self.hashed
            else set()
        )
        return (own - self.eager) | self.kept

    def report(self) -> NodeReport:
        """Own rows, and rows of what was written for others; placed where written here."""
        digests, members = self.table()
        digests += sorted(self.written - set(digests))
        placed = [0 if d in self.written else -1 for d in digests]
        name = f"{self.key}-{self.node}{self.life}"
        segments = (SegmentRef(name, CHUNK * len(self.written), True),) if self.written else ()
        n = len(digests)
        return NodeReport(
            self.node,
            segments,
            ChunkTable(
                np.frombuffer(b"".join(digests), np.uint8).reshape(n, 32),
                np.full(n, CHUNK, np.int64),
                np.array(placed, np.int32),
                np.zeros(n, np.int64),
            ),
            members,
        )


def as_array(digests: set[bytes]) -> Any:
    """Digests as the protocol has them."""
    return np.frombuffer(b"".join(sorted(digests)), np.uint8).reshape(len(digests), 32)


def as_set(digests: Any) -> set[bytes]:
    """Digests as the model has them."""
    return {row.tobytes() for row in digests}


def run_order(job: PlannedJob, group: int, peers: dict[str, set[bytes]]) -> Any:
    """One step of the job's order: keep, then write; the event that it causes."""
    told, order = job.order, job.order.order if job.order is not None else None
    assert told is not None
    assert order is not None
    missing: set[bytes] = set()
    asked: set[str] = set()
    for part in order.fetch:
        sources = [n for n in (part.source, *part.others) if n == job.node or n in told.addresses]
        there = set().union(*(peers.get(n, set()) for n in sources)) | job.in_memory()
        lacking = as_set(part.digests) - there
        if lacking:
            missing |= lacking
            asked |= set(sources) - {job.node}
    if missing:
        job.order = None
        for part in order.fetch:
            job.kept |= as_set(part.digests[part.keep]) - missing
        copies = as_array(job.kept)
        sources = tuple(sorted(asked))
        return ev.JobShort(group, told.round, as_array(missing), sources, copies=copies)
    for part in order.fetch:
        job.kept |= as_set(part.digests[part.keep])
    if not job.told_copies and (order.record or any(p.keep.any() for p in order.fetch)):
        job.told_copies = True
        return ev.JobReplicated(group, told.round, as_array(job.kept))
    digests, _ = job.table()
    job.written |= {digests[row] for row in order.write}
    for part in order.fetch:
        job.written |= as_set(part.digests[part.write])
    job.order = None
    return ev.JobStored(group, job.report(), told.round)
