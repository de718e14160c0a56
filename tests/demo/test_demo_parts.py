"""The proof can fail, the report stands alone, and wrong options are told in one line."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import groupio
from groupio.demo import checks, command
from groupio.demo.compare import Comparison, same
from groupio.demo.data import Batches, read_text
from groupio.demo.events import EventReader, EventWriter
from groupio.demo.launch import Plan, Run
from groupio.demo.progress import Progress
from groupio.demo.report import render
from groupio.demo.run import Result, as_json
from groupio.demo.table import print_table


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return Plan("fsdp", 4, 12, 3, tmp_path)


def event(kind: str, rank: int, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "rank": rank, "at": 0.0, **fields}


def saved(rank: int, step: int) -> dict[str, Any]:
    times = {"released": 0.1 + rank / 100, "staged": 0.2, "remote": 0.5, "durable": 0.6}
    return event("saved", rank, step=step, notes=[], **times)


def steps(first: int, last: int) -> list[dict[str, Any]]:
    return [event("step", 0, step=n, loss=5.0 / n, seconds=2.0) for n in range(first, last + 1)]


@pytest.fixture
def result(plan: Plan) -> Result:
    """A demonstration that went well."""
    log = plan.folder / "log"
    log.write_text("the end\n")
    ranks = range(4)
    control = [event("finished", r) for r in ranks] + steps(1, 12)
    for step in (3, 6, 9, 12):
        control += [e for r in ranks for e in (event("saving", r, step=step), saved(r, step))]
    control.append(event("dcp", 0, seconds=2.0, bytes=310_000_000))
    error = {"type": "GroupAborted", "message": "Rank 2 ended <b>", "members": [2]}
    interrupted = steps(1, 9) + [event("saving", r, step=9) for r in ranks]
    interrupted += [event("killed", 2, step=9, copied=38, total=77)]
    interrupted += [event("error", r, step=9, outcome="not_committed", **error) for r in (0, 1, 3)]
    resumed = steps(7, 12) + [event("resumed", r, step=6) for r in ranks]
    resumed += [event("finished", r) for r in ranks]
    made = Result(plan)
    made.runs = {
        "control": Run("control", log, control, 0),
        "interrupted": Run("interrupted", log, interrupted, 1),
        "resumed": Run("resumed", log, resumed, 0),
    }
    made.epochs["control"] = [
        groupio.EpochInfo(step, 4, 306_000_000, 305_000_000, 305_100_000, 0.0)
        for step in (3, 6, 9, 12)
    ]
    made.comparison = Comparison(
        {"weights": 4, "optimizer": 8, "RNG": 8}, {"weights": 10, "optimizer": 20, "RNG": 30}
    )
    made.checks = judge(made)
    return made


def judge(made: Result) -> list[checks.Check]:
    assert made.comparison is not None
    runs = made.runs
    return [
        checks.check_control(made.plan, runs["control"]),
        checks.check_killed(made.plan, runs["interrupted"], [3, 6]),
        checks.check_named(made.plan, runs["interrupted"]),
        checks.check_resumed(made.plan, runs["resumed"]),
        checks.check_equal(made.comparison),
    ]


def test_a_good_run_is_proven(result: Result) -> None:
    assert result.proven
    assert [check.holds for check in result.checks] == [True] * 5
    assert as_json(result)["proven"]


@pytest.mark.parametrize(
    ("claim", "run", "spoil"),
    [
        (0, "control", lambda e: e["kind"] == "saved" and e["step"] == 6 and e.update(kind="x")),
        (0, "control", lambda e: e["kind"] == "finished" and e.update(kind="stopped")),
        (1, "interrupted", lambda e: e["kind"] == "killed" and e.update(copied=77)),
        (1, "interrupted", lambda e: e["kind"] == "killed" and e.update(copied=0)),
        (1, "interrupted", lambda e: e["kind"] == "killed" and e.update(kind="x")),
        (2, "interrupted", lambda e: e["kind"] == "error" and e.update(members=[1, 2])),
        (2, "interrupted", lambda e: e["rank"] == 3 and e.update(kind="x")),
        (3, "resumed", lambda e: e["kind"] == "resumed" and e.update(step=3)),
        (3, "resumed", lambda e: e["rank"] == 1 and e.update(kind="x")),
    ],
)
def test_each_claim_can_fail(result: Result, claim: int, run: str, spoil: Any) -> None:
    for one in result.runs[run].events:
        spoil(one)
    result.checks = judge(result)
    assert [number for number, check in enumerate(result.checks) if not check.holds] == [claim]
    assert not result.proven


def test_exit_codes_and_committed_victims_count(result: Result) -> None:
    assert not checks.check_killed(result.plan, result.runs["interrupted"], [3, 6, 9]).holds
    result.runs["interrupted"].returncode = 0
    assert not checks.check_killed(result.plan, result.runs["interrupted"], [3, 6]).holds
    result.runs["resumed"].returncode = None
    assert not checks.check_resumed(result.plan, result.runs["resumed"]).holds
    assert not checks.check_equal(Comparison({"weights": 4}, {"weights": 4})).holds
    differing = Comparison(
        {"weights": 4, "optimizer": 8, "RNG": 8}, {}, [f"rank 0: w{n} differs" for n in range(5)]
    )
    check = checks.check_equal(differing)
    assert not check.holds
    assert "2 more" in check.seen


def test_values_are_compared_by_their_bits() -> None:
    nan = np.array([np.nan, -0.0], np.float32)
    assert same(nan, nan.copy())
    assert not same(nan, np.array([np.nan, 0.0], np.float32))
    assert not same(nan, nan.astype(np.float64))
    assert not same(nan, nan.reshape(1, 2))
    assert same((1, [None, 2.5]), (1, [None, 2.5]))
    assert not same((1, 2), [1, 2])
    assert not same(1, True)
    assert not same(nan, 1)


def test_the_report_needs_nothing_from_outside(result: Result) -> None:
    html = render(result)
    assert not re.search(r"(?:src|href)=|https?:|url\(|@import|<script", html)
    assert html.count("<svg") == html.count("</svg>") == 2
    assert "proven" in html
    assert "&lt;b&gt;" in html
    assert html.count("<tr") == 1 + 4 + 1 + 1  # heads, saves of control, the abort, dcp.save
    result.checks[0] = replace(result.checks[0], holds=False)
    assert "not proven" in render(result)


def test_a_report_of_nothing_is_still_a_report(plan: Plan) -> None:
    assert "not proven" in render(Result(plan))


def test_the_table_fits_a_narrow_terminal(result: Result) -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    print_table(result, console)
    text = console.export_text()
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line.startswith(("control", "dcp.save"))]
    assert len(lines) == 5
    assert lines[0].split() == [
        "control",
        "3",
        "0.13",
        "0.20",
        "0.50",
        "0.60",
        "306.0",
        "305.0",
        "305.1",
    ]
    assert "aborted" in text


def test_progress_speaks_without_a_terminal(result: Result) -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    with Progress(console, result.plan) as progress:
        progress.tick(11.0)
        for rank in range(4):
            progress.event(event("ready", rank, step=0))
        for run in result.runs.values():
            for one in run.events:
                progress.event(one)
        progress.event(event("stopped", 1, message="gone"))
        progress.event(event("unheard of", 1))
    text = console.export_text()
    for words in (
        "0 of 4 ranks are up", "4 ranks are up, fsdp", "step  12  loss", "rank 2 kills itself",
        "saved step 3: released after 0.13 s", "rank 3 got GroupAborted", "newest epoch: step 6",
        "plain dcp.save of the same state: 2.00 s", "rank 1 stops: gone",
    ):  # fmt: skip
        assert words in text


def test_events_are_followed_line_by_line(tmp_path: Path) -> None:
    writers = [EventWriter(tmp_path, rank) for rank in range(2)]
    reader = EventReader(tmp_path)
    assert reader.new() == []
    writers[0].write("step", loss=1.5)
    writers[1].write("step", loss=2.5)
    assert [e["loss"] for e in reader.new()] == [1.5, 2.5]
    with (tmp_path / "rank0.jsonl").open("a") as half:
        half.write('{"kind": "half", "at"')
        half.flush()
        assert reader.new() == []
        half.write(": 1}\n")
    assert [e["kind"] for e in reader.new()] == ["half"]
    for writer in writers:
        writer.close()


def test_the_text_is_the_same_everywhere_in_this_installation() -> None:
    text = read_text(1 << 20)
    assert len(text) == 1 << 20
    assert text.equal(read_text(1 << 20))
    batches = Batches(text, 3, 16)
    tokens, targets = batches.next()
    assert tokens.shape == targets.shape == (3, 16)
    assert tokens[:, 1:].equal(targets[:, :-1])
    assert batches.position == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ranks", "1"], "at least 2"),
        (["--steps", "2"], "three saves"),
        (["--steps", "6", "--save-every", "3"], "three saves"),
        (["--steps", "6", "--save-every", "0"], "three saves"),
        (["--width", "9"], "multiple of 8"),
        (["--dir", "/dev/null/x"], "cannot be used"),
        (["--steps", "3000000", "--save-every", "1"], "GB are needed"),
    ],
)
def test_wrong_options_are_told_in_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("steps", "every", "saves"),
    [(12, 3, [3, 6, 9, 12]), (3, 1, [1, 2, 3]), (13, 3, [3, 6, 9, 12, 13]), (7, 3, [3, 6, 7])],
)
def test_the_last_step_is_saved_and_the_save_before_it_fails(
    steps: int, every: int, saves: list[int], tmp_path: Path
) -> None:
    plan = Plan("fsdp", 4, steps, every, tmp_path)
    assert plan.saves == saves
    assert [plan.resume_step, plan.kill_step] == saves[-3:-1]


def test_an_earlier_demonstration_is_not_mixed_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "control").mkdir()
    assert command.main(["--dir", str(tmp_path)]) == 2
    assert "earlier demonstration" in capsys.readouterr().err


def test_a_proof_that_fails_ends_with_1(
    result: Result, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from groupio.demo import run

    result.checks.pop()
    monkeypatch.setattr(run, "run_demo", lambda plan, console: result)
    assert command.main(["--dir", str(tmp_path)]) == 1
    assert "not proven" in (tmp_path / "report.html").read_text(encoding="utf-8")
