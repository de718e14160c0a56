"""A rank as a launcher starts it: saves one epoch and says what it knows of its place."""

from __future__ import annotations

import json
import sys

import numpy as np

import groupio


def main() -> None:
    """``deploy_rank.py STORE``; one JSON object on one line."""
    with groupio.connect(sys.argv[1]) as client:
        items = {"own": np.arange(50_000) + client.rank, "same": np.ones(50_000)}
        client.save(items, epoch=1, deadline_s=40).wait("durable", timeout_s=60)
        place = {"rank": client.rank, "world_size": client.world_size}
        # In one piece: the output of all ranks may go to one file.
        sys.stdout.write(json.dumps(place) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
