"""One rank of test_torch_first_save: ``first_save_worker.py FOLDER``. What it saw goes there."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import groupio
import groupio.torch as gt
from groupio.torch.clients import client_for
from groupio.torch.members import find_members

WAIT_S = 30.0
COUNT = 8
BYTES = 8 << 20


def mapped_bytes() -> int:
    """How much of its arena this process has in its page table."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            inside = "groupio-arena" in line
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


def wait_until_mapped(size: int) -> None:
    end = time.monotonic() + WAIT_S
    while mapped_bytes() < size:
        assert time.monotonic() < end, f"only {mapped_bytes()} of {size} bytes are mapped"
        time.sleep(0.01)
    # The thread that maps says so to the agent, too.
    time.sleep(0.05)


def state() -> dict[str, Any]:
    own = float(dist.get_rank())
    tensors = {f"w{i}": torch.full((BYTES // 4,), own + i) for i in range(COUNT)}
    return {"model": tensors, "step": 0}


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    store = folder / "store"
    given = state()
    try:
        gt.load(given, store)
    except groupio.NotFound:
        pass
    else:
        raise AssertionError("there was something to load")
    assert not store.exists(), "looking for a checkpoint made the store"
    wait_until_mapped(COUNT * BYTES)
    before = mapped_bytes()
    assert not store.exists()
    dist.barrier()
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    handle = gt.save(given, store, step=1)
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - faults
    after = mapped_bytes()
    handle.wait("durable", 60)
    client = client_for(store, find_members(None))
    arena = client._connections[-1]._arena
    assert arena is not None
    dist.barrier()
    back: dict[str, Any] = {
        "model": {f"w{i}": torch.zeros(BYTES // 4) for i in range(COUNT)},
        "step": None,
    }
    gt.load(back, store)
    right = all(torch.equal(back["model"][name], one) for name, one in given["model"].items())
    found = {
        "before": before,
        "after": after,
        "faults": faults,
        "leases": len(arena._leases),
        "right": right,
    }
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    gt.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GROUPIO_MEMORY_BYTES", "1G")
    main(Path(sys.argv[1]))
