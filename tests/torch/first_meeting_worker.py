"""A rank of test_torch_members: ``first_meeting_worker.py RANK STORE PORT ON_ERROR``.

A signal comes to rank 0 while it waits for rank 1 in the first meeting of their process group, and
its handler saves. What the ranks saw is printed.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import groupio
import groupio.torch as gt

WAIT_S = 60.0


def outcome(handle: groupio.SaveHandle) -> str:
    try:
        handle.wait("durable", WAIT_S)
    except groupio.GroupIOError as error:
        return f"{type(error).__name__}: {error}"
    return "durable"


def main() -> None:
    rank, store, port, on_error = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    common = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=WAIT_S))
    dist.init_process_group("gloo", store=common, rank=rank, world_size=2)

    def save(step: int) -> groupio.SaveHandle:
        return gt.save({"n": step, "w": torch.ones(9)}, store, step=step, on_error=on_error)

    nested: list[tuple[float, groupio.SaveHandle]] = []

    def on_alarm(number: int, frame: Any) -> None:
        began = time.monotonic()
        handle = save(2)
        nested.append((time.monotonic() - began, handle))
        common.set("handled", "1")

    if rank == 0:
        signal.signal(signal.SIGALRM, on_alarm)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
    else:
        common.wait(["handled"], timedelta(seconds=WAIT_S))
    seen: dict[str, Any] = {"first": outcome(save(1))}
    seen["nested"] = [(took, outcome(handle)) for took, handle in nested]
    seen["third"] = outcome(save(3))
    gt.close()
    print(json.dumps(seen), flush=True)


main()
