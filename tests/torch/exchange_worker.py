"""One rank of test_torch_exchange: ``exchange_worker.py FOLDER``. What happened goes to FOLDER."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import groupio
import groupio.torch as gt
from groupio.backend.records import PosixReader
from groupio.torch import collective_read, exchange, loading

WAIT_S = 60.0
COUNT = 5 << 18  # of float32: a chunk and a part of one
SMALL = 200


def state_of(step: int) -> dict[str, Any]:
    """The same on all ranks but for "own"."""
    same = torch.arange(COUNT, dtype=torch.float32) + step
    own = torch.full((COUNT,), 100.0 * step + dist.get_rank())
    small = {f"small.{i}": torch.arange(16.0) + step * i for i in range(SMALL)}
    return {"same": same, "twice": same * 3, "own": own, "rank": dist.get_rank(), **small}


def load(store: Path, epoch: int, **options: Any) -> dict[str, Any]:
    """Load, check, and say where the bytes came from."""
    expected = state_of(epoch)
    into = {
        name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None
        for name, value in expected.items()
    }
    report = gt.load(into, store, **options)
    right = all(
        torch.equal(value, expected[name]) if isinstance(value, torch.Tensor) else True
        for name, value in into.items()
    )
    return {
        "right": right and into["rank"] == dist.get_rank() and report.step == epoch,
        "read": report.bytes_read,
        "forwarded": report.bytes_forwarded,
        "notes": list(report.notes),
        "skipped": [one.epoch for one in report.skipped_epochs],
    }


def together(store: Path) -> dict[str, Any]:
    """Only the calling thread talks to the group."""
    threads = set()
    real = dist.batch_isend_irecv

    def watched(operations: Any) -> Any:
        threads.add(threading.current_thread() is threading.main_thread())
        return real(operations)

    exchange.dist.batch_isend_irecv = watched
    try:
        return load(store, 2) | {"main_thread_only": threads == {True}}
    finally:
        exchange.dist.batch_isend_irecv = real


def small_window(store: Path) -> dict[str, Any]:
    """Memory for no more than one batch."""
    collective_read.WINDOW_BYTES, before = 1, collective_read.WINDOW_BYTES
    try:
        return load(store, 2)
    finally:
        collective_read.WINDOW_BYTES = before


def nothing_wanted(store: Path) -> dict[str, Any]:
    """Rank 2 loads nothing but its number."""
    if dist.get_rank() < 2:
        return load(store, 2, strict=False)
    into: dict[str, Any] = {}
    report = gt.load(into, store, strict=False)
    return {"right": True, "read": report.bytes_read, "forwarded": report.bytes_forwarded}


def bits_flipped_on_the_way(store: Path) -> dict[str, Any]:
    """What rank 1 sends arrives with a wrong bit in its first chunk."""
    real = exchange.Mover.move

    def move(self: exchange.Mover, sends: Any, receives: Any) -> Any:
        sent = [(data.copy(), ranks) for data, ranks in sends]
        for data, _ in sent:
            data[1] ^= 1
        return real(self, sent, receives)

    if dist.get_rank() == 1:
        exchange.Mover.move = move  # type: ignore[method-assign]
    try:
        return load(store, 2)
    finally:
        exchange.Mover.move = real  # type: ignore[method-assign]


def reader_fails(store: Path) -> dict[str, Any]:
    """The store gives rank 1 errors."""
    real = PosixReader.read_into

    def read_into(self: PosixReader, offset: int, view: memoryview) -> None:
        raise groupio.StorageError("the store is away", path=str(store), errno=errno.EIO)

    if dist.get_rank() == 1:
        PosixReader.read_into = read_into  # type: ignore[method-assign]
    try:
        load(store, 2)
    except groupio.StorageError as error:
        return {"said": str(error)}
    finally:
        PosixReader.read_into = real  # type: ignore[method-assign]
    return {"said": ""}


def rank_fails_before_it_reads(store: Path) -> dict[str, Any]:
    """Rank 1 has no memory to begin with."""
    real = loading.StoreReader.read_wants

    def read_wants(self: Any, *_: Any, **__: Any) -> None:
        raise MemoryError("none left")

    if dist.get_rank() == 1:
        loading.StoreReader.read_wants = read_wants  # type: ignore[method-assign]
    try:
        load(store, 2)
    except groupio.GroupIOError as error:
        return {"said": str(error)}
    finally:
        loading.StoreReader.read_wants = real  # type: ignore[method-assign]
    return {"said": ""}


def settings_differ(store: Path) -> dict[str, Any]:
    """Rank 1 has another fabric."""
    gt.close()
    if dist.get_rank() == 1:
        os.environ["GROUPIO_FABRIC"] = "tcp"
    try:
        load(store, 2)
    except groupio.InvalidInput as error:
        return {"said": str(error)}
    finally:
        gt.close()
        os.environ["GROUPIO_FABRIC"] = "torch"
    return {"said": ""}


def damaged(store: Path) -> dict[str, Any]:
    """Rank 0 makes a chunk of epoch 2 unreadable."""
    if dist.get_rank() == 0:
        newest = max((store / "segments").iterdir(), key=lambda path: path.name)
        newest.chmod(0o600)
        os.truncate(newest, newest.stat().st_size // 4)
    dist.barrier()
    return load(store, 1, fallback=True)


def killed(store: Path) -> dict[str, Any]:
    """Rank 1 is killed before it sends anything."""
    dist.barrier()
    if dist.get_rank() == 1:
        exchange.Mover.move = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore
    start = time.monotonic()
    try:
        load(store, 1, step=1)
    except groupio.GroupAborted as error:
        return {"said": str(error), "took": time.monotonic() - start}
    return {"said": ""}


SCENARIOS = (
    together,
    small_window,
    nothing_wanted,
    bits_flipped_on_the_way,
    reader_fails,
    rank_fails_before_it_reads,
    settings_differ,
    damaged,
    killed,
)


def main() -> None:
    folder = Path(sys.argv[1])
    store = folder / "store"
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for step in (1, 2):
        gt.save(state_of(step), store, step=step, deadline_s=WAIT_S).wait("durable", WAIT_S)
        dist.barrier()
    found = {}
    for scenario in SCENARIOS:
        found[scenario.__name__] = scenario(store)
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    gt.close()
    os._exit(0)  # the group cannot be taken down without the one that was killed


if __name__ == "__main__":
    main()
