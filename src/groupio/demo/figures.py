"""The numbers of the demonstration, as both the table and the report show them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from groupio.demo.launch import Run
from groupio.demo.run import Result

LEVELS = ("released", "staged", "remote", "durable")


@dataclass(frozen=True, slots=True)
class SaveFigures:
    """One save: seconds are those of the slowest rank, bytes those of the whole epoch.

    None where a level was not reached or a number does not apply.
    """

    label: str
    released: float | None
    staged: float | None
    remote: float | None
    durable: float | None
    logical: int | None
    unique: int | None
    stored: int | None
    failed: str = ""

    def seconds(self, level: str) -> float | None:
        """When ``level`` was reached, in seconds since the call."""
        value: float | None = getattr(self, level)
        return value


def saves(result: Result, name: str) -> list[SaveFigures]:
    """The saves of the run ``name``, failed ones included, by step."""
    run = result.runs.get(name)
    if run is None:
        return []
    store = "control" if name == "control" else "interrupted"
    infos = {info.epoch: info for info in result.epochs.get(store, [])}
    found = []
    for step in sorted({event["step"] for event in run.of("saving")}):
        events = [event for event in run.of("saved") if event["step"] == step]
        errors = [event for event in run.of("error") if event["step"] == step]
        info = infos.get(step) if events else None
        found.append(
            SaveFigures(
                f"step {step}",
                released=_slowest(events, "released"),
                staged=_slowest(events, "staged"),
                remote=_slowest(events, "remote"),
                durable=_slowest(events, "durable"),
                logical=info.bytes_logical if info else None,
                unique=info.bytes_unique if info else None,
                stored=info.bytes_stored if info else None,
                failed=errors[0]["type"] if errors else "",
            )
        )
    return found


def baseline(result: Result) -> SaveFigures | None:
    """Plain dcp.save of the same state: it returns when its files are synced."""
    run = result.runs.get("control")
    events = run.of("dcp") if run else []
    if not events:
        return None
    seconds = max(event["seconds"] for event in events)
    logical = saves(result, "control")[-1].logical
    return SaveFigures(
        "dcp.save", seconds, None, None, seconds, logical, None, int(events[0]["bytes"])
    )


def losses(run: Run | None) -> list[tuple[int, float]]:
    """(step, mean loss over the ranks), by step."""
    if run is None:
        return []
    return sorted((e["step"], e["loss"]) for e in run.of("step") if e["rank"] == 0)


def step_seconds(run: Run) -> float | None:
    """The median time of a step, in seconds."""
    found = sorted(event["seconds"] for event in run.of("step"))
    return float(found[len(found) // 2]) if found else None


def _slowest(events: list[dict[str, Any]], level: str) -> float | None:
    values = [event[level] for event in events]
    if not values or any(value is None for value in values):
        return None
    return float(max(values))
