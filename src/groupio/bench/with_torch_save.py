"""``torch.save``: one file per rank, fsynced."""

from __future__ import annotations

import os
import re
import time

import torch

from groupio.bench.state import State
from groupio.bench.system import Moments, System


class TorchSave(System):
    """The plainest of all: every rank writes its tensors to a file of its own."""

    rank_of_file = re.compile(r"rank-(\d+)\.pt$")

    def save(self, state: State, epoch: int) -> Moments:
        """Write and fsync this rank's file."""
        folder = self.directory(epoch)
        folder.mkdir(exist_ok=True)
        with open(folder / f"rank-{self.place.rank}.pt", "wb") as file:
            torch.save(state.tensors, file)
            file.flush()
            os.fsync(file.fileno())
        done = time.monotonic()
        return Moments(stall=done, durable=done)

    def load(self, state: State, epoch: int) -> int | None:
        """Read this rank's file and copy it into the tensors."""
        path = self.directory(epoch) / f"rank-{self.place.rank}.pt"
        for name, tensor in torch.load(path, weights_only=True).items():
            state.tensors[name].copy_(tensor)
        return None
