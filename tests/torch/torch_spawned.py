"""Ranks of a job without torchrun, which write what they saw into a folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist


def run_ranks(
    worker: Path, folder: Path, ranks: int, ends: Sequence[int], **environ: str
) -> list[dict[str, Any]]:
    """Run ``worker`` with ``folder`` in so many ranks, which end with ``ends``; what they saw.

    Nothing comes from a rank that did not end with 0.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    common = {**os.environ, **place, "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}
    logs = [folder / f"{rank}.log" for rank in range(ranks)]
    processes = []
    for rank, log in enumerate(logs):
        own = {**common, **environ, "RANK": str(rank), "WORLD_SIZE": str(ranks)}
        with log.open("w") as out:
            command = [sys.executable, str(worker), str(folder)]
            processes.append(subprocess.Popen(command, env=own, stdout=out, stderr=out))
    try:
        codes = [process.wait(120) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait(10)
    said = "\n".join(log.read_text()[-3000:] for log in logs)
    assert codes == list(ends), said
    good = [rank for rank, code in enumerate(codes) if code == 0]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in good]


def found_by_ranks(worker: Path, folder: Path, **environ: str) -> list[dict[str, Any]]:
    """What ranks 0 and 2 saw, of 3 that load together; rank 1 is killed in the end."""
    return run_ranks(worker, folder, 3, (0, -signal.SIGKILL, 0), **environ)
