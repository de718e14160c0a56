"""One of two ranks whose saves fail because the store has a newer epoch: ``… FOLDER``."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import groupio
import groupio.torch as gt


def caught(step: int, store: str, **options: Any) -> str:
    try:
        gt.save({"w": torch.full((1000,), float(step))}, store, step=step, **options)
    except groupio.GroupIOError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def failure(step: int, store: str) -> None:
    """A save that fails; returns once this rank has heard of it."""
    handle = gt.save({"w": torch.ones(9)}, store, step=step)
    end = time.monotonic() + 30
    while handle.outcome == "unknown" and time.monotonic() < end:
        time.sleep(0.005)
    # One rank looks, the other does not.
    if dist.get_rank() == 0:
        assert isinstance(handle.error, groupio.StaleEpoch)


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    store = os.fspath(folder / "store")
    said: dict[str, Any] = {"first": caught(200, store, on_error="raise")}
    failure(150, store)
    said["raised"] = caught(160, store, on_error="raise")
    said["again"] = caught(201, store, on_error="raise")
    # What one rank alone knows of, and heard of late.
    if rank == 1:
        handle = groupio.SaveHandle(7, 0.0, failures=gt.clients.open_clients()[0]._failures)
        handle._fail(groupio.AgentLost("only rank 1 knows; save again"))
    said["alone"] = caught(202, store, on_error="raise")
    if rank == 0:
        handle = groupio.SaveHandle(7, 0.0, failures=gt.clients.open_clients()[0]._failures)
        handle._fail(groupio.AgentLost("only rank 1 knows; save again"))
    said["late"] = caught(203, store, on_error="raise")
    gt.close()
    dist.barrier()
    said["durable"] = gt.load({"w": torch.zeros(1000)}, store).step
    (folder / f"{rank}.json").write_text(json.dumps(said))


main()
