"""The seam of torchtitan's checkpoint manager: ``load``, ``save``, ``maybe_wait_for_staging``,
``maybe_wait_for_saving`` and ``close``, over the ``Stateful`` parts of a trainer.

::

    torchrun --nproc-per-node 2 examples/titan_manager.py /tmp/titan-store --steps 6

A torchtitan trainer calls these five and nothing else. The lines that a trainer changes end with
``# +``; :class:`GroupCheckpointManager` is written once.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from common import batch, digest, tiny_model
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard

import groupio.torch


class GroupCheckpointManager:
    """Saves the ``states`` every ``interval`` steps in the background."""

    def __init__(self, states: Mapping[str, Stateful], folder: str, interval: int = 1) -> None:
        self.states, self.folder, self.interval = states, folder, interval
        self._handle: Any = None

    def load(self, step: int = -1) -> bool:
        """Load ``step`` (-1: the newest epoch) into the states; False when nothing was saved."""
        found = {name: part.state_dict() for name, part in self.states.items()}
        try:
            groupio.torch.load(found, self.folder, step="latest" if step < 0 else step)
        except groupio.NotFound:
            if step >= 0:
                raise
            return False
        for name, part in self.states.items():
            part.load_state_dict(found[name])
        return True

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save when it is time, wait for the last one; on return the optimizer may go on."""
        if not last_step and curr_step % self.interval:
            return False
        self.maybe_wait_for_saving()
        found = {name: part.state_dict() for name, part in self.states.items()}
        self._handle = groupio.torch.save(found, self.folder, step=curr_step)
        if last_step:
            self._handle.wait("durable")
        return True

    def maybe_wait_for_staging(self) -> None:
        """Nothing to wait for: ``save`` returns after the copy."""

    def maybe_wait_for_saving(self) -> None:
        """Wait for the save before, and raise what went wrong with it."""
        if self._handle is not None:
            self._handle.wait("durable")
            self._handle = None

    def close(self) -> None:
        """Wait for the last save."""
        self.maybe_wait_for_saving()


class ModelAndOptimizer(Stateful):
    """Sharded model and optimizer as one part."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        weights, moments = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": moments}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )


class TrainState(Stateful):
    """The step."""

    step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("store")
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = tiny_model().eval()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train_state = TrainState()
    states = {"train": ModelAndOptimizer(model, optimizer), "train_state": train_state}
    checkpointer = GroupCheckpointManager(states, options.store)  # +
    checkpointer.load()
    while train_state.step < options.steps:
        train_state.step += 1
        optimizer.zero_grad()
        model(batch(train_state.step, dist.get_rank())).square().mean().backward()
        checkpointer.maybe_wait_for_staging()
        optimizer.step()
        checkpointer.save(train_state.step, last_step=train_state.step == options.steps)
    checkpointer.close()
    found = digest(model.state_dict())
    if dist.get_rank() == 0:
        print(f"step {train_state.step} digest {found}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
