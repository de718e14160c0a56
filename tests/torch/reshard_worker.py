"""Saves with four ranks and loads with others: ``reshard_worker.py FOLDER``.

One process forks the ranks of every world: torch is imported once. What each rank found wrong goes
to FOLDER, a line each.
"""

from __future__ import annotations

import os
import sys
import traceback
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import groupio
import groupio.torch as gt
from groupio.torch.tensors import as_integers

WAIT_S = 60.0
SAVERS = 4
LOADERS = (1, 2, 3, 8)
LAYERS = 6


def mesh_of(*shape: int, names: tuple[str, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def model_of(parallel: str) -> torch.nn.Module:
    """Uneven sizes: few of them can be divided by the ranks."""
    model = torch.nn.Sequential(
        torch.nn.Embedding(29, 13), torch.nn.Linear(13, 26), torch.nn.Linear(26, 5, bias=False)
    )
    world = dist.get_world_size()
    if parallel == "plain":
        return model
    if parallel == "fsdp":
        mesh = mesh_of(world, names=("shard",))
    elif parallel == "hsdp":
        mesh = mesh_of(2, world // 2, names=("replicate", "shard"))
    else:
        whole = mesh_of(world // 2, 2, names=("dp", "tp"))
        plan: Any = {"1": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, whole["tp"], plan)
        mesh = whole["dp"]
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def state_of(parallel: str) -> dict[str, Any]:
    """Weights and the state of their optimizer."""
    model = model_of(parallel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    weights, optim = get_state_dict(model, optimizer)
    return {"model": weights, "optim": optim, "epoch": 3}


def tensors(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, child in value.items():
            yield from tensors(child, f"{path}.{key}")


def content(path: str, tensor: torch.Tensor) -> torch.Tensor:
    """What the tensor at ``path`` holds, whole, on any rank of any world."""
    make = torch.Generator().manual_seed(zlib.crc32(path.encode()))
    whole = torch.randn(tuple(tensor.shape), generator=make).to(tensor.dtype)
    if not isinstance(tensor, DTensor):
        return whole
    spread = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
    return spread.to_local()


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def put(state: dict[str, Any], fill: bool) -> dict[str, Any]:
    for path, tensor in tensors(state):
        with torch.no_grad():
            local(tensor).copy_(content(path, tensor)) if fill else local(tensor).fill_(-7)
    return state


def wrong(state: dict[str, Any]) -> list[str]:
    return [
        path
        for path, tensor in tensors(state)
        if not torch.equal(as_integers(local(tensor)), as_integers(content(path, tensor)))
    ]


def layer(number: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((7, 3), float(number)), "b": torch.full((number,), 0.5)}


def stages(rank: int, world: int) -> dict[str, Any]:
    return {str(n): layer(n) for n in range(LAYERS) if n % world == rank}


def save_all(folder: Path) -> list[str]:
    rank, world = dist.get_rank(), dist.get_world_size()
    for parallel in ("fsdp", "hsdp", "tp"):
        state = put(state_of(parallel), fill=True)
        handle = gt.save(state, folder / parallel, step=1, deadline_s=WAIT_S)
        handle.wait("durable", WAIT_S)
    own = torch.full((4,), float(rank))
    state = {"layers": stages(rank, world), "rng": own, "rank": rank, "same": [1, "x"]}
    gt.save(state, folder / "pp", step=1, deadline_s=WAIT_S).wait("durable", WAIT_S)
    # The other way round the ranks find what their counterparts did not save.
    into = {"layers": stages((rank + 1) % world, world), "rng": own * 0, "rank": -1, "same": None}
    report = gt.load(into, folder / "pp", strict=False)
    problems = check_stages(into, (rank + 1) % world, world)
    names = {f"layers.{n}.{key}" for n in stages(rank, world) for key in "wb"}
    if report.missing or set(report.unexpected) != names or into["rank"] != rank:
        problems.append(f"swapped: {report} {into}")
    return problems


def check_stages(into: dict[str, Any], stage: int, world: int) -> list[str]:
    expected = stages(stage, world)
    return [
        f"layer {n} {key}"
        for n in expected
        for key in "wb"
        if not torch.equal(into["layers"][n][key], expected[n][key])
    ]


def pairs(world: int) -> list[tuple[str, str]]:
    """Which of the saved states are loaded into which parallelism: eight ranks are slow."""
    if world == 8:
        return [("tp", "tp"), ("fsdp", "tp"), ("hsdp", "fsdp")]
    into = ["plain"] if world == 1 else ["fsdp"] if world == 3 else ["fsdp", "hsdp", "tp"]
    return [(saved, parallel) for saved in ("fsdp", "hsdp", "tp") for parallel in into]


def load_all(folder: Path) -> list[str]:
    rank, world = dist.get_rank(), dist.get_world_size()
    problems = []
    for saved, parallel in pairs(world):
        into = put(state_of(parallel), fill=False)
        into["epoch"] = 0
        report = gt.load(into, folder / saved)
        problems += [f"{saved} -> {parallel}: {path}" for path in wrong(into)]
        if into["epoch"] != 3 or report.missing or report.unexpected:
            problems.append(f"{saved} -> {parallel}: {report}")
    if world < SAVERS:
        whole: dict[str, Any] = {"model": None, "optim": None, "epoch": None}
        gt.load(whole, folder / "tp")
        problems += [f"whole: {path}" for path in wrong({"model": whole["model"]})]
    return problems + load_stages(folder, rank, world) + load_plain(folder, rank, world)


def load_stages(folder: Path, rank: int, world: int) -> list[str]:
    """Other stages than were saved; what is per rank comes from the same rank or from none."""
    own = torch.zeros(4)
    into: dict[str, Any] = {"layers": stages(rank, world), "same": None}
    try:
        gt.load({**into, "rng": own, "rank": None}, folder / "pp")
        late = "nothing"
    except groupio.StateMismatch as error:
        late = error.message
    problems = []
    if (world > SAVERS) != (late != "nothing"):
        problems.append(f"late: {late}")
    report = gt.load(
        {**into, "rng": own, "rank": None} if rank < SAVERS else into,
        folder / "pp",
        strict=world <= SAVERS,
    )
    problems += check_stages(into, rank, world) if into["layers"] else []
    if rank < SAVERS and own.tolist() != [rank] * 4:
        problems.append(f"rng {own}")
    if report.unexpected:
        problems.append(f"unexpected {report.unexpected}")
    less: dict[str, Any] = {"layers": {}, "rng": own, "rank": None} if rank < SAVERS else {}
    report = gt.load(less, folder / "pp", strict=False)
    if "same" not in report.unexpected or "layers.0.w" not in report.unexpected:
        problems.append(f"nobody loads them: {report}")
    return problems


def load_plain(folder: Path, rank: int, world: int) -> list[str]:
    """A plain tensor of all ranks into shards."""
    mesh = init_device_mesh("cpu", (world,))
    problems = []
    for placement in (Shard(0), Shard(1), Replicate()):
        into = torch.distributed.tensor.zeros(7, 3, device_mesh=mesh, placements=[placement])
        gt.load({"layers": {"3": {"w": into}}}, folder / "pp", strict=False)
        if not bool((into.to_local() == 3).all()):
            problems.append(f"{placement}: {into.to_local()}")
    return problems


def rank_main(folder: Path, work: Callable[[Path], list[str]], rank: int, world: int) -> None:
    torch.set_num_threads(1)
    name = f"{work.__name__}-{world}"
    dist.init_process_group("gloo", f"file://{folder}/{name}.pg", rank=rank, world_size=world)
    try:
        problems = work(folder)
    except BaseException:  # noqa: BLE001  the test prints it
        problems = [traceback.format_exc()]
    (folder / f"{name}-{rank}.txt").write_text("\n".join(problems))
    gt.close()


def run(folder: Path, work: Callable[[Path], list[str]], world: int) -> None:
    """Fork the ranks of a world and wait for them."""
    children = []
    for rank in range(world):
        child = os.fork()
        if not child:
            try:
                rank_main(folder, work, rank, world)
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def main() -> None:
    folder = Path(sys.argv[1])
    run(folder, save_all, SAVERS)
    for world in LOADERS:
        run(folder, load_all, world)


if __name__ == "__main__":
    main()
