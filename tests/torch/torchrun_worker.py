"""Run by torchrun: ``torchrun_worker.py SCENARIO FOLDER``. What happened goes to FOLDER."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import groupio
import groupio.torch as gt
from groupio.torch.tensors import as_integers

WAIT_S = 60.0


def equal(one: Any, other: Any) -> bool:
    """Bit for bit, types included."""
    if isinstance(one, torch.Tensor):
        if type(one) is not type(other) or one.dtype != other.dtype or one.shape != other.shape:
            return False
        if isinstance(one, DTensor):
            return equal(one.to_local(), other.to_local())
        return torch.equal(as_integers(one.detach()), as_integers(other.detach()))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and one == other


def clone(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: clone(child) for key, child in value.items()}
    if isinstance(value, list):
        return [clone(child) for child in value]
    return value


def wipe(value: Any) -> Any:
    """The same state dict with other content."""
    if isinstance(value, DTensor):
        value.to_local().fill_(77)
    elif isinstance(value, torch.Tensor):
        value.fill_(77)
    elif isinstance(value, dict):
        for key, child in value.items():
            value[key] = wipe(child)
    elif isinstance(value, list):
        return [wipe(child) for child in value]
    elif not isinstance(value, tuple):
        return "wiped"
    return value


def model_of(parallel: str) -> torch.nn.Module:
    torch.manual_seed(5)
    model = torch.nn.Sequential(
        torch.nn.Linear(10, 133),
        torch.nn.GELU(),
        torch.nn.Linear(133, 133),
        torch.nn.Linear(133, 3),
    )
    world = dist.get_world_size()
    if parallel == "ddp":
        return DistributedDataParallel(model)
    shape = (world,) if parallel == "fsdp" else (2, world // 2)
    names = ("shard",) if parallel == "fsdp" else ("replicate", "shard")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.randn(4, 10)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def resume(folder: Path, parallel: str) -> dict[str, Any]:
    """Save, go on, start anew from the save, go on: both ends are equal."""
    store = folder / parallel
    rank = dist.get_rank()
    model = model_of(parallel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(100 + rank)
    train(model, optimizer, 2)

    def state_of() -> dict[str, Any]:
        weights, optim = get_state_dict(model, optimizer)
        return {"model": weights, "optim": optim, "rng": torch.get_rng_state(), "rank": rank}

    handle = gt.save(state_of(), store, step=2, deadline_s=WAIT_S)
    train(model, optimizer, 2)
    handle.wait("durable", WAIT_S)
    end = clone(state_of())

    model = model_of(parallel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    # DDP arranges its buckets anew after the first step, and so the order of its sums.
    train(model, optimizer, 1)
    into = wipe(state_of())
    report = gt.load(into, store)
    set_state_dict(model, optimizer, model_state_dict=into["model"], optim_state_dict=into["optim"])
    torch.set_rng_state(into["rng"])
    train(model, optimizer, 2)
    info = gt.clients.client_for(store, gt.members.find_members(None)).epochs()[0]
    whole: dict[str, Any] = {"model": None, "optim": None, "rng": None, "rank": None}
    gt.load(whole, store)
    return {
        "step": report.step,
        "rank": into["rank"],
        "equal": equal(state_of(), end),
        "logical": info.bytes_logical,
        "unique": info.bytes_unique,
        "whole": [list(tensor.shape) for tensor in whole["model"].values()],
    }


def caught(call: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"result": str(call())}
    except groupio.GroupIOError as error:
        return {"error": type(error).__name__, "message": error.message, **error.fields()}


def agreement(folder: Path) -> dict[str, Any]:
    """All ranks get the same epoch, or all get the error of the one that failed."""
    rank, world = dist.get_rank(), dist.get_world_size()
    store = folder / "agreement"
    out: dict[str, Any] = {}
    for step in (1, 2):
        state = {"own": torch.full((1000,), float(10 * step + rank)), "n": step}
        gt.save(state, store, step=step, deadline_s=WAIT_S).wait("durable", WAIT_S)
    into: dict[str, Any] = {"own": torch.zeros(1000), "n": 0}
    bad = dict(into, own=torch.zeros(5)) if rank == 1 else dict(into)
    out["mismatch"] = caught(lambda: gt.load(bad, store))
    out["untouched"] = bad["n"] == 0 and not bool(into["own"].any())
    out["refused"] = caught(lambda: gt.load({"x": print} if rank == 1 else into, store))
    out["steps"] = caught(lambda: gt.load(into, store, step=1 if rank == 0 else 2))
    dist.barrier()
    if rank == 0:
        # Damage what only the last rank saved.
        segments = sorted((store / "segments").iterdir(), key=lambda path: path.stat().st_mtime)
        data = bytearray(segments[-1].read_bytes())
        mark = torch.full((1000,), float(20 + world - 1)).numpy().tobytes()
        data[data.index(mark) + 5] ^= 4
        segments[-1].write_bytes(data)
    dist.barrier()
    out["damage"] = caught(lambda: gt.load(into, store))
    report = gt.load(into, store, fallback=True)
    out["fallback"] = [report.step, [s.epoch for s in report.skipped_epochs]]
    out["value"] = into["own"][0].item()
    return out


def declared(folder: Path) -> dict[str, Any]:
    """Replicas are compared; per-rank values of one name stay apart."""
    rank = dist.get_rank()
    store = folder / "declared"
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(1)
    base = torch.randn(64, 3)
    good = distribute_tensor(base, mesh, [Replicate()])
    uneven = distribute_tensor(torch.randn(7, 3), mesh, [Shard(0)])
    state = {"good": good, "uneven": uneven, "same": base, "own": base + rank}
    out = {"saved": caught(lambda: gt.save(state, store, step=1).wait("durable", WAIT_S))}
    out["saved"].pop("result", None)
    info = gt.clients.client_for(store, gt.members.find_members(None)).epochs()[0]
    out["copies"] = round(info.bytes_unique / base.nbytes)
    into = wipe(clone(state))
    gt.load(into, store)
    out["equal"] = equal(into, state)
    broken = DTensor.from_local(base + rank, mesh, [Replicate()], run_check=False)
    handle = gt.save({"bad": {"w": broken}}, store, step=2, deadline_s=WAIT_S)
    out["dtensor"] = caught(lambda: handle.wait("durable", WAIT_S))
    handle = gt.save({"own": base + rank}, store, step=3, replicated=["o*"], deadline_s=WAIT_S)
    out["pattern"] = caught(lambda: handle.wait("durable", WAIT_S))
    sparse = {"a": base.to_sparse()} if rank == 1 else {"a": base}
    dist.barrier()
    if rank == 1:
        time.sleep(1)  # the others wait for this one by now
    begin = time.monotonic()
    try:
        handle = gt.save(sparse, store, step=4, deadline_s=WAIT_S)
        out["withdrawn"] = caught(lambda: handle.wait("durable", WAIT_S))
    except groupio.InvalidInput as error:
        out["withdrawn"] = {"error": "InvalidInput", "message": error.message}
    out["soon"] = time.monotonic() - begin < WAIT_S / 2
    return out


def killed(folder: Path) -> dict[str, Any]:
    """The last rank is killed while it copies; the others learn its number."""
    from groupio.client.sources import Flat

    rank, world = dist.get_rank(), dist.get_world_size()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends the others: they speak first
    store = folder / "killed"
    state = {"w": torch.randn(1 << 20), "v": torch.randn(1 << 20)}
    gt.save(state, store, step=1, deadline_s=WAIT_S).wait("durable", WAIT_S)
    dist.barrier()
    if rank == world - 1:

        def die(*_: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        Flat.copy_range = die  # type: ignore[method-assign]
    handle = gt.save(state, store, step=2, deadline_s=WAIT_S)
    out = caught(lambda: handle.wait("durable", WAIT_S))
    out["epochs"] = [
        e.epoch for e in gt.clients.client_for(store, gt.members.find_members(None)).epochs()
    ]
    return out


SCENARIOS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "fsdp": lambda folder: resume(folder, "fsdp"),
    "hsdp": lambda folder: resume(folder, "hsdp"),
    "ddp": lambda folder: resume(folder, "ddp"),
    "agreement": agreement,
    "declared": declared,
    "killed": killed,
}


def main() -> None:
    folder = Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    # Whatever hangs is shown, not waited for.
    guard = threading.Timer(150, lambda: os.kill(os.getpid(), signal.SIGABRT))
    guard.daemon = True
    guard.start()
    for name in sys.argv[1].split(","):
        result = SCENARIOS[name](folder)
        (folder / f"{name}-{rank}.json").write_text(json.dumps(result))
    gt.close()
    if "killed" not in sys.argv[1]:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
