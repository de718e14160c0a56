"""The local checkpoints of nvidia-resiliency-ext, on CPU tensors."""

from __future__ import annotations

import importlib
import os
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from groupio.bench.place import Place
from groupio.bench.state import State
from groupio.bench.system import Moments, System

_LOCAL = "nvidia_resiliency_ext.checkpointing.local"
_base: Any = importlib.import_module(f"{_LOCAL}.base_state_dict")


class CpuState(_base.TensorAwareStateDict):  # type: ignore[misc]
    """Named CPU tensors; the state dict that comes with the package takes only CUDA tensors."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._names = tuple(tensors)
        self._tensors: list[torch.Tensor] | None = list(tensors.values())

    def named(self) -> dict[str, torch.Tensor]:
        """The tensors by name."""
        return dict(zip(self._names, self.tensors, strict=True))

    def pop_tensors(self) -> Sequence[torch.Tensor]:
        """Take the tensors out."""
        taken, self._tensors = list(self.tensors), None
        return taken

    @property
    def tensors(self) -> Iterable[torch.Tensor]:
        """The tensors in order."""
        assert self._tensors is not None
        return self._tensors

    @property
    def is_hollow(self) -> bool:
        """Whether the tensors were taken out."""
        return self._tensors is None

    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        """Put tensors back in."""
        self._tensors = list(tensor_data)

    def init_tensors(self) -> None:
        """Only replication needs it, which this benchmark does not use."""
        raise NotImplementedError("the benchmark saves without replication")

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        """They are there."""

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """They are there."""


class NvrxLocal(System):
    """``LocalCheckpointManager.save`` without replication."""

    rank_of_file = re.compile(r"_(\d+)_local\.pt$")

    def __init__(self, folder: Path, place: Place, timeout_s: float) -> None:
        super().__init__(folder, place, timeout_s)
        managers: Any = importlib.import_module(f"{_LOCAL}.ckpt_managers.local_manager")
        self._manager = managers.LocalCheckpointManager(os.fspath(folder))

    def save(self, state: State, epoch: int) -> Moments:
        """Save; the call returns when all ranks are done."""
        self._manager.save(CpuState(state.tensors), epoch, is_async=False)
        done = time.monotonic()
        return Moments(stall=done, durable=done)

    def load(self, state: State, epoch: int) -> int | None:
        """Load the newest, and copy it into the tensors."""
        found = self._manager.find_latest()
        if found != epoch:
            raise RuntimeError(f"nvrx_local has iteration {found}, not {epoch}")
        loaded, _ = self._manager.load()
        for name, tensor in loaded.named().items():
            state.tensors[name].copy_(tensor)
        return None

    def forget(self, epoch: int) -> None:
        """The manager removes older ones itself."""
