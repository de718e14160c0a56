"""Errors of the disk at every system call, once and from then on: typed, bounded, nothing lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from cases import Case, fork_servers, share
from forkserver import ForkServer
from store_calls import Call, fail_forever, fail_once, threads_hit
from whole_path import WORLD

pytestmark = pytest.mark.root  # attaching strace needs it on hardened kernels

SAMPLE = {"first": 36, "resume": 20}
"""Injections of each case in the default run; the proof makes all."""

FULL = ("ENOSPC", "EDQUOT")

INTERRUPTED = ("openat", "pwrite64", "pwritev2", "fsync", "pread64", "fcntl", "fstatfs")
"""Calls of a store that a signal may interrupt."""

PERSISTENT = ("openat", "newfstatat", "getdents64", "pread64")
"""Calls that only look, and may go on failing."""

IN_VAIN = ("WaitTimeout", "AgentLost", "GroupTimeout")
"""Errors that would mean that somebody waited in vain."""

Injection = tuple[Call, str, bool]
"""The call, the error, and whether later calls fail too."""


@pytest.fixture(scope="module")
def servers() -> Iterator[list[ForkServer]]:
    with fork_servers() as made:
        yield made


def all_injections(calls: Sequence[Call]) -> list[Injection]:
    found: list[Injection] = []
    for call in calls:
        found.append((call, "EIO", False))
        if call.changes or call.name in PERSISTENT:
            found.append((call, "EIO", True))
        if call.changes and not call.name.startswith("unlink"):
            found += [(call, "ENOSPC", False), (call, "ENOSPC", True), (call, "EDQUOT", False)]
        if call.name in INTERRUPTED:
            found.append((call, "EINTR", False))
    return found


def spread(injections: Sequence[Injection], count: int) -> list[Injection]:
    """``count`` of them, evenly; calls that change the disk are worth three that only look."""
    weights = [3 if call.changes else 1 for call, _, _ in injections]
    step, total, chosen = sum(weights) / count, 0.0, []
    for injection, weight in zip(injections, weights, strict=True):
        if int((total + weight) / step) > int(total / step):
            chosen.append(injection)
        total += weight
    return chosen


def fail(case: Case, injection: Injection) -> None:
    call, error, forever = injection
    options = fail_forever(call, error, case.calls) if forever else fail_once(call, error)
    told, code = case.run(options)
    try:
        assert code == 0, f"the process ended with {code}"
        check_told(told, error)
        if not forever:
            check_goes_on(case, told, threads_hit(call, case.calls))
        case.judge(told)
    except AssertionError as failure:
        failure.add_note(f"{error} {'forever' if forever else 'once'} at {call}, told {told}")
        raise


def check_told(told: Sequence[dict[str, Any]], error: str) -> None:
    """Each save and load ended as it may."""
    for line in told:
        assert "defect" not in line
        assert "wrong" not in line
        failed = line.get("failed") or line.get("load_failed")
        if failed is None:
            continue
        assert failed["kind"] not in IN_VAIN, failed
        if failed["kind"] == "StorageFull":
            assert error in FULL
            assert failed["fields"]["path"]


def check_goes_on(case: Case, told: Sequence[dict[str, Any]], errors: int) -> None:
    """Each error costs one save at most; those after it come through."""
    failed = []
    for number, step in enumerate(case.script.steps):
        of_step = told[number * WORLD : (number + 1) * WORLD]
        assert {line["epoch"] for line in of_step} == {step.epoch}
        if not step.diverge and any("failed" in line for line in of_step):
            failed.append(step)
    assert len(failed) <= errors, failed


@pytest.mark.parametrize("name", SAMPLE)
def test_errors_at_system_calls(servers: list[ForkServer], tmp_path: Path, name: str) -> None:
    def choose(calls: Sequence[Call]) -> list[Injection]:
        return spread(all_injections(calls), SAMPLE[name])

    share(servers, name, tmp_path, choose, fail)


def test_an_unreadable_store_record_does_not_end_the_agent(
    servers: list[ForkServer], tmp_path: Path
) -> None:
    def choose(calls: Sequence[Call]) -> list[Injection]:
        reads = [c for c in calls if c.name == "pread64" and c.selector.endswith("groupio.json")]
        return [(call, "EIO", True) for call in reads]

    assert share(servers, "first", tmp_path, choose, fail) > 4


@pytest.mark.proof
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", ["first", "resume", "rewind"])
def test_errors_at_every_system_call(servers: list[ForkServer], tmp_path: Path, name: str) -> None:
    count = share(servers, name, tmp_path, all_injections, fail)
    print(f"{name}: {count} errors injected")
