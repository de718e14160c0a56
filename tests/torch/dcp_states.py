"""State dicts of several kinds of parallelism, for the tests of the DCP classes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from groupio.torch.tensors import as_integers


def full(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The same random tensor on all ranks."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def spread(tensor: torch.Tensor, mesh: DeviceMesh, placements: Any) -> DTensor:
    """``tensor``, which all ranks have, as a DTensor."""
    whole = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(mesh, placements)


def meshes() -> tuple[DeviceMesh, DeviceMesh | None]:
    """One dimension over all ranks, and two where their number allows it."""
    world = dist.get_world_size()
    flat = init_device_mesh("cpu", (world,))
    two = init_device_mesh("cpu", (2, world // 2)) if world % 2 == 0 else None
    return flat, two


def state(rank: int, seed: int = 0) -> dict[str, Any]:
    """FSDP and HSDP shards, replicas, plain tensors, a nested optimizer and a rank's own values."""
    flat, two = meshes()
    hsdp = [Replicate(), Shard(0)] if two is not None else [Shard(0)]
    both = two or flat
    model = {
        "fsdp.w": spread(full(seed + 1, 37, 16), flat, [Shard(0)]),
        "fsdp.big": spread(full(seed + 2, 1031, 700), flat, [Shard(0)]),
        "fsdp.bf": spread(full(seed + 3, 40, 6, dtype=torch.bfloat16), flat, [Shard(1)]),
        "few": spread(full(seed + 4, 2, 5), flat, [Shard(0)]),
        "hsdp.w": spread(full(seed + 5, 64, 33), both, hsdp),
        "hsdp.big": spread(full(seed + 6, 1200, 900), both, hsdp),
        "rep": spread(full(seed + 7, 9, 8), flat, [Replicate()]),
        "rep.big": spread(full(seed + 8, 700, 801), flat, [Replicate()]),
        "plain.big": full(seed + 9, 900, 512),
        "plain": full(seed + 10, 7, 3),
        "turned": full(seed + 11, 700, 600).t(),
        "scalar": torch.tensor(2.5 + seed),
        "empty": torch.zeros(0, 3),
        "bits": full(seed + 12, 50) > 0,
    }
    moments = {
        number: {
            "step": torch.tensor(3.0 + seed),
            "exp_avg": spread(full(seed + 20 + number, 37, 16), flat, [Shard(0)]),
        }
        for number in range(2)
    }
    groups = [{"lr": 0.1 + seed, "betas": (0.9, 0.99), "params": [0, 1], "name": "ä/b.c"}]
    return {
        "model": model,
        "optim": {"state": moments, "param_groups": groups},
        "own": {"rng": full(1000 + seed + rank, 300), "who": f"rank {rank}", "count": rank},
        "step": 5 + seed,
        "none": None,
        "huge": 2**70,
    }


def whole_state(seed: int = 0, own_rank: int = 0) -> dict[str, Any]:
    """What :func:`state` is without a process group: every tensor whole."""
    model = {
        "fsdp.w": full(seed + 1, 37, 16),
        "fsdp.big": full(seed + 2, 1031, 700),
        "fsdp.bf": full(seed + 3, 40, 6, dtype=torch.bfloat16),
        "few": full(seed + 4, 2, 5),
        "hsdp.w": full(seed + 5, 64, 33),
        "hsdp.big": full(seed + 6, 1200, 900),
        "rep": full(seed + 7, 9, 8),
        "rep.big": full(seed + 8, 700, 801),
        "plain.big": full(seed + 9, 900, 512),
        "plain": full(seed + 10, 7, 3),
        "turned": full(seed + 11, 700, 600).t(),
        "scalar": torch.tensor(2.5 + seed),
        "empty": torch.zeros(0, 3),
        "bits": full(seed + 12, 50) > 0,
    }
    moments = {
        number: {"step": torch.tensor(3.0 + seed), "exp_avg": full(seed + 20 + number, 37, 16)}
        for number in range(2)
    }
    groups = [{"lr": 0.1 + seed, "betas": (0.9, 0.99), "params": [0, 1], "name": "ä/b.c"}]
    own = {"rng": full(1000 + seed + own_rank, 300), "who": f"rank {own_rank}", "count": own_rank}
    return {
        "model": model,
        "optim": {"state": moments, "param_groups": groups},
        "own": own,
        "step": 5 + seed,
        "none": None,
        "huge": 2**70,
    }


def wiped(value: Any) -> Any:
    """The same structure with other content."""
    if isinstance(value, DTensor):
        copy = value.clone()
        copy.to_local().zero_()
        return copy
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: wiped(child) for key, child in value.items()}
    if isinstance(value, list):
        return [wiped(child) for child in value]
    return "wiped"


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Where two state dicts are not equal bit for bit, types included."""
    if isinstance(one, torch.Tensor):
        if type(one) is not type(other) or one.dtype != other.dtype or one.shape != other.shape:
            return [f"{path}: {type(one)} {type(other)}"]
        if isinstance(one, DTensor):
            return differences(one.to_local(), other.to_local(), path)
        same = torch.equal(as_integers(one.detach()), as_integers(other.detach()))
        return [] if same else [path]
    if isinstance(one, dict):
        if not isinstance(other, dict) or one.keys() != other.keys():
            return [f"{path}: other keys"]
        return [line for key in one for line in differences(one[key], other[key], f"{path}.{key}")]
    if isinstance(one, list | tuple):
        if type(one) is not type(other) or len(one) != len(other):
            return [f"{path}: {one!r} {other!r}"]
        pairs = enumerate(zip(one, other, strict=True))
        return [line for at, pair in pairs for line in differences(*pair, f"{path}.{at}")]
    same = type(one) is type(other) and one == other
    return [] if same else [f"{path}: {one!r} {other!r}"]
