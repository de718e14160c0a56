"""Run by torchrun: ``door_worker.py STORE FOLDER``: sharded saves, stock loads on another mesh."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import groupio.torch as gt


def whole(step: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(9)
    made = {
        "row": torch.randn(1003, 3000),
        "column": torch.randn(512, 9000),
        "uneven": torch.randn(5, 3),
        "few": torch.randn(3, 5),
        "hsdp": torch.randn(301, 17).bfloat16(),
        "grid": torch.randn(64, 33),
        "deep": torch.randn(6, 2, 800, 700),
        "same": torch.randn(1200, 1000),
    }
    made["row"][:10] += step
    return made


def main(store: str, folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    saved = {
        "row": (line, [Shard(0)]),
        "column": (line, [Shard(1)]),
        "uneven": (line, [Shard(0)]),
        "few": (line, [Shard(0)]),
        "hsdp": (square, [Replicate(), Shard(0)]),
        "grid": (square, [Shard(0), Shard(1)]),
        "deep": (line, [Shard(2)]),
        "same": (line, [Replicate()]),
    }
    loaded = {
        "row": (square, [Shard(1), Shard(0)]),
        "column": (line, [Shard(0)]),
        "uneven": (line, [Shard(1)]),
        "few": (line, [Replicate()]),
        "hsdp": (line, [Shard(1)]),
        "grid": (line, [Shard(0)]),
        "deep": (square, [Shard(1), Shard(3)]),
        "same": (line, [Shard(0)]),
    }
    for step in (1, 2):
        full = whole(step)
        state = {
            "model": {name: distribute_tensor(full[name], *where) for name, where in saved.items()},
            "plain": full["same"],
            "own": torch.full((3,), float(rank)),
            "rank": rank,
            "only": {str(rank): torch.full((2,), float(rank))},
        }
        notes = gt.save(state, store, step=step).wait("durable", 60).notes
        assert not [note for note in notes if note.startswith("door")], notes
    full = whole(2)
    target = {
        "model": {
            name: distribute_tensor(torch.zeros_like(full[name]), *where)
            for name, where in loaded.items()
        },
        "own": torch.zeros(3),
        "rank": -1,
    }
    warnings.simplefilter("ignore")
    dcp.load(target, checkpoint_id=f"{store}/dcp/2")
    wrong = []
    for name, tensor in target["model"].items():
        assert isinstance(tensor, DTensor)
        if not torch.equal(tensor.full_tensor(), full[name]):
            wrong.append(name)
    if target["own"].tolist() != [0.0] * 3 or target["rank"] != 0:
        wrong.append("own")
    (folder / f"{rank}.txt").write_text(",".join(wrong) or "equal")
    gt.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
