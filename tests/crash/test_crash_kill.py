"""Kill -9 at every system call of a whole job's commit path, recovery and load."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from cases import Case, fork_servers, share
from forkserver import ForkServer
from store_calls import Call, kill_at
from whole_path import Script, saves

pytestmark = pytest.mark.root  # attaching strace needs it on hardened kernels

SAMPLE = {"first": 30, "resume": 16, "rewind": 10}
"""Points of each case in the default run; the proof takes all."""

TRIES = 3
"""Where threads take turns in another order than in the run that was learnt, names of temporary
files are others, and the process may not come to the call: so often it is run."""


@pytest.fixture(scope="module")
def servers() -> Iterator[list[ForkServer]]:
    with fork_servers() as made:
        yield made


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


def kill(case: Case, call: Call) -> None:
    for _ in range(TRIES):
        told, code = case.run(kill_at(call))
        if code != 0:
            break
    try:
        assert code == -signal.SIGKILL, f"was not killed: {code}"
        case.judge(told)
    except AssertionError as error:
        error.add_note(f"killed at {call}, told {told}")
        raise


@pytest.mark.parametrize("name", SAMPLE)
def test_kill_at_system_calls(servers: list[ForkServer], tmp_path: Path, name: str) -> None:
    share(servers, name, tmp_path, lambda calls: spread(calls, SAMPLE[name]), kill)


@pytest.mark.proof
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SAMPLE)
def test_kill_at_every_system_call(servers: list[ForkServer], tmp_path: Path, name: str) -> None:
    count = share(servers, name, tmp_path, lambda calls: calls, kill)
    print(f"{name}: killed at each of {count} calls")


def test_a_decision_that_is_not_atomic_is_noticed(
    servers: list[ForkServer], tmp_path: Path
) -> None:
    case = Case(servers[0], tmp_path, Script(saves(1), guard="atomic"))
    decision = [c for c in case.learn() if c.name == "write" and "/epochs/" in c.text]
    assert len(decision) == 2
    told, code = case.run(kill_at(decision[1]))
    assert (told, code) == ([], -signal.SIGKILL)
    with pytest.raises(AssertionError, match=r"corrupt|truncated"):
        case.judge(told)
