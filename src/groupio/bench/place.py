"""A rank's place among the others: the process group, and starting at one moment."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

_LEAD_S = 0.004
"""So long before the common start rank 0 names it; the others have to hear of it by then."""

_APPEAR_S = 60.0


class Place:
    """This rank in the gloo group of all ranks of one run."""

    def __init__(self, rank: int, ranks: int, folder: Path, timeout_s: float) -> None:
        self.rank = rank
        self.ranks = ranks
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(ranks),
            LOCAL_WORLD_SIZE=str(ranks),
            MASTER_ADDR="127.0.0.1",
        )
        limit = timedelta(seconds=timeout_s)
        store = _store(rank, ranks, folder / "port", limit)
        os.environ["MASTER_PORT"] = str(store.port)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier()

    def start(self) -> float:
        """Wait for all ranks, then until one common moment; its reading of time.monotonic."""
        dist.barrier()
        moment = torch.tensor([time.monotonic() + _LEAD_S], dtype=torch.float64, device="cpu")
        dist.broadcast(moment, 0)
        at = float(moment[0])
        time.sleep(max(at - time.monotonic(), 0.0))
        return at

    def largest(self, value: float) -> float:
        """The largest of the ranks' values."""
        tensor = torch.tensor([value], dtype=torch.float64, device="cpu")
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return float(tensor[0])

    def close(self) -> None:
        """Leave the group, after all ranks came here."""
        dist.barrier()
        dist.destroy_process_group()


def _store(rank: int, ranks: int, port_file: Path, limit: timedelta) -> TCPStore:
    """The store of the group: rank 0 takes a free port and tells it in ``port_file``."""
    if rank == 0:
        store = TCPStore(
            "127.0.0.1", 0, ranks, is_master=True, timeout=limit, wait_for_workers=False
        )
        part = port_file.with_suffix(".part")
        part.write_text(str(store.port), encoding="ascii")
        part.rename(port_file)
        return store
    end = time.monotonic() + _APPEAR_S
    while not port_file.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"rank 0 did not open its port within {_APPEAR_S:.0f} s")
        time.sleep(0.01)
    port = int(port_file.read_text(encoding="ascii"))
    return TCPStore("127.0.0.1", port, ranks, is_master=False, timeout=limit)
