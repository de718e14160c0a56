"""Directs the demonstration: a control run, a run with a murder, its resumption, the proof."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

import groupio
from groupio.demo import checks
from groupio.demo.checks import Check
from groupio.demo.compare import Comparison, compare
from groupio.demo.launch import Plan, Run, launch
from groupio.demo.progress import Progress


@dataclass(slots=True)
class Result:
    """Everything that the table and the report show."""

    plan: Plan
    checks: list[Check] = field(default_factory=list)
    runs: dict[str, Run] = field(default_factory=dict)
    epochs: dict[str, list[groupio.EpochInfo]] = field(default_factory=dict)
    comparison: Comparison | None = None

    @property
    def proven(self) -> bool:
        """Whether all five claims hold."""
        return len(self.checks) == 5 and all(check.holds for check in self.checks)


def run_demo(plan: Plan, console: Console) -> Result:
    """Run everything; stops after the first claim that does not hold.

    Checkpoints and logs are in ``plan.folder``; nothing is removed here.
    """
    result = Result(plan)
    for stage in (_control, _interrupt, _resume, _prove):
        before = len(result.checks)
        stage(result, console)
        for check in result.checks[before:]:
            _say(check, console)
        if not all(check.holds for check in result.checks):
            break
    return result


def remove_checkpoints(plan: Plan) -> None:
    """Remove the stores and event files, which are large; the report stays."""
    for name in ("control", "interrupted", "dcp", "run-control", "run-interrupted", "run-resumed"):
        shutil.rmtree(plan.folder / name, ignore_errors=True)


def _control(result: Result, console: Console) -> None:
    plan = result.plan
    console.rule("1 of 4: control run, uninterrupted")
    run = _launch(result, console, "control", "control", ["--dcp", str(plan.folder / "dcp")])
    result.epochs["control"] = _epochs(plan.store("control"))
    result.checks.append(checks.check_control(plan, run))


def _interrupt(result: Result, console: Console) -> None:
    plan = result.plan
    console.rule(
        f"2 of 4: the same run, rank {plan.kill_rank} gets SIGKILL while it saves step "
        f"{plan.kill_step}"
    )
    extra = ["--kill-rank", str(plan.kill_rank), "--kill-step", str(plan.kill_step)]
    run = _launch(result, console, "interrupted", "interrupted", extra)
    epochs = [info.epoch for info in _epochs(plan.store("interrupted"))]
    result.checks.append(checks.check_killed(plan, run, epochs))
    result.checks.append(checks.check_named(plan, run))


def _resume(result: Result, console: Console) -> None:
    plan = result.plan
    console.rule("3 of 4: restarted from `latest`")
    run = _launch(result, console, "resumed", "interrupted", ["--resume"])
    result.epochs["interrupted"] = _epochs(plan.store("interrupted"))
    result.checks.append(checks.check_resumed(plan, run))


def _prove(result: Result, console: Console) -> None:
    plan = result.plan
    console.rule("4 of 4: compare both ends, every item of every rank")
    with console.status("loading and verifying both epochs"):
        result.comparison = compare(
            plan.store("control"),
            plan.store("interrupted"),
            plan.steps,
            plan.ranks,
            lambda rank: console.print(f"  comparing rank {rank} of {plan.ranks}"),
        )
    result.checks.append(checks.check_equal(result.comparison))


def _launch(result: Result, console: Console, name: str, store: str, extra: list[str]) -> Run:
    plan = result.plan
    with Progress(console, plan) as progress:
        run = launch(plan, name, plan.store(store), extra, progress.event, progress.tick)
    result.runs[name] = run
    if run.returncode != 0 and name != "interrupted":
        console.print(f"  torchrun ended with {run.returncode}; the end of its log:", style="red")
        console.print(run.log_tail(), markup=False, highlight=False)
    return run


def _epochs(store: Path) -> list[groupio.EpochInfo]:
    try:
        client = groupio.connect(str(store), rank=0, world_size=1)
    except groupio.NotFound:
        return []
    try:
        return client.epochs()
    except groupio.NotFound:
        return []
    finally:
        client.close()


def _say(check: Check, console: Console) -> None:
    mark, style = ("PROVEN", "green") if check.holds else ("FAILED", "red")
    console.print(f"  {mark}", style=f"bold {style}", end=" ")
    console.print(check.claim, highlight=False)
    console.print(f"         {check.seen}", style="dim", markup=False, highlight=False)


def as_json(result: Result) -> dict[str, Any]:
    """The result as plain values, for ``--json``."""
    return {
        "proven": result.proven,
        "parallel": result.plan.parallel,
        "ranks": result.plan.ranks,
        "steps": result.plan.steps,
        "killed_rank": result.plan.kill_rank,
        "killed_step": result.plan.kill_step,
        "checks": [
            {"claim": check.claim, "holds": check.holds, "seen": check.seen}
            for check in result.checks
        ],
        "losses": {
            name: {str(event["step"]): event["loss"] for event in run.of("step")}
            for name, run in result.runs.items()
        },
    }
