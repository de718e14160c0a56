"""Run by torchrun on 4 ranks: ``replica_worker.py FOLDER``. What happened goes to FOLDER."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torchrun_worker import caught, clone, equal, wipe

import groupio.torch as gt
from groupio.client.store_reader import StoreReader

WAIT_S = 60.0
DRIFT = 123_457  # elements of rank 3's local tensor, of four bytes each


def flip(tensor: torch.Tensor, element: int) -> None:
    """Change one bit, the lowest of one element of a local tensor."""
    tensor.view(-1)[element : element + 1].view(torch.int32)[0] ^= 1


def saved(state: dict[str, Any], store: Path, step: int, **how: Any) -> Any:
    """What became of a save, and how long that took."""
    begin = time.monotonic()

    def call() -> None:
        handle = gt.save(state, store, step=step, deadline_s=WAIT_S, dcp_door=False, **how)
        handle.wait("durable", WAIT_S)

    return {**caught(call), "seconds": time.monotonic() - begin}


def replicas(mesh: DeviceMesh) -> dict[str, Any]:
    """Four MiB and more under hybrid and under full replication, small ones, and a plain one."""
    torch.manual_seed(7)
    return {
        "hsdp": distribute_tensor(torch.randn(1536, 1024), mesh, [Replicate(), Shard(0)]),
        "layers": [
            distribute_tensor(torch.randn(700, 777), mesh, [Replicate(), Replicate()])
            for _ in range(40)
        ],
        "experts": distribute_tensor(torch.randn(3, 5, 1024, 300), mesh, [Replicate()] * 2),
        "small": distribute_tensor(torch.randn(64, 3), mesh, [Replicate()] * 2),
        "plain": torch.randn(1 << 20),
    }


def full(store: Path, mesh: DeviceMesh) -> dict[str, Any]:
    """One bit on rank 3: found, named, located."""
    out: dict[str, Any] = {}
    for step, name in enumerate(("hsdp", "experts", "plain"), 1):
        state = replicas(mesh)
        if dist.get_rank() == 3:
            tensor = state[name]
            flip(tensor.to_local() if isinstance(tensor, DTensor) else tensor, DRIFT)
        out[name] = saved(state, store, step, replicated=["pl*"])
    return out


def divided(store: Path, mesh: DeviceMesh) -> dict[str, Any]:
    """With "off" and "sampled" equal bytes come from everyone, and come back."""
    out: dict[str, Any] = {}
    state = replicas(mesh)
    for step, verify in ((1, "full"), (2, "off"), (3, "sampled")):
        result = saved(state, store, step, verify_replicas=verify, replicated=["pl*"])
        with StoreReader.open(str(store)) as reader:
            manifest = manifest_of(reader, step)
            result["carried"] = [manifest.member(r).bytes_logical for r in range(4)]
            result["unique"] = manifest.header.bytes_unique
            result["stored"] = manifest.header.bytes_stored
        into = wipe(clone(state))
        result["loaded"] = caught(lambda into=into, step=step: gt.load(into, store, step=step))
        result["equal"] = equal(into, state)
        out[verify] = result
    whole: dict[str, Any] = {"experts": None, "plain": None, "hsdp": None}
    out["taken"] = caught(lambda: gt.load(whole, store, step=2, strict=False))
    out["taken"]["equal"] = equal(whole["experts"], state["experts"].full_tensor()) and equal(
        whole["plain"], state["plain"]
    )
    out["taken"]["hsdp"] = equal(whole["hsdp"], state["hsdp"].full_tensor())
    return out


def manifest_of(reader: StoreReader, step: int) -> Any:
    """The manifest of a committed epoch."""
    keys = {key.epoch: key for key in reader.keys()}  # noqa: SIM118
    return reader.manifest(keys[step])


def drifted(store: Path, mesh: DeviceMesh) -> dict[str, Any]:
    """Everything drifts on rank 3: "sampled" sees it, "off" takes what each one gives."""
    state = replicas(mesh)
    if dist.get_rank() == 3:
        for tensor in (state["plain"], state["experts"], state["hsdp"], *state["layers"]):
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).add_(1)
    out = {"sampled": saved(state, store, 1, verify_replicas="sampled", replicated=["pl*"])}
    out["off"] = saved(state, store, 2, verify_replicas="off", replicated=["pl*"])
    into = wipe(clone(state))
    out["loaded"] = caught(lambda: gt.load(into, store, step=2))
    good, got = replicas(mesh)["plain"], into["plain"]
    # Each element is what one of the holders gave.
    out["mixed"] = bool(((got == good) | (got == good + 1)).all())
    out["of rank 3"] = int((got != good).sum())
    return out


def unequal(store: Path, mesh: DeviceMesh) -> dict[str, Any]:
    """State dicts that depend on the rank cannot be divided, and say so."""
    rank = dist.get_rank()
    state = replicas(mesh)
    if rank == 1:
        del state["experts"]
    out = {"other": saved(state, store, 1, verify_replicas="off")}
    mine = {"plain": state["plain"]} if rank != 1 else {"own": torch.zeros(3)}
    out["absent"] = saved(mine, store, 2, verify_replicas="off", replicated=["plain"])
    out["full"] = saved(state, store, 3)
    return out


def states_of(seed: int) -> dict[str, Any]:
    """Random states of every kind, all under names that every rank uses."""
    torch.manual_seed(seed)
    random.seed(seed)
    generator = torch.Generator().manual_seed(seed)
    state = np.random.default_rng(seed).bit_generator.state
    return {
        "torch": torch.get_rng_state(),
        "generator": generator.get_state(),
        "python": random.getstate(),
        "numpy": dict(state),
        "loader": {"position": 10 * seed, "shard": f"shard-{seed}"},
        "w": torch.arange(100.0),
    }


def per_rank(store: Path) -> dict[str, Any]:
    """Random states of one name: to the right rank, on as many, fewer and more ranks."""
    rank = dist.get_rank()
    three, two = dist.new_group([0, 1, 2]), dist.new_group([0, 1])
    state = states_of(rank)
    out: dict[str, Any] = {"saved": saved(state, store, 1)}
    into = wipe(states_of(50 + rank))
    gt.load(into, store, step=1)
    out["same"] = equal(into, state)
    if rank < 2:
        into = wipe(states_of(60 + rank))
        out["fewer"] = caught(lambda: gt.load(into, store, step=1, process_group=two))
        out["fewer"]["equal"] = equal(into, state)
    dist.barrier()
    if rank < 3:
        out["by three"] = saved(states_of(rank), store, 2, process_group=three)
    dist.barrier()
    into = wipe(states_of(70 + rank))
    before = clone(into)
    out["strict"] = caught(lambda: gt.load(into, store, step=2))
    out["strict"]["untouched"] = equal(into, before)
    report = gt.load(into, store, step=2, strict=False)
    out["missing"] = list(report.missing)
    out["more"] = equal(into, states_of(rank))
    out["w"] = equal(into["w"], torch.arange(100.0))
    return out


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    # Whatever hangs is shown, not waited for.
    guard = threading.Timer(150, lambda: os.kill(os.getpid(), signal.SIGABRT))
    guard.daemon = True
    guard.start()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found = {
        "full": full(folder / "full", mesh),
        "divided": divided(folder / "divided", mesh),
        "drifted": drifted(folder / "drifted", mesh),
        "unequal": unequal(folder / "unequal", mesh),
        "per rank": per_rank(folder / "per-rank"),
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))
    gt.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
