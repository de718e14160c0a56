"""Starts the ranks of one training run under torchrun and follows them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from groupio.demo.events import EventReader

POLL_S = 0.2
STOP_S = 40.0
"""torchrun gives its ranks 30 seconds after SIGTERM."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to train: the same for all runs of one demonstration."""

    parallel: str
    ranks: int
    steps: int
    save_every: int
    folder: Path
    layers: int = 8
    width: int = 512
    seed: int = 1
    timeout_s: float = 900.0
    """How long one run may take, in seconds, before it is stopped and counts as failed."""

    @property
    def saves(self) -> list[int]:
        """The steps that are saved, ascending: every ``save_every``-th and the last."""
        return sorted({*range(self.save_every, self.steps, self.save_every), self.steps})

    @property
    def kill_step(self) -> int:
        """The save in the middle of which a rank dies: the last but one."""
        return self.saves[-2]

    @property
    def resume_step(self) -> int:
        """The save from which the job goes on after that: the one before."""
        return self.saves[-3]

    @property
    def kill_rank(self) -> int:
        """The rank that dies."""
        return self.ranks - 2 if self.ranks > 2 else self.ranks - 1

    def store(self, run: str) -> Path:
        """The store of one run: "control" or "interrupted"."""
        return self.folder / run


@dataclass(slots=True)
class Run:
    """What became of one launch: its events in order, the exit code of torchrun, its log."""

    name: str
    log: Path
    events: list[dict[str, Any]] = field(default_factory=list)
    returncode: int | None = None

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The events of one kind."""
        return [event for event in self.events if event["kind"] == kind]

    def log_tail(self, lines: int = 15) -> str:
        """The end of what torchrun and the ranks printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def launch(
    plan: Plan,
    name: str,
    store: Path,
    extra: list[str],
    on_event: Callable[[dict[str, Any]], None],
    on_tick: Callable[[float], None],
) -> Run:
    """Run all ranks to their end; ``on_event`` sees each event, ``on_tick`` the seconds so far.

    The ranks are stopped when they take longer than the plan allows, or on an interrupt.
    """
    folder = plan.folder / f"run-{name}"
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(name, folder / "torchrun.log")
    reader = EventReader(folder)
    with run.log.open("wb") as log:
        process = subprocess.Popen(
            _command(plan, store, folder, extra),
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=_environment(),
            start_new_session=True,
        )
        begin = time.monotonic()
        try:
            while run.returncode is None:
                try:
                    run.returncode = process.wait(POLL_S)
                except subprocess.TimeoutExpired:
                    on_tick(time.monotonic() - begin)
                for event in reader.new():
                    run.events.append(event)
                    on_event(event)
                if time.monotonic() - begin > plan.timeout_s:
                    break
        finally:
            if process.poll() is None:
                _stop(process)
    return run


def _command(plan: Plan, store: Path, events: Path, extra: list[str]) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(plan.ranks)),
        *("-m", "groupio.demo.train", "--store", str(store), "--events", str(events)),
        *("--steps", str(plan.steps), "--save-every", str(plan.save_every)),
        *("--parallel", plan.parallel, "--seed", str(plan.seed)),
        *("--layers", str(plan.layers), "--width", str(plan.width), *extra),
    ]


def _environment() -> dict[str, str]:
    environment = dict(os.environ)
    # One thread per rank: sums have one order, and four ranks share few cores.
    environment.update(OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1")
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(variable, None)
    return environment


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End torchrun, which ends its ranks; whatever is left of its session is killed."""
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(STOP_S)
