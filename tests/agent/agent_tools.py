"""Members, stores and jobs for the agent's tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from groupio.agent.arena import MemberArena
from groupio.agent.known import KnownChunks
from groupio.agent.pipeline import FlushJob
from groupio.agent.workers import WorkerPool
from groupio.backend.posix import PosixBackend
from groupio.errors import GroupIOError
from groupio.format.segment import SegmentReader
from groupio.model import DecisionKey, ItemKind, ItemSpec, Manifest, NodeReport
from groupio.plan.dedup import build_manifest
from groupio.plan.layout import Layout, lay_out

WAIT_S = 60.0


def blob(name: str, nbytes: int, **fields: Any) -> ItemSpec:
    """An item of raw bytes."""
    return ItemSpec(name, ItemKind.BYTES, "", (nbytes,), (nbytes,), (0,), nbytes, **fields)


def tensor(name: str, *shape: int, **fields: Any) -> ItemSpec:
    """A float32 tensor that is not sharded."""
    nbytes = 4 * int(np.prod(shape))
    zeros = (0,) * len(shape)
    return ItemSpec(name, ItemKind.TENSOR, "float32", shape, shape, zeros, nbytes, **fields)


@dataclass
class Saved:
    """A member whose items are in an arena, and a copy of the bytes to compare with."""

    items: tuple[ItemSpec, ...]
    layout: Layout
    arena: MemberArena
    content: bytes

    def view(self) -> memoryview:
        return self.arena.map(0, self.layout.total_bytes)

    def chunk(self, number: int) -> bytes:
        start = int(self.layout.chunk_start[number])
        return self.content[start : start + int(self.layout.chunk_length[number])]


def saved(items: Sequence[ItemSpec], seed: int) -> Saved:
    """A member with random content; the padding in its arena is not zero either."""
    layout = lay_out(items)
    arena = MemberArena()
    view = arena.map(0, layout.total_bytes)
    content = np.random.default_rng(seed).bytes(layout.total_bytes)
    view[:] = content
    return Saved(tuple(items), layout, arena, content)


@dataclass
class Outcomes:
    """What a job said, and waiting for it."""

    report: NodeReport | None = None
    errors: list[GroupIOError] = field(default_factory=list)
    waves: list[tuple[int, int]] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def done(self, report: NodeReport) -> None:
        assert self.report is None
        self.report = report
        self.over.set()

    def error(self, error: GroupIOError) -> None:
        self.errors.append(error)
        self.over.set()

    def result(self) -> NodeReport:
        assert self.over.wait(WAIT_S)
        if self.errors:
            raise self.errors[0]
        assert self.report is not None
        return self.report


class Store:
    """A POSIX store in a test's directory, and the jobs that write to it."""

    def __init__(self, path: Path, pool: WorkerPool) -> None:
        self.path = path
        self.pool = pool
        self.backend = PosixBackend.open(str(path), create=True)
        self.store_id = self.backend.ensure_store_record("job").store_id

    def current(self) -> PosixBackend:
        """As a job's store has it: the backend to begin something with."""
        return self.backend

    def doubt(self, error: GroupIOError) -> None:
        """This store is never away."""

    def job(
        self,
        epoch: int,
        *,
        write: bool = True,
        framed: bool = False,
        known: KnownChunks | None = None,
        backend: Any = None,
        on_wave: Callable[[int, int], None] | None = None,
        first_seq: int = 0,
        outcomes: Outcomes | None = None,
    ) -> tuple[FlushJob, Outcomes]:
        outcomes = outcomes or Outcomes()
        job = FlushJob(
            backend=backend or self.backend,
            store_id=self.store_id,
            key=DecisionKey(1, epoch, 1),
            node="n0",
            write=write,
            framed=framed,
            known=known,
            workers=self.pool,
            on_wave=on_wave or (lambda rank, wave: outcomes.waves.append((rank, wave))),
            on_done=outcomes.done,
            on_error=outcomes.error,
            first_seq=first_seq,
        )
        return job, outcomes

    def save(self, epoch: int, members: Sequence[Saved], **options: Any) -> NodeReport:
        """Save everything in one wave per member."""
        job, outcomes = self.job(epoch, **options)
        for rank, member in enumerate(members):
            add_all(job, rank, member)
        job.finish()
        return outcomes.result()

    def manifest(self, epoch: int, report: NodeReport) -> Manifest:
        return build_manifest(
            [report],
            store_id=self.store_id,
            job="job",
            key=DecisionKey(1, epoch, 1),
            incarnation=1,
            world_size=len(report.members),
            fingerprint=b"f" * 32,
            write_id="w",
            created_at=0.0,
        )

    def segments(self) -> list[str]:
        return self.backend.list("segments")

    def check(self, report: NodeReport, members: Sequence[Saved]) -> None:
        """Every chunk of every member is where the report says, and each segment is sound."""
        chunks = report.chunks
        with_data = {}
        for ref in report.segments:
            reader = self.backend.reader("segments", ref.name)
            assert reader.size == ref.bytes
            segment = SegmentReader(reader.read, reader.size, ref.name)
            segment.verify_structure()
            segment.verify_data()
            with_data[ref.name] = reader
        for table, member in zip(report.members, members, strict=True):
            assert table.items == member.items
            assert table.bytes_logical == sum(item.nbytes for item in member.items)
            for number, row in enumerate(table.refs.tolist()):
                ref = report.segments[chunks.segments[row]]
                length = int(chunks.lengths[row])
                found = with_data[ref.name].read(int(chunks.offsets[row]), length)
                assert found == member.chunk(number)
        for reader in with_data.values():
            reader.close()


def add_all(job: FlushJob, rank: int, member: Saved) -> None:
    layout = member.layout
    view = member.view() if layout.total_bytes else memoryview(b"")
    job.add_wave(rank, 0, member.items, layout, 0, len(layout.chunk_start), view, 0)


def become_idle(job: FlushJob) -> None:
    """Cancel ``job`` and wait until it touches nothing."""
    idle = threading.Event()
    job.cancel(idle.set)
    assert idle.wait(WAIT_S)
