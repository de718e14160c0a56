"""A ``CheckpointIO`` for Lightning: ``Trainer(plugins=[GroupCheckpointIO(store)])``.

::

    python examples/lightning_io.py /tmp/lightning-store --steps 4
    python examples/lightning_io.py /tmp/lightning-store --steps 8 --resume

Lightning calls a CheckpointIO on rank 0 only (its DDP strategies hand over one copy), so that each
process saves and loads as a group of its own. The lines that a training script adds end with
``# +``.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from common import batch, digest, tiny_model
from lightning_fabric.plugins.io.checkpoint_io import CheckpointIO
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

import groupio.torch


class GroupCheckpointIO(CheckpointIO):
    """Keeps Lightning's checkpoints in a groupio store; the last number of a path is the step."""

    def __init__(self, store: str) -> None:
        self.store = store
        self._handle: Any = None
        self._alone: Any = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        self._handle = groupio.torch.save(
            {"checkpoint": checkpoint},
            self.store,
            step=_step_of(path),
            process_group=self._group(),
        )

    def load_checkpoint(self, path: Any, map_location: Any = None, **_: Any) -> dict[str, Any]:
        found: dict[str, Any] = {"checkpoint": None}
        groupio.torch.load(found, self.store, step=_step_of(path), process_group=self._group())
        return dict(found["checkpoint"])

    def remove_checkpoint(self, path: Any) -> None:
        """Old epochs stay: unchanged bytes of newer ones may lie in their segments."""

    def teardown(self) -> None:
        if self._handle is not None:
            self._handle.wait("durable")

    def _group(self) -> Any:
        if dist.is_initialized() and self._alone is None:
            self._alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        return self._alone


def _step_of(path: Any) -> int:
    return int(re.findall(r"\d+", str(path))[-1])


class Tiny(pl.LightningModule):
    """The shared tiny model, trained with AdamW on the data of each global step."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_model()

    def training_step(self, _: int, number: int) -> torch.Tensor:
        return self.model(batch(self.global_step, 0)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("store")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--resume", type=int, default=0, help="go on from this step")
    options = parser.parse_args()
    pl.seed_everything(0, verbose=False)
    module = Tiny()
    module.model.eval()  # without dropout: Lightning does not save the RNG state
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            plugins=[GroupCheckpointIO(options.store)],  # +
            default_root_dir=folder,
            accelerator="cpu",
            devices=1,
            max_steps=options.steps,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[
                ModelCheckpoint(
                    dirpath=folder, filename="{step}", every_n_train_steps=1, save_top_k=-1
                )
            ],
        )
        data = DataLoader(range(100), batch_size=None, shuffle=False)
        resume = f"step={options.resume}.ckpt" if options.resume else None
        trainer.fit(module, data, ckpt_path=resume)
    print(f"step {trainer.global_step} digest {digest(module.state_dict())}")


if __name__ == "__main__":
    main()
