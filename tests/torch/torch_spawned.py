"""Ranks of a job that load together, of which rank 1 is killed in the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

RANKS = 3


def found_by_ranks(worker: Path, folder: Path, **environ: str) -> list[dict[str, Any]]:
    """Run ``worker`` with ``folder`` in 3 ranks; what ranks 0 and 2 saw."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    common = {**os.environ, **place, "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}
    logs = [folder / f"{rank}.log" for rank in range(RANKS)]
    processes = []
    for rank, log in enumerate(logs):
        own = {**common, **environ, "RANK": str(rank), "WORLD_SIZE": str(RANKS)}
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
    assert codes == [0, -signal.SIGKILL, 0], said
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 2)]
