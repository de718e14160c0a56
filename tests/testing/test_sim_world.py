"""The simulator repeats itself, finds nothing here, and finds what is broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from groupio.testing.sim import guards
from groupio.testing.sim.__main__ import main
from groupio.testing.sim.runner import Sizes, run_many, run_seed

SMALL = Sizes(members=6, agents=3, epochs=6)

FOUND_BY = {
    "fsync": 2,
    "directory fsync": 2,
    "digest check": 10,
    "decision key": None,
    "attempt fence": None,
    "incarnation fence": None,
    "others ended": 8,
    "arena fence": None,
    "fingerprint check": None,
    "deadline": 13,
    "store proof": 2,
}
"""The invariant that breaks first without this guard; None: more than one may."""


def test_many_seeds_break_no_promise() -> None:
    summary = run_many(range(1000, 1060), SMALL)
    assert [str(result.violation) for result in summary.bad] == []
    assert summary.seeds == 60
    assert summary.commits > 60
    assert summary.events > 60 * 100


def test_a_seed_repeats_itself() -> None:
    for seed in (1, 2):
        one = run_seed(seed, SMALL.options(seed), trace=True)
        two = run_seed(seed, SMALL.options(seed), trace=True)
        plain = run_seed(seed, SMALL.options(seed))
        assert one.lines == two.lines
        assert (one.events, one.seconds) == (plain.events, plain.seconds)


@pytest.mark.parametrize("guard", guards.GUARDS)
def test_a_guard_that_is_removed_is_missed(guard: str) -> None:
    without = frozenset((guard,))
    with guards.removed(without):
        summary = run_many(range(400), Sizes(), guards=without, stop_after=1)
    assert summary.bad, f"nobody misses the guard {guard!r}"
    violation = summary.bad[0].violation
    assert violation is not None
    assert FOUND_BY[guard] in (None, violation.number)


def test_the_command_says_how_it_went(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "sim.json"
    sizes = ["--members", "4", "--agents", "2", "--epochs", "3"]
    assert main(["--seeds", "5", "--seed", "7", "--jobs", "1", *sizes, "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["seeds"] == 5
    assert found["violations"] == 0
    assert found["fault_cells_total"] >= found["fault_cells_hit"] > 0
    assert {"events", "wall_s"} <= found.keys()
    assert "5 seeds, 0 violations" in capsys.readouterr().out


def test_a_replay_writes_its_figures_too(tmp_path: Path) -> None:
    file = tmp_path / "sim.json"
    sizes = ["--members", "4", "--agents", "2", "--epochs", "3"]
    assert main(["--seed", "7", *sizes, "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert (found["seeds"], found["first_seed"], found["violations"]) == (1, 7, 0)
    assert found["events"] > 0


def test_a_failing_seed_prints_its_replay(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--members", "2", "--agents", "1", "--epochs", "3"]
    assert main(["--seeds", "10", "--seed", "0", "--jobs", "1", "--without", "fsync", *sizes]) == 1
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if "replay:" in line)
    words = line.split("python -m groupio.testing.sim ")[1].replace("'", "").split()
    assert main(words) == 1
    timeline = capsys.readouterr().out
    assert "invariant 2" in timeline
    assert "control 1" in timeline


def test_a_size_that_is_given_fits_what_is_drawn() -> None:
    """Memory and the kind of store are drawn for the size that the world has."""
    summary = run_many(range(100, 106), Sizes(16, 8, 3, swarm=False))
    assert not summary.bad
    for seed in range(100):
        options = Sizes(16, 8, 3, swarm=False).options(seed)
        assert (options.members, options.agents, options.epochs) == (16, 8, 3)
        assert not options.local
        assert not options.node_local
    assert Sizes(2, 8, 3, swarm=False).options(1).agents == 2
