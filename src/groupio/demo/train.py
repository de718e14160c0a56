"""The program of each rank of the demonstration: ``torchrun -m groupio.demo.train ...``.

It trains the GPT of :mod:`groupio.demo.model` and saves its whole state with groupio every few
steps. It starts from the newest epoch of the store if there is one.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import groupio
import groupio.torch
from groupio.client.handle import SaveHandle
from groupio.demo.baseline import measure_dcp
from groupio.demo.data import Batches, read_text
from groupio.demo.events import EventWriter
from groupio.demo.model import GPT, GPTConfig
from groupio.demo.sabotage import die_while_copying

BATCH = 2
DEADLINE_S = 120.0
LAST_NEWS_S = 20.0


class Trainer:
    """Model, optimizer and data of one rank, and their state as one dict."""

    def __init__(self, parallel: str, seed: int, config: GPTConfig) -> None:
        rank = dist.get_rank()
        torch.manual_seed(seed)
        model = GPT(config)
        self.model: torch.nn.Module
        if parallel == "fsdp":
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
            self.model = model
        else:
            self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, weight_decay=0.1)
        self.batches = Batches(read_text(), BATCH, config.context)
        self.step = 0
        self.losses: list[float] = []
        # From here on every rank draws its own dropout and its own windows of the text.
        torch.manual_seed(1000 * seed + rank)
        random.seed(1000 * seed + rank)

    def state(self) -> dict[str, Any]:
        """Everything that a resumed run needs; tensors are the live ones."""
        model, optim = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optim": optim,
            "rng": {"torch": torch.get_rng_state(), "python": random.getstate()},
            "data": {"position": self.batches.position},
            "step": self.step,
            "losses": list(self.losses),
        }

    def resume(self, store: str) -> int:
        """Load the newest epoch of ``store`` and go on from there; its number."""
        if isinstance(self.model, DistributedDataParallel):
            # It arranges its buckets anew after the first step, which changes the order of its
            # sums: let it have that step before the state is loaded.
            self.train_step()
        state = self.state()
        report = groupio.torch.load(state, store)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )
        torch.set_rng_state(state["rng"]["torch"])
        random.setstate(state["rng"]["python"])
        self.batches.position = state["data"]["position"]
        self.step, self.losses = state["step"], state["losses"]
        return report.step

    def train_step(self) -> float:
        """One step of the optimizer; the loss, averaged over the ranks."""
        loss = self.model(*self.batches.next())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        self.step += 1
        self.losses.append(mean.item() / dist.get_world_size())
        return self.losses[-1]


def main(argv: list[str] | None = None) -> int:
    """Train as the arguments say; 0 when all steps were done and the last save is durable."""
    options = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _stop_once)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    events = EventWriter(options.events, dist.get_rank())
    events.write("started", pid=os.getpid())
    config = GPTConfig(layers=options.layers, width=options.width)
    trainer = Trainer(options.parallel, options.seed, config)
    if options.resume:
        events.write("resumed", step=trainer.resume(options.store))
    events.write("ready", step=trainer.step)
    handles: list[SaveHandle] = []
    try:
        _train(trainer, options, events, handles)
    except (RuntimeError, groupio.GroupIOError) as error:
        # A peer is gone: say what its loss did to the save, then give up like any training job.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        events.write("stopped", message=f"{type(error).__name__}: {_short(error)}")
        _await_last_news(handles)
        return 3
    if options.dcp:
        seconds, nbytes = measure_dcp(trainer.state(), options.dcp)
        events.write("dcp", seconds=seconds, bytes=nbytes)
    events.write("finished", step=trainer.step)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _train(
    trainer: Trainer,
    options: argparse.Namespace,
    events: EventWriter,
    handles: list[SaveHandle],
) -> None:
    while trainer.step < options.steps:
        begin = time.monotonic()
        loss = trainer.train_step()
        events.write("step", step=trainer.step, loss=loss, seconds=time.monotonic() - begin)
        if trainer.step % options.save_every == 0 or trainer.step == options.steps:
            handles.append(_save(trainer, options, events))
    for handle in handles:
        handle.wait("durable", timeout_s=DEADLINE_S)


def _save(trainer: Trainer, options: argparse.Namespace, events: EventWriter) -> SaveHandle:
    state = trainer.state()
    if trainer.step == options.kill_step and dist.get_rank() == options.kill_rank:
        total = _tensor_bytes(state)
        die_while_copying(
            total // 2,
            lambda copied: events.write("killed", step=trainer.step, copied=copied, total=total),
        )
    events.write("saving", step=trainer.step)
    handle = groupio.torch.save(
        state,
        options.store,
        step=trainer.step,
        deadline_s=DEADLINE_S,
        metadata={"loss": trainer.losses[-1]},
    )
    handle.add_done_callback("durable", lambda done: _tell(done, events))
    return handle


def _tell(handle: SaveHandle, events: EventWriter) -> None:
    """Called when the save is durable or failed, on the thread that listens to the agent."""
    if handle.error is not None:
        error = handle.error
        text = f"{type(error).__name__}: {error.message}"
        sys.stderr.write(f"[rank {dist.get_rank()}] save of step {handle.epoch}: {text}\n")
        events.write(
            "error",
            step=handle.epoch,
            type=type(error).__name__,
            message=error.message,
            outcome=str(error.outcome),
            members=_named(error),
        )
        return
    times = handle.times
    events.write(
        "saved",
        step=handle.epoch,
        released=times.released,
        staged=times.staged,
        remote=times.remote,
        durable=times.durable,
        notes=list(times.notes),
    )


def _stop_once(number: int, frame: object) -> None:
    """SIGTERM ends the training like an error does; torchrun sends it when another rank died.

    The end itself is not interrupted: this rank has to say what became of its save.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise RuntimeError("SIGTERM: torchrun ends this rank")


def _short(error: Exception) -> str:
    """The first sentence of an error, without the source position that gloo puts before it."""
    lines = str(error).splitlines() or [""]
    return lines[0].rpartition("] ")[2].partition(". ")[0]


def _named(error: groupio.GroupIOError) -> list[int]:
    """The ranks that an error names."""
    fields = error.fields()
    return list(fields.get("members") or fields.get("missing") or ())


def _await_last_news(handles: list[SaveHandle]) -> None:
    for handle in handles:
        try:
            handle.wait("durable", timeout_s=LAST_NEWS_S)
        except groupio.GroupIOError as error:
            sys.stderr.write(f"[rank {dist.get_rank()}] {type(error).__name__}: {error}\n")


def _tensor_bytes(value: Any) -> int:
    if isinstance(value, dict):
        return sum(_tensor_bytes(child) for child in value.values())
    if isinstance(value, torch.Tensor):
        local = value.to_local() if hasattr(value, "to_local") else value
        return int(local.numel() * local.element_size())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="groupio.demo.train", description=__doc__)
    parser.add_argument("--store", required=True, help="the store to save to")
    parser.add_argument("--events", required=True, type=Path, help="folder for the event files")
    parser.add_argument("--steps", required=True, type=int)
    parser.add_argument("--save-every", required=True, type=int)
    parser.add_argument("--parallel", choices=("fsdp", "ddp"), default="fsdp")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--layers", type=int, default=GPTConfig().layers)
    parser.add_argument("--width", type=int, default=GPTConfig().width)
    parser.add_argument("--resume", action="store_true", help="start from the newest epoch")
    parser.add_argument("--kill-rank", type=int, default=-1)
    parser.add_argument("--kill-step", type=int, default=-1)
    parser.add_argument("--dcp", help="folder in which to measure plain dcp.save at the end")
    return parser


if __name__ == "__main__":
    sys.exit(main())
