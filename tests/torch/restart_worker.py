"""A process of test_torch_restart: ``restart_worker.py NAME FOLDER PORT``; what it saw goes there.

Processes a, b and c are ranks 0 to 2 of a first process group. Then d takes the place of c, which
hangs: a and b make a new group with it. Later c comes back.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import groupio
import groupio.torch as gt
from groupio.torch import loading

WAIT_S = 60.0


class Ranks:
    """This process in one group after the other."""

    def __init__(self, folder: Path, port: int) -> None:
        self.store = folder / "store"
        self.common = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=WAIT_S))
        self.state = {"w": torch.zeros(1000), "step": 0}

    def group(self, generation: int, rank: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        store = dist.PrefixStore(f"generation-{generation}", self.common)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=WAIT_S)
        )

    def save(self, step: int) -> groupio.SaveHandle:
        self.state["step"] = step
        self.state["w"].fill_(step)
        return gt.save(self.state, self.store, step=step, deadline_s=WAIT_S, dcp_door=False)

    def load(self) -> int:
        self.state["w"].zero_()
        step = gt.load(self.state, self.store).step
        assert self.state["step"] == step
        assert bool((self.state["w"] == step).all())
        return step


def error_of(call: Any) -> str:
    try:
        call()
    except groupio.GroupIOError as error:
        return type(error).__name__
    return ""


def first_life(ranks: Ranks, rank: int) -> dict[str, Any]:
    """Different histories of loads, then a load and a save of all."""
    ranks.group(0, rank)
    seen: dict[str, Any] = {}
    agree_s, tell_s = loading.AGREE_S, loading.TELL_S
    loading.AGREE_S = loading.TELL_S = 0.1
    if rank == 0:
        seen["alone"] = error_of(ranks.load)
    if rank == 1:
        wrong = {"w": torch.zeros(3).to_sparse()}
        seen["wrong"] = [error_of(lambda: gt.load(wrong, ranks.store)) for _ in range(2)]
    loading.AGREE_S, loading.TELL_S = agree_s, tell_s
    dist.barrier()
    seen["first"] = error_of(ranks.load)
    ranks.save(1).wait("durable", WAIT_S)
    return seen


def second_life(ranks: Ranks, rank: int) -> dict[str, Any]:
    """With the process that took the place of another one."""
    ranks.group(1, rank)
    seen: dict[str, Any] = {"loaded": ranks.load()}
    ranks.save(2).wait("durable", WAIT_S)
    before = ranks.save(3)
    # The same processes in another group: nothing of it is interrupted.
    ranks.group(2, rank)
    after = ranks.save(4)
    for handle in (before, after):
        handle.wait("durable", WAIT_S)
    if rank == 0:
        ranks.common.set("come-back", "")
    ranks.common.wait(["came-back"])
    ranks.save(5).wait("durable", WAIT_S)
    seen["loaded again"] = ranks.load()
    return seen


def leftover(ranks: Ranks) -> dict[str, Any]:
    """The process that hung saves at last, in its old group."""
    ranks.common.wait(["come-back"])
    seen = {"late": [error_of(lambda: ranks.save(5).wait("durable", WAIT_S))]}
    ranks.common.set("came-back", "")
    return seen


def main(name: str, folder: Path, port: int) -> None:
    torch.set_num_threads(1)
    ranks = Ranks(folder, port)
    seen: dict[str, Any] = {}
    if name != "d":
        seen = first_life(ranks, "abc".index(name))
    seen |= leftover(ranks) if name == "c" else second_life(ranks, "abd".index(name))
    (folder / f"{name}.json").write_text(json.dumps(seen))
    gt.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
