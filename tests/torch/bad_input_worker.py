"""Run by torchrun on 2 ranks: ``bad_input_worker.py FOLDER``. What happened goes to FOLDER."""

from __future__ import annotations

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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torchrun_worker import caught, clone, equal, wipe

import groupio.torch as gt

WAIT_S = 60.0


def timed(call: Any) -> dict[str, Any]:
    """What became of a call, and how long that took."""
    begin = time.monotonic()
    return {**caught(call), "seconds": time.monotonic() - begin}


def saved(state: Any, store: Path, step: int, **how: Any) -> dict[str, Any]:
    def call() -> None:
        handle = gt.save(state, store, step=step, deadline_s=WAIT_S, dcp_door=False, **how)
        handle.wait("durable", WAIT_S)

    return timed(call)


def loaded(into: Any, store: Path, **how: Any) -> dict[str, Any]:
    """What became of a load, and whether the values were left alone."""
    before = clone(into)
    out = timed(lambda: gt.load(into, store, **how))
    out["untouched"] = equal(into, before)
    return out


def placements(store: Path, mesh: DeviceMesh) -> dict[str, Any]:
    """DTensors that say something else than they are."""
    good = distribute_tensor(torch.arange(48.0).reshape(12, 4), mesh, [Shard(0)])
    partial = DTensor.from_local(torch.ones(3, 4), mesh, [Partial()], run_check=False)
    wrong = DTensor.from_local(
        torch.ones(2, 4),
        mesh,
        [Shard(0)],
        run_check=False,
        shape=torch.Size((80, 4)),
        stride=(4, 1),
    )
    out = {
        "partial": saved({"model": {"w": partial}}, store, 1),
        "local": saved({"model": {"w": wrong}}, store, 2),
        "good": saved({"model": {"w": good}, "n": 5}, store, 3),
    }
    into = {"model": {"w": partial}, "n": 0}
    out["load partial"] = timed(lambda: gt.load(into, store))
    out["load partial"]["untouched"] = bool((partial.to_local() == 1).all()) and into["n"] == 0
    taller = distribute_tensor(torch.zeros(14, 4), mesh, [Shard(0)])
    out["load taller"] = loaded({"model": {"w": taller}, "n": 0}, store)
    other = distribute_tensor(torch.zeros(12, 4).double(), mesh, [Shard(0)])
    out["load double"] = loaded({"model": {"w": other}, "n": 0}, store)
    across = distribute_tensor(torch.zeros(12, 4), mesh, [Shard(1)])
    out["load across"] = caught(lambda: gt.load({"model": {"w": across}, "n": 0}, store))
    out["across equal"] = equal(across.full_tensor(), good.full_tensor())
    return out


def meshes(store: Path, mesh: DeviceMesh) -> dict[str, Any]:
    """Ranks whose meshes contradict each other about one tensor."""
    rank = dist.get_rank()
    alone = DeviceMesh("cpu", [rank], _init_backend=False)
    local = torch.full((6, 4), float(rank))
    mine = DTensor.from_local(local, alone, [Shard(0)], run_check=False)
    out = {"own meshes": saved({"w": mine}, store, 1)}
    into = {"w": wipe(clone(mine))}
    out["own meshes loaded"] = loaded(into, store)
    out["own meshes equal"] = bool((into["w"].to_local() == local).all())
    shape = (12, 4) if rank == 0 else (10, 4)
    out["shapes"] = saved({"w": torch.zeros(shape)}, store, 2, replicated=["w"])
    return out


def names(store: Path) -> dict[str, Any]:
    """Each rank saves names that the other one does not have."""
    rank = dist.get_rank()
    state = {f"of-{rank}": torch.full((5,), float(rank)), "both": torch.ones(3), f"n{rank}": rank}
    out = {"saved": saved(state, store, 1)}
    into = wipe(clone(state))
    out["loaded"] = timed(lambda: gt.load(into, store))
    out["equal"] = equal(into, state)
    swapped = {"of-7": torch.zeros(5), "both": torch.zeros(3), f"n{rank}": 0}
    out["absent"] = loaded(swapped, store)
    return out


def refused(store: Path) -> dict[str, Any]:
    """One rank cannot save: the other one hears of it, and the next step goes well."""
    rank = dist.get_rank()
    state = {"a": {"b": [torch.ones(2), lambda: 0]} if rank else {"b": torch.ones(2)}}
    out = {"one": saved(state, store, 1)}
    out["next"] = saved({"a": torch.ones(2)}, store, 2)
    into = {"a": torch.zeros(2)}
    odd = {"a": torch.zeros(2).to_sparse()} if rank else into
    out["load"] = timed(lambda: gt.load(odd, store))
    out["untouched"] = not into["a"].any().item()
    return out


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    # Whatever hangs is shown, not waited for.
    guard = threading.Timer(100, lambda: os.kill(os.getpid(), signal.SIGABRT))
    guard.daemon = True
    guard.start()
    mesh = init_device_mesh("cpu", (2,))
    found = {
        "placements": placements(folder / "placements", mesh),
        "meshes": meshes(folder / "meshes", mesh),
        "names": names(folder / "names"),
        "refused": refused(folder / "refused"),
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))
    gt.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
