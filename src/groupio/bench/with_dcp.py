"""``torch.distributed.checkpoint`` as it comes with torch."""

from __future__ import annotations

import os
import re
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from groupio.bench.place import Place
from groupio.bench.state import State
from groupio.bench.system import Moments, System


class Dcp(System):
    """``dcp.save``: the caller waits for all of it."""

    rank_of_file = re.compile(r"__(\d+)_\d+\.distcp$")

    def save(self, state: State, epoch: int) -> Moments:
        """Save; the call returns when it is done."""
        save(state.state_dict, checkpoint_id=os.fspath(self.directory(epoch)))
        done = time.monotonic()
        return Moments(stall=done, durable=done)

    def load(self, state: State, epoch: int) -> int | None:
        """``dcp.load`` in place."""
        load(state.state_dict, checkpoint_id=os.fspath(self.directory(epoch)))
        return None


class DcpAsync(Dcp):
    """``dcp.async_save`` with its default stager and thread, on a process group of its own."""

    def __init__(self, folder: Path, place: Place, timeout_s: float) -> None:
        super().__init__(folder, place, timeout_s)
        self._group = dist.new_group(backend="gloo")

    def begin(self, state: State, epoch: int) -> Future[Any]:
        """Return when the tensors may be overwritten; the future is that of the whole save."""
        answer: Any = async_save(
            state.state_dict,
            checkpoint_id=os.fspath(self.directory(epoch)),
            process_group=self._group,
        )
        staged = getattr(answer, "staging_completion", None)
        if staged is not None:
            staged.result(self.timeout_s)
        future: Future[Any] = getattr(answer, "upload_completion", answer)
        return future

    def save(self, state: State, epoch: int) -> Moments:
        """Save and wait for the future."""
        future = self.begin(state, epoch)
        stall = time.monotonic()
        future.result(self.timeout_s)
        return Moments(stall=stall, durable=time.monotonic())
