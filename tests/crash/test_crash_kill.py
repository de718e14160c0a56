"""Kill -9 at every system call of a whole job's commit path, recovery and load."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import cases
import pytest
from cases import Case
from forkserver import ForkServer
from stracing import Call, kill_at
from whole_path import Script, saves

SAMPLE = {"first": 26, "resume": 14, "rewind": 8}
"""Points of each case in the default run; the proof takes all."""


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer() as made:
        yield made


@pytest.fixture
def make_case(server: ForkServer, tmp_path: Path) -> Callable[[str], Case]:
    """The case of that name, with its calls learnt."""

    def make(name: str) -> Case:
        return cases.make(name, server, tmp_path)

    return make


def vital(call: Call) -> bool:
    """A call that gives a decision its name, or takes a file away."""
    return "/epochs>" in call.text and call.name in ("linkat", "fsync", "renameat2")


def spread(calls: Sequence[Call], count: int) -> list[Call]:
    """``count`` of the calls that change something, evenly, the vital ones among them."""
    changing = [call for call in calls if call.changes]
    chosen = [call for call in changing if vital(call)]
    others = [call for call in changing if not vital(call)]
    step = max(1.0, len(others) / max(1, count - len(chosen)))
    chosen += [others[int(at * step)] for at in range(int(len(others) / step))]
    return sorted(chosen, key=changing.index)


def kill_at_each(case: Case, calls: Sequence[Call]) -> None:
    for call in calls:
        told, code = case.run(kill_at(call))
        try:
            assert code == -signal.SIGKILL, f"was not killed: {code}"
            case.judge(told)
        except AssertionError as error:
            error.add_note(f"killed at {call}, told {told}")
            raise


@pytest.mark.parametrize("name", SAMPLE)
def test_kill_at_system_calls(make_case: Callable[[str], Case], name: str) -> None:
    case = make_case(name)
    kill_at_each(case, spread(case.calls, SAMPLE[name]))


@pytest.mark.proof
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SAMPLE)
def test_kill_at_every_system_call(make_case: Callable[[str], Case], name: str) -> None:
    case = make_case(name)
    kill_at_each(case, case.calls)
    print(f"{name}: killed at each of {len(case.calls)} calls")


def test_a_decision_that_is_not_atomic_is_noticed(server: ForkServer, tmp_path: Path) -> None:
    case = Case(server, tmp_path, Script(saves(1), guard="atomic"))
    decision = [c for c in case.learn() if c.name == "write" and "/epochs/" in c.text]
    assert len(decision) == 2
    told, code = case.run(kill_at(decision[1]))
    assert (told, code) == ([], -signal.SIGKILL)
    with pytest.raises(AssertionError, match="corrupt|truncated"):
        case.judge(told)
