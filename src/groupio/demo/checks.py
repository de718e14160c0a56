"""The proof: what has to be true at the end of the demonstration, judged from the events."""

from __future__ import annotations

from dataclasses import dataclass

from groupio.demo.compare import Comparison
from groupio.demo.launch import Plan, Run


@dataclass(frozen=True, slots=True)
class Check:
    """One claim, whether it holds, and what was seen."""

    claim: str
    holds: bool
    seen: str


def check_control(plan: Plan, run: Run) -> Check:
    """The uninterrupted run took all steps and all its saves are durable."""
    finished = len(run.of("finished"))
    durable = {event["step"] for event in run.of("saved") if event["durable"] is not None}
    wanted = set(plan.saves)
    return Check(
        "an uninterrupted run saves every epoch durably",
        run.returncode == 0 and finished == plan.ranks and durable == wanted,
        f"{finished} of {plan.ranks} ranks finished, durable epochs {sorted(durable)}",
    )


def check_killed(plan: Plan, run: Run, epochs: list[int]) -> Check:
    """The victim died by its own SIGKILL between the start and the end of its copy."""
    deaths = run.of("killed")
    seen = "no rank died while it saved"
    middle = False
    if deaths:
        death = deaths[0]
        middle = 0 < death["copied"] < death["total"]
        seen = (
            f"rank {death['rank']} died with {death['copied'] / 1e6:.1f} of "
            f"{death['total'] / 1e6:.1f} MB copied; committed epochs: {epochs}"
        )
    holds = middle and run.returncode != 0 and plan.kill_step not in epochs
    return Check(
        f"rank {plan.kill_rank} is killed in the middle of the save of step {plan.kill_step}",
        holds,
        seen,
    )


def check_named(plan: Plan, run: Run) -> Check:
    """Every survivor got a typed error that names the dead rank."""
    errors = [event for event in run.of("error") if event["step"] == plan.kill_step]
    naming = {event["rank"] for event in errors if event["members"] == [plan.kill_rank]}
    survivors = set(range(plan.ranks)) - {plan.kill_rank}
    seen = f"{errors[0]['type']}: {errors[0]['message']}" if errors else "no error was reported"
    return Check(
        f"all {len(survivors)} survivors get a typed error that names rank {plan.kill_rank}",
        naming == survivors,
        seen,
    )


def check_resumed(plan: Plan, run: Run) -> Check:
    """All ranks went on from the epoch before the one that failed, to the end."""
    steps = {event["step"] for event in run.of("resumed")}
    ranks = {event["rank"] for event in run.of("resumed")}
    wanted = plan.resume_step
    finished = len(run.of("finished"))
    return Check(
        f"the restarted job resumes from `latest`, step {wanted}, and finishes",
        steps == {wanted} and len(ranks) == plan.ranks == finished and run.returncode == 0,
        f"{len(ranks)} ranks resumed from {sorted(steps)}, {finished} finished",
    )


def check_equal(comparison: Comparison) -> Check:
    """Weights, optimizer and RNG of all ranks equal those of the uninterrupted run."""
    if comparison.different:
        more = len(comparison.different) - 3
        seen = "; ".join(comparison.different[:3]) + (f"; and {more} more" if more > 0 else "")
    else:
        seen = comparison.summary()
    return Check(
        "final weights, optimizer and RNG equal the uninterrupted run, bit for bit",
        comparison.equal,
        seen,
    )
