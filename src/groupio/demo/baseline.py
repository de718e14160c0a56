"""Plain ``torch.distributed.checkpoint.save`` of the same state, for comparison."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

ROUNDS = 2


def measure_dcp(state: dict[str, Any], folder: str) -> tuple[float, int]:
    """Seconds that this rank is blocked by the faster of two saves, and the bytes on disk.

    Every rank has to call it. The files are synced, as is the default of torch.
    """
    seconds = []
    for number in range(ROUNDS):
        target = Path(folder) / f"round-{number}"
        dist.barrier()
        begin = time.monotonic()
        dcp_save(state, checkpoint_id=str(target))
        seconds.append(time.monotonic() - begin)
    dist.barrier()
    nbytes = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    return min(seconds), nbytes
