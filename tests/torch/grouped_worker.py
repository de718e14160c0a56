"""One rank of test_torch_grouped: ``grouped_worker.py FOLDER``. What happened goes to FOLDER."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import groupio
import groupio.torch as gt
from groupio.backend.records import PosixReader
from groupio.client.shared_link import LinkFailed, Meeting, host_identity
from groupio.torch import grouped

WAIT_S = 60.0
COUNT = 5 << 18  # of float32: a chunk and a part of one


def state_of(step: int) -> dict[str, Any]:
    """The same on all ranks but for "own"."""
    same = torch.arange(COUNT, dtype=torch.float32) + step
    own = torch.full((COUNT,), 100.0 * step + dist.get_rank())
    return {"same": same, "twice": same * 3, "own": own, "rank": dist.get_rank()}


def load(store: Path, epoch: int, **options: Any) -> dict[str, Any]:
    """Load, check, and say where the bytes came from."""
    into = {name: torch.zeros(COUNT) for name in ("same", "twice", "own")} | {"rank": None}
    report = gt.load(into, store, **options)
    expected = state_of(epoch)
    right = all(torch.equal(into[name], expected[name]) for name in ("same", "twice", "own"))
    return {
        "right": right and into["rank"] == dist.get_rank() and report.step == epoch,
        "read": report.bytes_read,
        "forwarded": report.bytes_forwarded,
        "notes": list(report.notes),
        "skipped": [one.epoch for one in report.skipped_epochs],
    }


def two_hosts(store: Path) -> dict[str, Any]:
    """Rank 2 is elsewhere."""
    rank = dist.get_rank()
    grouped.host_identity = lambda: f"{host_identity()}-{rank // 2}"
    try:
        return load(store, 2)
    finally:
        grouped.host_identity = host_identity


def unreachable(store: Path) -> dict[str, Any]:
    """Rank 1 cannot reach the others."""
    real = Meeting.link

    def fail(*_: Any) -> Any:
        raise LinkFailed("no such socket")

    if dist.get_rank() == 1:
        Meeting.link = fail  # type: ignore[method-assign]
    grouped.LINK_S = 1.0
    try:
        return load(store, 2)
    finally:
        Meeting.link = real  # type: ignore[method-assign]


def damaged(store: Path) -> dict[str, Any]:
    """Rank 0 makes a chunk of epoch 2 unreadable."""
    if dist.get_rank() == 0:
        newest = max((store / "segments").iterdir(), key=lambda path: path.name)
        newest.chmod(0o600)
        os.truncate(newest, newest.stat().st_size // 4)
    dist.barrier()
    return load(store, 1, fallback=True)


def killed(store: Path) -> dict[str, Any]:
    """Rank 1 is killed at its second read."""
    dist.barrier()
    reads = []
    if dist.get_rank() == 1:
        real = PosixReader.read_into

        def read_into(self: PosixReader, offset: int, view: memoryview) -> None:
            reads.append(offset)
            if len(reads) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            real(self, offset, view)

        PosixReader.read_into = read_into  # type: ignore[method-assign]
    start = time.monotonic()
    try:
        load(store, 1, step=1)
    except groupio.GroupAborted as error:
        return {"members": error.members, "took": time.monotonic() - start}
    return {"members": None}


def main() -> None:
    folder = Path(sys.argv[1])
    store = folder / "store"
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for step in (1, 2):
        gt.save(state_of(step), store, step=step, deadline_s=WAIT_S).wait("durable", WAIT_S)
        dist.barrier()
    found = {"together": load(store, 2)}
    for scenario in (two_hosts, unreachable, damaged, killed):
        found[scenario.__name__] = scenario(store)
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    gt.close()
    os._exit(0)  # the group cannot be taken down without the one that was killed


if __name__ == "__main__":
    main()
