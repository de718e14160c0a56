"""Power cuts under a whole job on ext4 and xfs: what was acknowledged as durable is there."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cases import FIRST, judge
from forkserver import ForkServer
from loopdev import LoopDisk
from oracle import History, check
from store_calls import Call, kill_at, read_calls, trace_options
from stracing import attached
from whole_path import WORLD, Script, saves

pytestmark = pytest.mark.root

CUTS_AFTER_ACKS = 12
CUTS_AT_CALLS = 8
"""Cuts on each file system in the default run."""


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer() as made:
        yield made


def cut_after_each_ack(
    server: ForkServer, disk: LoopDisk, store: Path, script: Script
) -> list[tuple[History, Path]]:
    """Run a script; at once after each acknowledged epoch, copy the disk."""
    cuts: list[tuple[History, Path]] = []
    run = server.start(script, store, disk.folder / "runtime")
    run.go()
    while (line := run.next(30)) is not None:
        acked = [one for one in run.told if "acked" in one]
        if "acked" in line and len(acked) % WORLD == 0:
            image = disk.cut()
            history = History()
            history.add(script, run.told)
            cuts.append((history, image))
            run.go()
    assert server.status(run) == 0, run.told
    return cuts


def test_power_cut_right_after_the_ack(server: ForkServer, disk: LoopDisk) -> None:
    script = Script(saves(*range(1, CUTS_AFTER_ACKS + 1)), pause=True)
    with disk.mounted() as where:
        cuts = cut_after_each_ack(server, disk, where / "runs" / "store", script)
    assert len(cuts) == CUTS_AFTER_ACKS
    for number, (history, image) in enumerate(cuts, 1):
        with disk.after(image) as where:
            newest = check(where / "runs" / "store", history, powerless=True)
            assert newest == number


@pytest.mark.parametrize("guard", ["fsync", "dirsync"])
def test_a_missing_flush_is_noticed(server: ForkServer, disk: LoopDisk, guard: str) -> None:
    script = Script(saves(1, 2, 3), guard=guard, pause=True)
    with disk.mounted() as where:
        cuts = cut_after_each_ack(server, disk, where / "runs" / "store", script)
    lost = 0
    for history, image in cuts:
        with disk.after(image) as where:
            try:
                check(where / "runs" / "store", history, powerless=True)
            except Exception:  # noqa: BLE001  a torn store may fail in any way
                lost += 1
    assert lost > 0


def learn(server: ForkServer, disk: LoopDisk, where: Path) -> list[Call]:
    """The changing calls of a run in a directory of its own."""
    log = disk.folder / "strace.log"
    folder = where / "run"
    folder.mkdir()
    run = server.start(FIRST, folder / "store", disk.folder / "runtime")
    with attached(run.pid, log, trace_options()):
        run.go()
        run.finish()
    assert server.status(run) == 0
    folder.rename(where / "learnt")
    return [call for call in read_calls(log, folder) if call.changes]


def cut_at_call(server: ForkServer, disk: LoopDisk, where: Path, call: Call) -> None:
    """Kill a run at ``call`` and cut the power at once; judge what both left."""
    folder, runtime = where / "run", disk.folder / "runtime"
    folder.mkdir()
    os.sync()
    run = server.start(FIRST, folder / "store", runtime)
    with attached(run.pid, disk.folder / "strace.log", kill_at(call)):
        run.go()
        told = run.finish()
    image = disk.cut()
    assert server.status(run) == -signal.SIGKILL, call
    folder.rename(where / f"done{time.monotonic_ns()}")
    history = History()
    history.add(FIRST, told)
    with disk.after(image) as after:
        try:
            judge(server, after / "run" / "store", runtime, history, powerless=True)
        except AssertionError as error:
            error.add_note(f"cut at {call}, told {told}")
            raise


def test_power_cut_at_system_calls(server: ForkServer, disk: LoopDisk) -> None:
    with disk.mounted() as where:
        calls = learn(server, disk, where)
        step = len(calls) / CUTS_AT_CALLS
        for number in range(CUTS_AT_CALLS):
            cut_at_call(server, disk, where, calls[int((number + 0.5) * step)])


def test_what_a_killed_agent_decided_is_durable_before_the_next_acks_it(
    server: ForkServer, disk: LoopDisk
) -> None:
    """The decision had its name and was not flushed; the same content again is only compared."""
    script, runtime, log = Script(saves(2)), disk.folder / "runtime", disk.folder / "strace.log"
    with disk.mounted() as where:
        store = where / "store"
        server.play(Script(saves(1)), store, runtime)
        options = ["-e", "trace=fsync", "-P", str(store / "epochs")]
        # The first is that of recovery, the second that of the decision.
        options += ["-e", "inject=fsync:signal=SIGKILL:when=2"]
        run = server.start(script, store, runtime)
        with attached(run.pid, log, options):
            run.go()
            assert run.finish() == []
        assert server.status(run) == -signal.SIGKILL
        assert len(list((store / "epochs").iterdir())) == 2
        ((history, image),) = cut_after_each_ack(
            server, disk, store, Script(script.steps, pause=True)
        )
    history.add(Script(saves(1)), [])
    with disk.after(image) as where:
        assert check(where / "store", history, powerless=True) == 2


@pytest.mark.proof
@pytest.mark.timeout(7200)
def test_power_cut_at_every_changing_call(server: ForkServer, disk: LoopDisk) -> None:
    with disk.mounted() as where:
        calls = learn(server, disk, where)
        for call in calls:
            cut_at_call(server, disk, where, call)
            for left in where.glob("done*"):
                shutil.rmtree(left)
    print(f"{disk.kind}: {len(calls)} cuts at system calls")


@pytest.mark.proof
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("turn", range(20))
def test_power_cut_right_after_each_of_many_acks(
    server: ForkServer, disk: LoopDisk, turn: int
) -> None:
    test_power_cut_right_after_the_ack(server, disk)
    assert turn >= 0
