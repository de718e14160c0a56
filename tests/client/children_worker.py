"""Saves in children of multiprocessing that never wait: ``… METHOD``; the agent is the test's."""

from __future__ import annotations

import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import groupio
from groupio.agent import spawn

FOLDER = Path(os.environ["TEST_FOLDER"])
SETTINGS = groupio.Settings(runtime_dir=str(FOLDER), close_timeout_s=20)
spawn.ensure_agent = lambda settings, timeout_s=0: FOLDER / "agent.sock"


def save() -> None:
    client = groupio.connect(FOLDER / "store", settings=SETTINGS)
    client.save({"w": b"x" * 1000}, epoch=1)


def through_torch(rank: int) -> None:
    import torch

    import groupio.torch

    groupio.torch.save({"w": torch.ones(100)}, FOLDER / "store", step=1, dcp_door=False)


def run(method: str) -> None:
    if method == "torch":
        import torch.multiprocessing

        torch.multiprocessing.spawn(through_torch, nprocs=1)
        return
    if method == "executor":
        with ProcessPoolExecutor(1) as executor:
            executor.submit(save).result()
        return
    kind, _, way = method.partition("-")
    context: Any = multiprocessing.get_context(kind)
    if way == "pool":
        pool = context.Pool(1)
        pool.apply(save)
        pool.close()
        pool.join()
        return
    if way == "again":
        groupio.connect(FOLDER / "store", settings=SETTINGS)
    child = context.Process(target=save)
    child.start()
    child.join()
    assert child.exitcode == 0


if __name__ == "__main__":
    run(sys.argv[1])
