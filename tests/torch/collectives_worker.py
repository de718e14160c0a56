"""Run by torchrun on 2 ranks: ``collectives_worker.py FOLDER``: saves and loads, guarded."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torchrun_worker import clone, equal, wipe

import groupio.torch as gt

WAIT_S = 60.0
NAMES = (
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "irecv",
    "isend",
    "monitored_barrier",
    "recv",
    "reduce",
    "scatter",
    "send",
)


def guard(calls: list[str], allowed: threading.local) -> int:
    """Record every collective that is called by anybody but the training loop."""
    guarded = 0

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **named: Any) -> Any:
            if not getattr(allowed, "training", False):
                calls.append(name)
            return real(*args, **named)

        return called

    for module in (c10d, dist):
        for name in dir(module):
            if name.startswith(NAMES) and callable(getattr(module, name)):
                setattr(module, name, wrap(name, getattr(module, name)))
                guarded += 1
    return guarded


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    # Whatever hangs is shown, not waited for.
    timer = threading.Timer(100, lambda: os.kill(os.getpid(), signal.SIGABRT))
    timer.daemon = True
    timer.start()
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(1)
    state = {
        "shard": distribute_tensor(torch.randn(2000, 1000), mesh, [Shard(0)]),
        "replica": distribute_tensor(torch.randn(2000, 1000), mesh, [Replicate()]),
        "own": torch.full((5,), float(rank)),
    }
    into = wipe(clone(state))
    calls: list[str] = []
    allowed = threading.local()
    guarded = guard(calls, allowed)
    store = folder / "store"
    handles = []
    steps = 0
    # The loop uses the same group while saves go on in the background.
    for step in range(1, 7):
        how = ("full", "off", "sampled")[step % 3]
        handles.append(gt.save(state, store, step=step, deadline_s=WAIT_S, verify_replicas=how))
        for _ in range(10):
            allowed.training = True
            dist.all_reduce(torch.ones(1000))
            allowed.training = False
            steps += 1
    for handle in handles:
        handle.wait("durable", WAIT_S)
    gt.load(into, store)
    gt.load(into, store, step=2)
    found = {
        "calls": calls,
        "guarded": guarded,
        "steps": steps,
        "equal": equal(into, state),
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))
    gt.close()
    allowed.training = True
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
