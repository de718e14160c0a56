"""A rank that torchrun starts again: ``deploy_restarted_rank.py STORE FOLDER``.

Rank 1 of the first life kills itself between two saves. The next life goes on from the latest
epoch and says its restart counts, which each node's launcher counts by itself.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np

import groupio

WAIT_S = 60.0


def main(store: str, folder: Path) -> None:
    with groupio.connect(store) as client:

        def save(epoch: int) -> None:
            items = {"own": np.full(1000, client.rank + epoch), "same": np.full(1000, epoch)}
            client.save(items, epoch=epoch, deadline_s=WAIT_S).wait("durable", WAIT_S)

        latest = max((info.epoch for info in client.epochs()), default=0)
        if latest:
            assert client.load()["own"][0] == client.rank + latest
        save(latest + 1)
        if client.rank == 1 and not latest:
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if not latest:
            signal.pause()  # its launcher ends it, and counts no restart for that
        save(latest + 2)
        seen = {"latest": latest, "restarts": os.environ["TORCHELASTIC_RESTART_COUNT"]}
        (folder / f"{client.rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
