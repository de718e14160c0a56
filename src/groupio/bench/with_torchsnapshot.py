"""torchsnapshot."""

from __future__ import annotations

import importlib
import os
import time
from pathlib import Path
from typing import Any

from groupio.bench.place import Place
from groupio.bench.state import State
from groupio.bench.system import Moments, System


class TorchSnapshot(System):
    """``Snapshot.async_take`` with the plain tensors of each rank."""

    def __init__(self, folder: Path, place: Place, timeout_s: float) -> None:
        super().__init__(folder, place, timeout_s)
        self._module: Any = importlib.import_module("torchsnapshot")

    def save(self, state: State, epoch: int) -> Moments:
        """Take a snapshot and wait for it."""
        app_state = {"state": self._module.StateDict(**state.tensors)}
        pending = self._module.Snapshot.async_take(os.fspath(self.directory(epoch)), app_state)
        stall = time.monotonic()
        pending.wait()
        return Moments(stall=stall, durable=time.monotonic())

    def load(self, state: State, epoch: int) -> int | None:
        """Restore in place."""
        held = self._module.StateDict(**state.tensors)
        self._module.Snapshot(os.fspath(self.directory(epoch))).restore({"state": held})
        for name, tensor in held.items():
            # It may have replaced a tensor instead of filling it.
            if tensor.data_ptr() != state.tensors[name].data_ptr():
                state.tensors[name].copy_(tensor)
        return None
