"""Measures what a long history costs: ``python benchmarks/many_epochs.py --json FILE``.

Stores with 30 and with 5,000 epochs are written without an agent, a small segment of its own for
each epoch. Then, in seconds, each in a process of its own and the fastest of ``--tries``:

``connect``  ``groupio.connect`` where no agent runs
``load``     the load of the newest epoch after it
``save``     a save after that until it is DURABLE
``epochs``   ``Client.epochs()`` after it
``reader``   ``epochs()`` by a program that has not listed the store before
``ls``, ``verify``  the command, its start included

Pages are in the cache of the system, as those of a store in use are.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from groupio.backend.base import EPOCHS, SEGMENTS
from groupio.backend.posix import PosixBackend
from groupio.format.items import encode_items, items_id
from groupio.format.manifest import encode_manifest
from groupio.format.records import segment_name
from groupio.format.segment import SegmentHeader, encode_footer, encode_header
from groupio.model import (
    ChunkTable,
    DecisionKey,
    ItemKind,
    ItemSpec,
    MemberTable,
    NodeReport,
    SegmentRef,
)
from groupio.plan import dedup

NODE = "node"
BYTES = 1 << 16
METADATA = {"loss": 0.25, "tokens": 1 << 40}

_CONNECTED = """
import json, sys, time
import groupio, numpy as np
began = time.monotonic()
client = groupio.connect(sys.argv[1], rank=0, world_size=1)
marks = [time.monotonic()]
newest = client.load(); marks.append(time.monotonic())
assert newest["weights"].nbytes
client.save({"weights": newest["weights"]}, epoch=int(sys.argv[2])).wait("durable")
marks.append(time.monotonic())
count = len(client.epochs()); marks.append(time.monotonic())
assert count == int(sys.argv[2]), count
client.close()
took = [b - a for a, b in zip([began, *marks], marks)]
print(json.dumps(dict(zip(("connect", "load", "save", "epochs"), took))))
"""

_READER = """
import json, sys, time
import groupio
from groupio.client.store_reader import StoreReader
began = time.monotonic()
with StoreReader.open(sys.argv[1]) as reader:
    count = len(reader.epochs())
assert count == int(sys.argv[2]), count
print(json.dumps({"reader": time.monotonic() - began}))
"""


def make_store(path: Path, epochs: int) -> None:
    """Write a store with that many epochs, the last of number ``epochs - 1``."""
    with PosixBackend.open(path, create=True) as store:
        record = store.ensure_store_record("many")
        for epoch in range(epochs):
            key = DecisionKey(1, epoch, 0)
            report = _segment(store, record.store_id, key)
            manifest = dedup.build_manifest(
                [report],
                store_id=record.store_id,
                job="many",
                key=key,
                incarnation=1,
                world_size=1,
                fingerprint=b"f" * 32,
                write_id=f"{epoch:032x}",
                created_at=1.7e9 + epoch,
                metadata=METADATA,
            )
            store.put(EPOCHS, str(key), encode_manifest(manifest), durable=False)


def _segment(store: PosixBackend, store_id: str, key: DecisionKey) -> NodeReport:
    data = np.full(BYTES, key.epoch, np.uint32).tobytes()[:BYTES]
    digests = np.frombuffer(blake3(data).digest(), np.uint8).reshape(1, 32)
    name = segment_name(key, NODE, 0)
    body = encode_header(SegmentHeader(store_id, key, NODE, 0)) + data
    offsets, lengths = np.array([len(body) - BYTES]), np.array([BYTES])
    body += encode_footer(offsets, lengths, digests, len(body))
    store.put(SEGMENTS, name, body, durable=False)
    spec = ItemSpec("weights", ItemKind.TENSOR, "uint8", (BYTES,), (BYTES,), (0,), BYTES)
    table = MemberTable(0, (spec,), items_id(encode_items((spec,))), np.zeros(1, np.int64), BYTES)
    chunks = ChunkTable(digests, lengths, np.zeros(1, np.int32), offsets)
    return NodeReport(NODE, (SegmentRef(name, len(body), True),), chunks, (table,))


def measure(path: Path, epochs: int) -> dict[str, float]:
    """One try of each figure."""
    with tempfile.TemporaryDirectory() as runtime:
        environ = os.environ | {"GROUPIO_RUNTIME_DIR": runtime, "GROUPIO_IDLE_S": "0.1"}

        def python(code: str) -> dict[str, float]:
            words = [sys.executable, "-c", code, str(path), str(epochs + 1)]
            out = subprocess.run(words, env=environ, capture_output=True, text=True, check=True)
            return dict(json.loads(out.stdout))

        found = python(_CONNECTED)
        found |= python(_READER)
        for command in ("ls", "verify"):
            began = time.monotonic()
            words = [sys.executable, "-m", "groupio.cli", command, str(path), "--json"]
            done = subprocess.run(words, env=environ, capture_output=True, check=True)
            found[command] = time.monotonic() - began
            assert len(json.loads(done.stdout)["epochs"]) == epochs + 1
    _forget(path, epochs)
    return found


def _forget(path: Path, epoch: int) -> None:
    """Remove what the try saved, so that the next one finds the same store."""
    for folder in (EPOCHS, SEGMENTS):
        for file in (path / folder).glob(f"*-E{epoch:020d}-*"):
            file.unlink()


def main() -> None:
    """Make the stores, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, nargs="+", default=[30, 5000])
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report: dict[str, Any] = {"machine": platform.platform(), "cpus": os.cpu_count()}
    for epochs in options.epochs:
        with tempfile.TemporaryDirectory() as folder:
            store = Path(folder) / "store"
            make_store(store, epochs)
            tries = [measure(store, epochs) for _ in range(options.tries)]
        best = {name: round(min(one[name] for one in tries), 3) for name in tries[0]}
        report[str(epochs)] = best
        print(f"{epochs:>6} epochs: " + "  ".join(f"{name} {s:.3f}" for name, s in best.items()))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
