"""Stores made without an agent, for looking at them with the command line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from blake3 import blake3

from groupio.backend.posix import PosixBackend
from groupio.format.codec import encode_plain
from groupio.format.items import encode_items, items_id
from groupio.format.manifest import encode_manifest
from groupio.format.records import (
    AbortRecord,
    InflightRecord,
    encode_abort,
    encode_inflight,
    encode_lineage,
    segment_name,
)
from groupio.format.segment import SegmentHeader, encode_footer, encode_header
from groupio.model import (
    PAGE_BYTES,
    ChunkTable,
    DecisionKey,
    ItemKind,
    ItemSpec,
    Lineage,
    MemberTable,
    NodeReport,
    SegmentRef,
)
from groupio.plan import dedup
from groupio.plan.layout import lay_out

NODE = "node"


def spec_of(name: str, value: Any) -> tuple[ItemSpec, bytes]:
    """The spec and the bytes of an array, of bytes, or of a plain value."""
    if isinstance(value, np.ndarray):
        kind, dtype, data = ItemKind.TENSOR, str(value.dtype), value.tobytes()
        shape = value.shape
    else:
        kind = ItemKind.BYTES if isinstance(value, bytes) else ItemKind.PLAIN
        data = value if isinstance(value, bytes) else encode_plain(value)
        dtype, shape = "", (len(data),)
    return ItemSpec(name, kind, dtype, shape, shape, (0,) * len(shape), len(data)), data


class StoreMaker:
    """Writes epochs into a store as an agent would, one segment an epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.backend = PosixBackend.open(path, create=True)
        self.record = self.backend.ensure_store_record("job")
        self._known: dict[bytes, tuple[str, int, int]] = {}

    def close(self) -> None:
        self.backend.close()

    def commit(self, epoch: int, members: list[Mapping[str, Any]], **options: Any) -> DecisionKey:
        """Commit an epoch; equal chunks of it and of earlier ones are stored once."""
        key = DecisionKey(options.pop("lineage", 1), epoch, options.pop("attempt", 1))
        report = self._write(key, members)
        manifest = dedup.build_manifest(
            [report],
            store_id=self.record.store_id,
            job="job",
            key=key,
            incarnation=options.pop("incarnation", 1),
            world_size=len(members),
            fingerprint=b"f" * 32,
            write_id=f"write-{epoch}",
            created_at=1.7e9 + epoch,
            metadata=options.pop("metadata", {}),
        )
        assert not options
        self.backend.prepare(key, encode_manifest(manifest))
        assert self.backend.commit_prepared(key)
        return key

    def abort(self, key: DecisionKey) -> None:
        record = AbortRecord(key, 1, "a rank died", (1,), f"abort-{key.epoch}", 1.7e9)
        assert self.backend.put_if_absent("epochs", str(key), encode_abort(record))

    def announce(self, key: DecisionKey) -> None:
        record = InflightRecord(key, 1, 2, "w", 1.7e9, "boot", 1, 1, "host", ())
        self.backend.put("inflight", str(key), encode_inflight(record), durable=False)

    def rewind(self, number: int, parent: int, after: int) -> None:
        line = Lineage(number, parent, after, 1.7e9)
        assert self.backend.put_if_absent("lineages", f"{number:08d}", encode_lineage(line))

    def segment(self, key: DecisionKey, chunks: list[bytes]) -> Path:
        """A whole segment that nothing refers to."""
        name, _ = self._write_segment(key, chunks)
        return self.path / "segments" / name

    def _write_segment(self, key: DecisionKey, chunks: list[bytes]) -> tuple[str, list[int]]:
        name = segment_name(key, NODE, 0)
        header = SegmentHeader(self.record.store_id, key, NODE, 0)
        body, offsets = bytearray(encode_header(header)), []
        for chunk in chunks:
            offsets.append(len(body))
            body += chunk.ljust(-(-len(chunk) // PAGE_BYTES) * PAGE_BYTES, b"\0")
        digests = b"".join(blake3(chunk).digest() for chunk in chunks)
        body += encode_footer(
            np.array(offsets, np.int64),
            np.array([len(chunk) for chunk in chunks], np.int64),
            np.frombuffer(digests, np.uint8).reshape(-1, 32),
            len(body),
        )
        self.backend.put("segments", name, bytes(body), durable=False)
        return name, offsets

    def _write(self, key: DecisionKey, members: list[Mapping[str, Any]]) -> NodeReport:
        tables, chunks = [], {}
        for rank, items in enumerate(members):
            pairs = [spec_of(name, value) for name, value in items.items()]
            specs = tuple(spec for spec, _ in pairs)
            layout, refs = lay_out(specs), []
            for item, start, length in zip(
                layout.chunk_item, layout.chunk_start, layout.chunk_length, strict=True
            ):
                at = start - layout.item_start[item]
                data = pairs[item][1][at : at + length]
                refs.append(blake3(data).digest())
                chunks[refs[-1]] = data
            logical = sum(spec.nbytes for spec in specs)
            tables.append((rank, specs, refs, logical))
        new = {digest: data for digest, data in chunks.items() if digest not in self._known}
        if new:
            name, offsets = self._write_segment(key, list(new.values()))
            size = self.backend.size("segments", name)
            self._known |= {d: (name, size, at) for d, at in zip(new, offsets, strict=True)}
        names = dict.fromkeys(self._known[digest][0] for digest in chunks)
        sizes = {name: size for name, size, _ in self._known.values()}
        order = {digest: row for row, digest in enumerate(chunks)}
        place = {name: number for number, name in enumerate(names)}
        homes = [self._known[digest] for digest in chunks]
        return NodeReport(
            NODE,
            tuple(SegmentRef(n, sizes[n], n.startswith(str(key))) for n in names),
            ChunkTable(
                np.frombuffer(b"".join(chunks), np.uint8).reshape(-1, 32),
                np.array([len(data) for data in chunks.values()], np.int64),
                np.array([place[name] for name, _, _ in homes], np.int32),
                np.array([at for _, _, at in homes], np.int64),
            ),
            tuple(_member(rank, specs, refs, size, order) for rank, specs, refs, size in tables),
        )


def _member(
    rank: int, specs: tuple[ItemSpec, ...], refs: list[bytes], size: int, order: dict[bytes, int]
) -> MemberTable:
    rows = np.array([order[digest] for digest in refs], np.int64)
    return MemberTable(rank, specs, items_id(encode_items(specs)), rows, size)


def state(rank: int, step: int) -> dict[str, Any]:
    """One member's items: shared and own tensors, odd dtypes, bytes and plain values."""
    random = np.random.default_rng(rank)
    return {
        "embedding": np.arange(1 << 19, dtype=np.float32).reshape(1024, 512),
        "own": random.standard_normal((300, 1000)) + step,
        "half": np.arange(7).astype(ml_dtypes.bfloat16),
        "tiny": np.arange(5).astype(ml_dtypes.float8_e4m3fn),
        "wave": np.array([1 + 2j, -3j], np.complex128),
        "nothing": np.zeros((0, 3), np.int64),
        "../../escape": np.array(5, np.int32),
        "__metadata__": np.arange(3, dtype=np.int16),
        "raw": b"\x00\x01raw" * 100,
        "step": step,
        "settings": {"lr": 1e-3, "betas": (0.9, float("inf")), 3: None, "mask": np.arange(3)},
    }
