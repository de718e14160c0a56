"""Orbax (package orbax-checkpoint, jax on CPU)."""

from __future__ import annotations

import importlib
import os
import re
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch

from groupio.bench.place import Place
from groupio.bench.state import State
from groupio.bench.system import Moments, System


class Orbax(System):
    """``AsyncCheckpointer`` with numpy arrays."""

    rank_of_file = re.compile(r"/rank-(\d+)/")

    def __init__(self, folder: Path, place: Place, timeout_s: float) -> None:
        super().__init__(folder, place, timeout_s)
        os.environ["JAX_PLATFORMS"] = "cpu"
        self._orbax: Any = importlib.import_module("orbax.checkpoint")
        self._checkpointer = self._orbax.AsyncCheckpointer(self._orbax.PyTreeCheckpointHandler())

    def _path(self, epoch: int) -> Path:
        return self.directory(epoch) / f"rank-{self.place.rank}"

    def save(self, state: State, epoch: int) -> Moments:
        """Save and wait until it is finished."""
        self.directory(epoch).mkdir(exist_ok=True)
        arrays = {name: _array(tensor) for name, tensor in state.tensors.items()}
        self._checkpointer.save(self._path(epoch), args=self._orbax.args.PyTreeSave(arrays))
        stall = time.monotonic()
        self._checkpointer.wait_until_finished()
        return Moments(stall=stall, durable=time.monotonic())

    def load(self, state: State, epoch: int) -> int | None:
        """Restore and copy into the tensors."""
        for name, array in self._checkpointer.restore(self._path(epoch)).items():
            _array(state.tensors[name])[...] = array
        return None

    def close(self) -> None:
        """End its threads."""
        self._checkpointer.close()


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()
