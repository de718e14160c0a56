"""Measures how long a group of several nodes takes to agree: real members, real agents, one
machine.

Every member is a client process that calls ``Client.save``, every agent a process of its own; they
meet over loopback as agents of different nodes do. Two legs of every epoch are measured, in
readings of one clock (CLOCK_MONOTONIC):

``gather``  from the last member's ``OpenSave``, sent when its items are described, until the last
    agent is told to let its members copy: the group is complete, admitted on all nodes and visible
    in the store.
``plan``  from the last agent's start of its report, when the chunks of all its members are copied
    and named, to the moment when the last agent has taken its order: reports made, sent and merged,
    the plan made, the orders sent and taken. What an agent's order says is the plan of its members.

Between the legs the members' bytes are copied and hashed, which is work on the bytes and no
coordination: it is left out of both. In each leg all wait for one common start; who comes to run
more than ARRIVE_S after it, because others have the processors, counts as if it had come in time:
a leg begins with its last arrival, but no later than that. ``median_ms`` is that of the plan leg,
``both_ms`` that of the sum.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import groupio
from groupio.agent import process
from groupio.bench.board import Board, Plan, late
from groupio.bench.launch import end_all, environment
from groupio.errors import GroupAborted, Outcome

LEAD_S = 0.1
"""A start is fixed so long before it: until then who waits has looked."""

REST_S = 0.2
"""So long nothing happens between the legs."""

SETTLE_S = 1.0
"""So long nothing happens before an epoch, once all agents have read the record of the one before
to know its chunks: that is no part of this one, and many agents on few processors take long."""

ARRIVE_S = 0.005
"""All arrive within so long, or are taken to."""

STAGES = ("report", "arrive", "begin", "plan", "send", "take")
"""The plan leg, stage by stage: see :func:`stages`."""


def measure(
    *,
    members: int,
    agents: int,
    chunks: int,
    chunk_bytes: int,
    epochs: int,
    warm_up: int,
    parent: Path,
    timeout_s: float,
    on_epoch: Callable[[int], None] = lambda epoch: None,
) -> dict[str, Any]:
    """Run ``warm_up`` epochs that do not count and ``epochs`` that do; what came out, in ms.

    The store is made below ``parent`` and removed again. GroupAborted when a process fails,
    GroupTimeout when a step takes more than ``timeout_s``.
    """
    store = Path(tempfile.mkdtemp(prefix="groupio-bench-coordination-", dir=parent))
    folder = Path(tempfile.mkdtemp(prefix="groupio-bench-"))
    plan = Plan(
        members=members,
        agents=agents,
        chunks=chunks,
        chunk_bytes=chunk_bytes,
        epochs=warm_up + epochs,
        folder=str(folder),
        store=str(store / "store"),
        timeout_s=timeout_s,
    )
    plan.save()
    run = _Run(plan)
    try:
        run.start()
        for epoch in range(1, plan.epochs + 1):
            on_epoch(epoch)
            run.epoch(epoch)
        run.finish()
        return summary(plan, run.board, warm_up)
    finally:
        run.end()
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(store, ignore_errors=True)


class _Run:
    """The processes of one run."""

    def __init__(self, plan: Plan) -> None:
        self.board = Board(plan)
        self._plan = plan
        self._processes: list[subprocess.Popen[bytes]] = []
        self._members: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the agents, then the members."""
        plan = self._plan
        for node in range(plan.agents):
            plan.runtime_dir(node).mkdir(mode=0o700)
            self._spawn(f"agent-{node}", "coordination_agent", plan.folder, str(node))
        sockets = [
            process.runtime_paths(str(plan.runtime_dir(node)), groupio.__version__).socket
            for node in range(plan.agents)
        ]
        self._await("the agents", lambda: all(path.exists() for path in sockets))
        self._members = self._spawn("members", "coordination_member", plan.folder)

    def _spawn(self, name: str, module: str, *arguments: str) -> subprocess.Popen[bytes]:
        with open(Path(self._plan.folder, f"{name}.out"), "wb") as log:
            started = subprocess.Popen(
                [sys.executable, "-m", f"groupio.bench.{module}", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(),
            )
        self._processes.append(started)
        return started

    def epoch(self, epoch: int) -> None:
        """Let one epoch go through both legs."""
        board = self.board
        self._await(f"members in epoch {epoch}", lambda: board.members(epoch, "ready").all())
        if epoch > 1:
            before = epoch - 1
            self._await(f"chunks of epoch {before}", lambda: board.nodes(before, "learnt").all())
        time.sleep(SETTLE_S)
        board.say(epoch, "open", time.monotonic() + LEAD_S)
        self._await(f"hashes of epoch {epoch}", lambda: board.nodes(epoch, "held").all())
        time.sleep(REST_S)
        board.say(epoch, "plan", time.monotonic() + LEAD_S)
        self._await(f"orders of epoch {epoch}", lambda: board.nodes(epoch, "ordered").all())

    def finish(self) -> None:
        """Wait until all members have all epochs durable."""
        members = self._members
        assert members is not None
        self._await("the members' end", lambda: members.poll() is not None)

    def _await(self, what: str, come: Callable[[], Any]) -> None:
        end = time.monotonic() + self._plan.timeout_s
        while not come():
            failed = [one for one in self._processes if one.poll()]
            if failed:
                raise GroupAborted(
                    f"bench coordination: a process ended while waiting for {what}: "
                    f"{self._last_words()}",
                    outcome=Outcome.UNKNOWN,
                )
            if time.monotonic() > end:
                raise late(what, self._plan.timeout_s)
            time.sleep(0.02)

    def _last_words(self) -> str:
        for path in sorted(Path(self._plan.folder).glob("*.out"), reverse=True):
            lines = [line for line in path.read_text(errors="replace").split("\n") if line.strip()]
            if lines:
                return f"{path.stem}: {lines[-1].strip()}"
        return "it printed nothing"

    def end(self) -> None:
        """End what still runs."""
        end_all(self._processes[::-1])


def stages(board: Board, epoch: int) -> dict[str, float]:
    """The plan leg in seconds, stage by stage, each from the end of the one before.

    report: to the last agent's report; arrive: to the last report at the controller; begin: until
    planning begins; plan: planning; send: to the last order sent; take: to the last one taken.
    """
    ends = [
        float(board.nodes(epoch, "complete").max()),
        float(board.nodes(epoch, "hashed").max()),
        board.group(epoch, "last_hashed"),
        board.group(epoch, "plan_begun"),
        board.group(epoch, "planned"),
        board.group(epoch, "orders_sent"),
        float(board.nodes(epoch, "ordered").max()),
    ]
    return dict(zip(STAGES, np.diff(ends).tolist(), strict=True))


def summary(plan: Plan, board: Board, warm_up: int) -> dict[str, Any]:
    """The figures of the epochs after the warm-up, in ms; medians, and every single one."""
    runs = [_figures(board, epoch) for epoch in range(warm_up + 1, plan.epochs + 1)]

    def median(name: str) -> float:
        return round(statistics.median(run[name] for run in runs), 3)

    return {
        "members": plan.members,
        "agents": plan.agents,
        "chunks": plan.chunks,
        "chunk_bytes": plan.chunk_bytes,
        "epochs": len(runs),
        "warm_up": warm_up,
        "median_ms": median("plan_leg_ms"),
        "gather_ms": median("gather_leg_ms"),
        "both_ms": median("both_ms"),
        "spread_ms": median("spread_ms"),
        "gather_spread_ms": median("gather_spread_ms"),
        "agents_cpu_ms": median("agents_cpu_ms"),
        "stages_ms": {name: median(f"{name}_ms") for name in STAGES},
        "runs": runs,
    }


def _figures(board: Board, epoch: int) -> dict[str, float]:
    opened, told = board.members(epoch, "opened"), board.nodes(epoch, "start_copy")
    complete, ordered = board.nodes(epoch, "complete"), board.nodes(epoch, "ordered")
    granted = board.members(epoch, "granted")
    cpu = board.nodes(epoch, "cpu_end") - board.nodes(epoch, "cpu_start")
    gather = told.max() - min(opened.max(), board.group(epoch, "open") + ARRIVE_S)
    plan = ordered.max() - min(complete.max(), board.group(epoch, "plan") + ARRIVE_S)
    seconds = {
        "plan_leg": plan,
        "gather_leg": gather,
        "both": gather + plan,
        "spread": np.ptp(complete),
        "gather_spread": np.ptp(opened),
        "last_grant": granted.max() - told.max(),
        "agents_cpu": cpu.sum(),
        "busiest_agent_cpu": cpu.max(),
        "copy_and_hash": board.nodes(epoch, "held").max() - granted.max(),
        **stages(board, epoch),
    }
    return {"epoch": epoch, **{f"{k}_ms": round(float(v) * 1e3, 3) for k, v in seconds.items()}}
