"""What a framed flush wrote is read by torch itself, chunk by chunk."""

from __future__ import annotations

import mmap
import tempfile
import threading
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.utils import _create_file_view

import groupio
from groupio.agent import segment_writer
from groupio.agent.known import KnownChunks
from groupio.agent.pipeline import FlushJob
from groupio.agent.workers import WorkerPool
from groupio.backend.posix import PosixBackend
from groupio.errors import GroupIOError
from groupio.format.frames import DTYPE_BYTES
from groupio.format.manifest import ManifestReader
from groupio.format.segment import SegmentReader
from groupio.model import DecisionKey, ItemKind, ItemSpec, NodeReport
from groupio.plan.dedup import build_manifest
from groupio.plan.frames import framable
from groupio.plan.layout import lay_out

WAIT_S = 60.0
MIB = 1 << 20


def tensor(
    name: str,
    shape: tuple[int, ...],
    dtype: str = "float32",
    *,
    of: tuple[int, ...] | None = None,
    at: tuple[int, ...] | None = None,
    alias: int = -1,
) -> ItemSpec:
    nbytes = prod(shape) * DTYPE_BYTES[dtype]
    return ItemSpec(
        name, ItemKind.TENSOR, dtype, shape, of or shape, at or (0,) * len(shape), nbytes,
        alias=alias,
    )  # fmt: skip


def plain(name: str, nbytes: int) -> ItemSpec:
    return ItemSpec(name, ItemKind.PLAIN, "", (nbytes,), (nbytes,), (0,), nbytes)


class Rank:
    """The items of a member and page-aligned memory with their bytes, padding filled too."""

    def __init__(self, items: list[ItemSpec], seed: int) -> None:
        self.items = tuple(items)
        self.layout = lay_out(items)
        self.memory = memoryview(mmap.mmap(-1, max(self.layout.total_bytes, 1)))
        self.memory[:] = np.random.default_rng(seed).bytes(len(self.memory))

    def item(self, number: int) -> memoryview:
        start = int(self.layout.item_start[number])
        return self.memory[start : start + self.items[number].nbytes]


class Store:
    """A store, and its framed saves."""

    def __init__(self, path: Path, pool: WorkerPool) -> None:
        self.path = path
        self.backend = PosixBackend.open(str(path), create=True)
        self.store_id = self.backend.ensure_store_record("job").store_id
        self.pool = pool
        self.known = KnownChunks()

    def save(self, epoch: int, ranks: list[Rank], *, framed: bool = True) -> NodeReport:
        over = threading.Event()
        told: list[NodeReport | GroupIOError] = []
        job = FlushJob(
            backend=self.backend, store_id=self.store_id, key=DecisionKey(1, epoch, 1), node="n0",
            write=True, framed=framed, known=self.known, workers=self.pool,
            on_wave=lambda rank, wave: None,
            on_done=lambda report: (told.append(report), over.set())[1],
            on_error=lambda error: (told.append(error), over.set())[1],
        )  # fmt: skip
        for number, rank in enumerate(ranks):
            n = len(rank.layout.chunk_start)
            job.add_wave(number, 0, rank.items, rank.layout, 0, n, rank.memory, 0)
        job.finish()
        assert over.wait(WAIT_S)
        (report,) = told
        if isinstance(report, GroupIOError):
            raise report
        return report

    def learn(self, epoch: int, report: NodeReport) -> None:
        """Later saves may refer to this one."""
        self.known.add_epoch(
            build_manifest(
                [report], store_id=self.store_id, job="job", key=DecisionKey(1, epoch, 1),
                incarnation=1, world_size=len(report.members), fingerprint=b"", write_id="w",
                created_at=0.0,
            )
        )  # fmt: skip

    def segment(self, name: str) -> SegmentReader:
        """A verified segment."""
        file = self.backend.reader("segments", name)
        segment = SegmentReader(file.read, file.size, name)
        segment.verify_structure()
        segment.verify_data()
        return segment


def torch_sees(segment: SegmentReader, path: Path, offset: int) -> tuple[torch.Tensor, bytes]:
    """The tensor that the frame at a chunk gives, and its bytes."""
    assert segment.frames is not None
    (row,) = segment.frames.find(offset).tolist()
    with open(path, "rb") as file:
        part = _create_file_view(file, *segment.frames.slice_of(row))
        found = torch.load(cast(Any, part), map_location="cpu", weights_only=True)
    return found, found.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def check(store: Store, report: NodeReport, ranks: list[Rank]) -> int:
    """Every own chunk of a tensor has one frame with the right bytes; how many there are.

    Chunks whose bytes another item brought first need not have one of their own.
    """
    own = {ref.name: store.segment(ref.name) for ref in report.segments if ref.own}
    chunks = report.chunks
    met: set[int] = set()
    kinds: set[tuple[str, int]] = set()
    others: set[int] = set()
    for member, rank in zip(report.members, ranks, strict=True):
        others.update(member.refs[~framable(rank.items)[rank.layout.chunk_item]].tolist())
    for member, rank in zip(report.members, ranks, strict=True):
        readable = framable(rank.items).tolist()
        for chunk, row in enumerate(member.refs.tolist()):
            owner = int(rank.layout.chunk_item[chunk])
            ref = report.segments[chunks.segments[row]]
            start, length = rank.layout.chunk_start[chunk], int(rank.layout.chunk_length[chunk])
            stored = ref.name in own
            if stored:
                data = own[ref.name]._read(int(chunks.offsets[row]), length)
                assert data == rank.memory[start : start + length]
            if row in met or not stored or not readable[owner]:
                continue
            frames = own[ref.name].frames
            assert frames is not None
            if not len(frames.find(int(chunks.offsets[row]))):
                assert row in others, "it was met first as a chunk of an item that is no tensor"
                continue
            met.add(row)
            found, content = torch_sees(
                own[ref.name], store.path / "segments" / ref.name, int(chunks.offsets[row])
            )
            # Behind the chunk may follow others of the item that brought these bytes first.
            assert content[:length] == rank.memory[start : start + length]
            assert content == own[ref.name]._read(int(chunks.offsets[row]), len(content))
            kinds.add((str(found.dtype), len(found.shape)))
    wanted = {
        (f"torch.{spec.dtype}", len(spec.shape))
        for rank in ranks
        for spec, readable in zip(rank.items, framable(rank.items).tolist(), strict=True)
        if readable and spec.nbytes
    }
    assert kinds <= wanted
    return len(met)


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    workers = WorkerPool()
    yield workers
    assert workers.close(WAIT_S)


@pytest.fixture
def target(tmp_path: Path, pool: WorkerPool) -> Iterator[Store]:
    made = Store(tmp_path / "store", pool)
    yield made
    made.backend.close()


MIXED = [
    tensor("whole", (3 * MIB,)),
    tensor("rows of 12000 bytes", (900, 3000)),
    tensor("expert stack", (3, 700, 1500), "bfloat16"),
    tensor("columns", (600, 1000), of=(600, 4000), at=(0, 2000)),
    tensor("rows of a shard", (1500, 1200), of=(6000, 1200), at=(1500, 0)),
    plain("large value", 5 * MIB + 1),
    *(tensor(f"small {i}", (i % 7 + 1, i % 5 + 1), "float16") for i in range(200)),
    *(plain(f"value {i}", 13 * i + 1) for i in range(50)),
    tensor("scalar", ()),
    tensor("empty", (0, 4)),
    tensor("tied", (3 * MIB,), alias=0),
    tensor("tied in another shape", (3, MIB), "float32"),
    *(tensor(name, (33, 5), name) for name in sorted(DTYPE_BYTES)),
]


def test_every_tensor_chunk_has_a_frame_that_torch_reads(target: Store) -> None:
    ranks = [Rank(MIXED, seed) for seed in range(2)]
    for number, name in enumerate(item.name for item in MIXED):
        if name == "bool":
            for rank in ranks:
                rank.item(number)[:] = bytes([0, 1] * 100)[: rank.items[number].nbytes]
    report = target.save(1, ranks)
    once = int(sum(framable(MIXED)[ranks[0].layout.chunk_item]))
    # Random scalars and the like may be equal by chance, larger things are not.
    assert 2 * once - 30 <= check(target, report, ranks) <= 2 * once


def test_equal_ranks_and_unchanged_chunks_have_one_frame(target: Store) -> None:
    items = [tensor("a", (6 * MIB,)), tensor("b", (5, 1001)), tensor("c", (6 * MIB,))]
    ranks = [Rank(items, 7) for _ in range(3)]
    ranks[0].item(2)[: 9 * MIB] = ranks[0].item(0)[: 9 * MIB]  # two of six chunks are equal
    for rank in ranks[1:]:
        rank.memory[:] = ranks[0].memory
    report = target.save(1, ranks)
    assert check(target, report, ranks) == 6 + 1 + 4
    target.learn(1, report)
    ranks[0].item(0)[13 * MIB] ^= 1
    second = target.save(2, ranks)
    assert [ref.own for ref in second.segments] == [True, False]
    assert check(target, second, ranks) == 1


def test_a_run_of_four_chunks_is_one_piece(target: Store) -> None:
    rank = Rank([tensor("w", (8 * MIB,))], 1)
    report = target.save(1, [rank])
    segment = target.segment(report.segments[0].name)
    assert segment.frames is not None
    table = segment.frames.table
    assert len(set(table.run_offsets.tolist())) == 2
    path = target.path / "segments" / report.segments[0].name
    found, content = torch_sees(segment, path, int(table.run_offsets.min()))
    assert tuple(found.shape) == (4 * MIB,)
    halves = rank.memory[: 16 * MIB], rank.memory[16 * MIB : 32 * MIB]
    assert content in halves, "two threads may place them in any order"


def test_frames_go_with_their_segment(target: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_writer, "FRAMED_SEGMENT_BYTES", 18 * MIB)
    ranks = [Rank(MIXED, seed) for seed in range(2)]
    report = target.save(1, ranks)
    assert len(report.segments) > 2
    assert check(target, report, ranks) > 400
    monkeypatch.setattr(segment_writer, "FRAMED_CHUNKS_MAX", 1)
    few = [Rank([tensor("w", (8 * MIB,))], 5)]
    second = target.save(2, few)
    assert len(second.segments) == 2
    assert check(target, second, few) == 8


def test_without_tensors_and_without_frames(target: Store) -> None:
    ranks = [Rank([plain("a", 100), plain("b", 2 * MIB)], 1)]
    assert check(target, target.save(1, ranks), ranks) == 0
    unframed = target.save(2, [Rank(MIXED, 3)], framed=False)
    assert target.segment(unframed.segments[0].name).frames is None


def test_a_save_that_asks_for_a_door_is_framed_and_says_so(store: str) -> None:
    with groupio.connect(store, rank=0, world_size=1) as client:
        values = {"w": torch.arange(3.0), "step": 7}
        client._save(values, epoch=1, door="dcp").wait("durable", timeout_s=WAIT_S)
        values["w"] = values["w"] + 1
        client._save(values, epoch=2, door="").wait("durable", timeout_s=WAIT_S)
    backend = PosixBackend.open(store, create=False)
    for name, door in zip(sorted(backend.list("epochs")), ("dcp", ""), strict=True):
        record = backend.reader("epochs", name)
        manifest = ManifestReader(record.read, record.size, name).manifest()
        record.close()
        assert manifest.header.door == door
        (own,) = [ref.name for ref in manifest.segments if ref.own]
        file = backend.reader("segments", own)
        frames = SegmentReader(file.read, file.size, own).frames
        assert (frames is not None) == bool(door)
        if frames is not None:
            found, _ = torch_sees(
                SegmentReader(file.read, file.size, own),
                Path(store) / "segments" / own,
                int(frames.table.chunk_offsets[0]),
            )
            assert found.tolist() == [0.0, 1.0, 2.0]
        file.close()
    backend.close()


def small_tensor(draw: st.DrawFn, name: str) -> ItemSpec:
    dtype = draw(st.sampled_from(["float32", "bfloat16", "int64", "uint8"]))
    element = DTYPE_BYTES[dtype]
    extent = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 7, 33]), max_size=3)))
    if draw(st.booleans()):
        extent = (*extent, draw(st.integers(1, 3 * MIB // element // max(prod(extent), 1) + 1)))
    shape = tuple(draw(st.integers(1, n)) for n in extent)
    at = tuple(draw(st.integers(0, n - m)) for n, m in zip(extent, shape, strict=True))
    factor = draw(st.sampled_from([1, 1, 5])) if extent else 1  # the whole one is larger
    of = (*extent[:-1], extent[-1] * factor) if extent else extent
    return tensor(name, shape, dtype, of=of, at=at)


@st.composite
def item_sets(draw: st.DrawFn) -> list[ItemSpec]:
    items: list[ItemSpec] = []
    for number in range(draw(st.integers(1, 8))):
        match draw(st.sampled_from(["tensor", "tensor", "tensor", "plain", "tied"])):
            case "tensor":
                items.append(small_tensor(draw, f"t{number}"))
            case "plain":
                items.append(plain(f"p{number}", draw(st.sampled_from([0, 1, 4097, MIB + 1]))))
            case "tied":
                owners = [i for i, x in enumerate(items) if x.kind is ItemKind.TENSOR]
                if owners:
                    i = draw(st.sampled_from(owners))
                    x = items[i]
                    fields = {"of": x.global_shape, "at": x.offsets, "alias": i}
                    items.append(tensor(f"a{number}", x.shape, x.dtype, **fields))
    return items or [plain("nothing else", 5)]


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(items=item_sets(), seed=st.integers(0, 3), data=st.data())
def test_any_items(
    items: list[ItemSpec], seed: int, data: st.DataObject, tmp_path: Path, pool: WorkerPool
) -> None:
    store = Store(Path(tempfile.mkdtemp(dir=tmp_path)) / "store", pool)
    ranks = [Rank(items, seed), Rank(items, seed + data.draw(st.integers(0, 1)))]
    # Some stretches of equal pages, within an item and between items.
    for _ in range(data.draw(st.integers(0, 3))):
        source, number = (data.draw(st.integers(0, len(items) - 1)) for _ in range(2))
        n = min(items[source].nbytes, items[number].nbytes)
        ranks[0].item(number)[:n] = bytes(ranks[0].item(source)[:n])
    report = store.save(1, ranks)
    check(store, report, ranks)
    store.learn(1, report)
    changed = data.draw(st.integers(0, len(items) - 1))
    if items[changed].nbytes:
        ranks[1].item(changed)[items[changed].nbytes // 2] ^= 1
    check(store, store.save(2, ranks), ranks)
    store.backend.close()
