"""A callback for Hugging Face's ``Trainer``: saves in the background, resumes bit for bit.

::

    python examples/hf_trainer.py /tmp/hf-store --steps 6

The model is made on the spot; nothing is downloaded. The lines that a training script adds end
with ``# +``; :class:`GroupCallback` is written once for all of them.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from common import digest
from torch.utils.data import IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import groupio.torch

VOCABULARY, LENGTH, BATCH = 64, 16, 4


class GroupCallback(TrainerCallback):
    """Saves model, optimizer, scheduler, RNG and step after every ``every`` steps to ``store``.

    At the start of training it goes on from the newest epoch. A ``dataset`` with an attribute
    ``skip`` is told how many samples were consumed.
    """

    def __init__(self, store: str, every: int = 1) -> None:
        self.store, self.every = store, every
        self.handle: Any = None
        self._rng: torch.Tensor | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        saved = {"training": None, "model": parts["model"].state_dict()}
        try:
            groupio.torch.load(saved, self.store)
        except groupio.NotFound:
            return
        training = saved["training"]
        parts["optimizer"].load_state_dict(training["optimizer"])
        parts["lr_scheduler"].load_state_dict(training["scheduler"])
        self._rng = training["rng"]
        state.global_step = training["step"]
        parts["train_dataloader"].dataset.skip = training["step"] * args.train_batch_size

    def on_step_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        if self._rng is not None:  # only now: the data loader drew from it on its way here
            torch.set_rng_state(self._rng)
            self._rng = None

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        if state.global_step % self.every == 0:
            training = {
                "optimizer": parts["optimizer"].state_dict(),
                "scheduler": parts["lr_scheduler"].state_dict(),
                "rng": torch.get_rng_state(),
                "step": state.global_step,
            }
            saved = {"training": training, "model": parts["model"].state_dict()}
            self.handle = groupio.torch.save(saved, self.store, step=state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        if self.handle is not None:
            self.handle.wait("durable")


class Samples(IterableDataset[dict[str, torch.Tensor]]):
    """Random token sequences, the same in every run; the first ``skip`` are passed over."""

    def __init__(self) -> None:
        self.skip = 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for number in range(self.skip, 10_000):
            source = torch.Generator().manual_seed(number)
            ids = torch.randint(VOCABULARY, (LENGTH,), generator=source)
            yield {"input_ids": ids, "labels": ids}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("store")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--stop-at", type=int, default=0, help="end the process after this step")
    options = parser.parse_args()
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=options.steps,
            per_device_train_batch_size=BATCH,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        callbacks: list[TrainerCallback] = [GroupCallback(options.store)]  # +
        if options.stop_at:
            callbacks.append(StopAt(options.stop_at))
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=Samples(),
            callbacks=callbacks,  # +
        )
        trainer.train()
    print(f"step {trainer.state.global_step} digest {digest(model.state_dict())}")


class StopAt(TrainerCallback):
    """Ends training early, as a preemption would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


if __name__ == "__main__":
    main()
