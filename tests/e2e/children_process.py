"""Two ranks as children of multiprocessing: ``… STORE``; rank 1 is killed before its save."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from typing import Any

import numpy as np

import groupio


def rank(number: int, store: str, both_saved: Any) -> None:
    client = groupio.connect(store, rank=number, world_size=2)
    for epoch in (1, 2):
        if number == 1 and epoch == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        client.save({"w": np.full(3 << 20, epoch, np.uint8)}, epoch=epoch, deadline_s=300)
        if epoch == 1:
            both_saved.wait(60)


def main() -> None:
    context = multiprocessing.get_context("fork")
    both_saved = context.Barrier(2)
    ranks = [context.Process(target=rank, args=(n, sys.argv[1], both_saved)) for n in range(2)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    print([one.exitcode for one in ranks])


if __name__ == "__main__":
    main()
