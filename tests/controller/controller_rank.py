"""A rank of a test: saves an epoch for each line on its input, until there are no more."""

from __future__ import annotations

import sys

import numpy as np

import groupio


def main() -> None:
    """``controller_rank.py STORE RANK WORLD_SIZE``: answers each epoch with its outcome."""
    store, rank, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with groupio.connect(store, rank=rank, world_size=world) as client:
        for line in sys.stdin:
            epoch = int(line)
            items = {"own": np.arange(50_000) + rank + epoch, "same": np.ones(50_000) * epoch}
            handle = client.save(items, epoch=epoch, deadline_s=40)
            try:
                handle.wait("durable", timeout_s=60)
                answer = f"durable {epoch}"
            except groupio.GroupIOError as error:
                answer = f"failed {epoch}: {error.message}"
            sys.stdout.write(answer + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
