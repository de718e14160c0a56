"""Ranks as processes with a gloo group, forked from a server that has torch already."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

LIMIT_S = 100.0
"""No test waits longer for its ranks."""


def run_ranks(
    folder: Path, world: int, work: Callable[[int, Path], Any], *, limit_s: float = LIMIT_S
) -> dict[int, Any]:
    """What ``work(rank, folder)`` returned on each rank; killed ranks are left out.

    Fails when a rank raises, or does not end in time.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dcp_ranks", "torch", "groupio.torch"])
    folder.mkdir(exist_ok=True)
    environ = {name: os.environ[name] for name in os.environ if name.startswith("GROUPIO_")}
    stamp = f"init-{time.monotonic_ns()}"
    processes = [
        context.Process(target=_main, args=(rank, world, folder, work, environ, stamp))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + limit_s
    for process in processes:
        process.join(max(end - time.monotonic(), 0.1))
    late = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
        process.join()
    assert not late, f"ranks {late} did not end within {limit_s} s"
    found = {}
    for rank, process in enumerate(processes):
        path = folder / f"result-{rank}"
        if path.exists():
            error, found[rank] = pickle.loads(path.read_bytes())  # noqa: S301  written above
            path.unlink()
            assert not error, error
        else:
            assert process.exitcode == -signal.SIGKILL, (rank, process.exitcode)
    return found


def _main(
    rank: int,
    world: int,
    folder: Path,
    work: Callable[[int, Path], Any],
    environ: dict[str, str],
    stamp: str,
) -> None:
    os.environ.update(environ)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "GROUPIO_CLOSE_TIMEOUT_S": "5"}
    import torch
    import torch.distributed as dist

    import groupio.torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.FileStore(os.fspath(folder / stamp), world)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    error, result = "", None
    try:
        result = work(rank, folder)
        groupio.torch.close()
    except BaseException:  # noqa: BLE001  told to the test
        error = traceback.format_exc()
    temporary = folder / f"temporary-{rank}"
    temporary.write_bytes(pickle.dumps((error, result)))
    temporary.rename(folder / f"result-{rank}")
    os._exit(0)  # a broken group would be waited for


SOON_S = 30.0
"""A failure is told within this time."""


def told(call: Callable[[], Any]) -> dict[str, Any]:
    """What a call raised, and how soon."""
    from torch.distributed.checkpoint.api import CheckpointException

    start = time.monotonic()
    try:
        call()
    except BaseException as error:  # noqa: BLE001  most of DCP's are none of Exception
        failures = getattr(error, "failures", {})
        return {
            "ordinary": isinstance(error, Exception),
            "both": isinstance(error, CheckpointException),
            "type": type(error).__name__,
            "message": str(error),
            "items": list(getattr(error, "items", ())),
            "failures": {rank: type(pair[0]).__name__ for rank, pair in failures.items()},
            "texts": {rank: str(pair[0]) for rank, pair in failures.items()},
            "soon": time.monotonic() - start < SOON_S,
        }
    return {"type": "", "soon": time.monotonic() - start < SOON_S}


def die() -> None:
    """End this process as the kernel does when memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
