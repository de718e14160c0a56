"""Stores made by the client's own copy and the format, without an agent."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from blake3 import blake3

from groupio.backend.posix import PosixBackend
from groupio.client.copying import copy_range
from groupio.client.outgoing import Outgoing, Packer
from groupio.format.manifest import encode_manifest
from groupio.format.records import AbortRecord, encode_abort, encode_lineage, segment_name
from groupio.format.segment import SegmentHeader, encode_footer, encode_header
from groupio.model import (
    PAGE_BYTES,
    ChunkTable,
    DecisionKey,
    Lineage,
    MemberTable,
    NodeReport,
    SegmentRef,
)
from groupio.plan import dedup

LARGE = 64 << 10
RANDOM = np.random.default_rng(5)
BIG = RANDOM.standard_normal((1200, 1000))


def lease_of(outgoing: Outgoing) -> bytearray:
    """The lease of a save in one wave, copied as the client does it."""
    lease = bytearray(max(outgoing.layout.total_bytes, 1))
    address = ctypes.addressof(ctypes.c_char.from_buffer(lease))
    end = outgoing.layout.total_bytes
    assert copy_range(outgoing.prepared, outgoing.layout, 0, end, address, lambda: False)
    return lease


class StoreBuilder:
    """Writes epochs as an agent would; equal chunks of one epoch are stored once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.backend = PosixBackend.open(path, create=True)
        self.record = self.backend.ensure_store_record("job")

    def close(self) -> None:
        self.backend.close()

    def commit(
        self,
        epoch: int,
        members: Sequence[Mapping[str, Any]],
        *,
        lineage: int = 1,
        attempt: int = 1,
        segments: int = 1,
        metadata: Mapping[str, Any] | None = None,
    ) -> DecisionKey:
        """Commit an epoch whose chunks are dealt out over so many segments."""
        key = DecisionKey(lineage, epoch, attempt)
        manifest = dedup.build_manifest(
            [self._report(key, members, segments)],
            store_id=self.record.store_id,
            job="job",
            key=key,
            incarnation=1,
            world_size=len(members),
            fingerprint=b"f" * 32,
            write_id=f"write-{key}",
            created_at=1.7e9 + epoch,
            metadata=metadata or {},
        )
        self.backend.prepare(key, encode_manifest(manifest))
        assert self.backend.commit_prepared(key)
        return key

    def abort(self, epoch: int, attempt: int = 1) -> None:
        key = DecisionKey(1, epoch, attempt)
        record = AbortRecord(key, 1, "a rank died", (1,), f"abort-{key}", 1.7e9)
        assert self.backend.put_if_absent("epochs", str(key), encode_abort(record))

    def rewind(self, number: int, parent: int, after: int) -> None:
        line = Lineage(number, parent, after, 1.7e9)
        assert self.backend.put_if_absent("lineages", f"{number:08d}", encode_lineage(line))

    def record_path(self, key: DecisionKey) -> Path:
        return self.path / "epochs" / str(key)

    def segment_path(self, key: DecisionKey, seq: int = 0) -> Path:
        return self.path / "segments" / segment_name(key, "node", seq)

    def _report(
        self, key: DecisionKey, members: Sequence[Mapping[str, Any]], segments: int
    ) -> NodeReport:
        chunks: dict[bytes, bytes] = {}
        tables = []
        for rank, items in enumerate(members):
            out = Packer().pack(items, ())
            lease, refs = lease_of(out), []
            spans = zip(out.layout.chunk_start, out.layout.chunk_length, strict=True)
            for start, length in spans:
                data = bytes(lease[start : start + length])
                digest = blake3(data).digest()
                chunks.setdefault(digest, data)
                refs.append(digest)
            tables.append((rank, out, refs))
        order = {digest: row for row, digest in enumerate(chunks)}
        homes = np.arange(len(chunks), dtype=np.int32) % segments
        offsets = np.zeros(len(chunks), np.int64)
        refs_of = []
        listed = list(chunks.items())
        for seq in range(segments if chunks else 0):
            rows = np.flatnonzero(homes == seq)
            name, size = self._segment(key, seq, [listed[row] for row in rows], offsets, rows)
            refs_of.append(SegmentRef(name, size, own=True))
        digests = np.frombuffer(b"".join(chunks), np.uint8).reshape(-1, 32)
        lengths = np.array([len(data) for data in chunks.values()], np.int64)
        return NodeReport(
            "node",
            tuple(refs_of),
            ChunkTable(digests, lengths, homes, offsets),
            tuple(
                MemberTable(
                    rank,
                    out.prepared.specs,
                    out.items_id,
                    np.array([order[digest] for digest in refs], np.int64),
                    out.prepared.bytes_logical,
                )
                for rank, out, refs in tables
            ),
        )

    def _segment(
        self,
        key: DecisionKey,
        seq: int,
        chunks: Sequence[tuple[bytes, bytes]],
        offsets: np.ndarray[Any, Any],
        rows: np.ndarray[Any, Any],
    ) -> tuple[str, int]:
        name = segment_name(key, "node", seq)
        body = bytearray(encode_header(SegmentHeader(self.record.store_id, key, "node", seq)))
        for row, (_, data) in zip(rows, chunks, strict=True):
            if len(data) >= LARGE:
                body += bytes(-len(body) % PAGE_BYTES)
            offsets[row] = len(body)
            body += data
        body += bytes(-len(body) % PAGE_BYTES)
        digests = np.frombuffer(b"".join(digest for digest, _ in chunks), np.uint8)
        lengths = np.array([len(data) for _, data in chunks], np.int64)
        body += encode_footer(offsets[rows], lengths, digests.reshape(-1, 32), len(body))
        self.backend.put("segments", name, bytes(body), durable=False)
        return name, len(body)


def state(rank: int = 0, step: int = 0) -> dict[str, Any]:
    own = RANDOM.standard_normal(70_000).astype(np.float32)
    tied = np.arange(50_000, dtype=np.int32)
    return {
        "big": BIG,
        "turned": BIG[:700, ::3].T,
        "own": own + rank + step,
        "tied.a": tied,
        "tied.b": tied,
        **{f"small.{i}": np.full(16, i + step) for i in range(50)},
        "bf16": np.arange(9).astype(ml_dtypes.bfloat16),
        "fp8": np.arange(9).astype(ml_dtypes.float8_e5m2),
        "nan": np.array([np.nan, -0.0, np.inf]),
        "swapped": np.arange(5, dtype=">i4"),
        "time": np.array(["2020-01-01"], "M8[D]"),
        "scalar": np.array(2.5, np.float16),
        "empty": np.zeros((3, 0, 2), np.uint16),
        "fields": np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]),
        "raw": os.urandom(5_000_000),
        "none": None,
        "plain": {"lr": 1e-3, 3: (True, 1 << 80, "\ud800", b"x"), "a": np.int16(4)},
        "view": bytearray(b"abc"),
    }


def same(got: Any, saved: Any) -> bool:
    if isinstance(saved, np.ndarray):
        return (
            got.dtype == saved.dtype
            and got.shape == saved.shape
            and got.tobytes() == saved.tobytes()
        )
    if isinstance(saved, bytearray):
        return bool(got.tobytes() == saved)
    return type(got) is type(saved) and bool(got == saved)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.chmod(0o600)
    path.write_bytes(data)
