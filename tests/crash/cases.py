"""The lives of a job that the kill and error tests repeat, and how one repetition goes."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from forkserver import ForkServer
from oracle import History, check, check_at_rest
from store_calls import Call, kill_at, read_calls, trace_options
from stracing import attached
from whole_path import WORLD, Script, Step, saves

from groupio.agent.identity import Writer
from groupio.controller.store import JobStore
from groupio.format.records import segment_name
from groupio.model import DecisionKey
from groupio.protocol import effects as fx

WORKERS = 2
"""Runs at the same time: most of the time a run waits for strace or the disk."""

T = TypeVar("T")

FIRST = Script(
    (*saves(1, 2), Step(3, diverge=True), Step(3), Step(3), Step(4)),
    load=True,
)
"""A new store: plain epochs that refer to older ones, one that is aborted and then committed, one
saved again, and a load."""

RESUME = Script(saves(5), load=True)
"""A store whose last agent was killed: one epoch is prepared, one has only begun."""

REWIND = Script(saves(2), rewind_to=1)
"""A new line after epoch 1."""


@dataclass(slots=True)
class Case:
    """A script and the store that it finds; ``folder`` is the case's own."""

    server: ForkServer
    folder: Path
    script: Script
    lineage: int = 1
    history: History = field(default_factory=History)
    calls: list[Call] = field(default_factory=list)

    @property
    def disk(self) -> Path:
        """Where the store is; it is made anew for each run."""
        return self.folder / "disk"

    @property
    def store(self) -> Path:
        """The store, in a directory that its first save makes too."""
        return self.disk / "runs" / "store"

    @property
    def template(self) -> Path:
        """What the disk has at the beginning."""
        return self.folder / "template"

    def begin(self) -> None:
        """Put the disk into its first state."""
        shutil.rmtree(self.disk, ignore_errors=True)
        if self.template.exists():
            shutil.copytree(self.template, self.disk)
        else:
            self.disk.mkdir(parents=True)

    def run(self, options: Sequence[str], script: Script | None = None) -> tuple[Any, int]:
        """Run the script once under strace with ``options``: what it told, and its exit code."""
        self.begin()
        run = self.server.start(script or self.script, self.store, self.folder / "runtime")
        with attached(run.pid, self.folder / "strace.log", options):
            run.go()
            told = run.finish()
        return told, self.server.status(run)

    def learn(self) -> list[Call]:
        """The calls on the disk of a run in which nothing happens."""
        told, code = self.run(trace_options())
        assert code == 0, told
        self.calls = read_calls(self.folder / "strace.log", self.disk)
        return self.calls

    def judge(self, told: Any) -> None:
        """Check the store that a run left, then that the next save works."""
        history = copy.deepcopy(self.history)
        history.add(self.script, told, self.lineage)
        judge(self.server, self.store, self.folder / "runtime", history)


def judge(
    server: ForkServer, store: Path, runtime: Path, history: History, *, powerless: bool = False
) -> None:
    """Check a store after a fault, then that the next save works."""
    newest = check(store, history, powerless=powerless)
    following = Script(saves(newest + 1))
    told, code = server.play(following, store, runtime, "z")
    assert code == 0, told
    assert len([line for line in told if "acked" in line]) == len(told) == WORLD, told
    history.add(following, told, 1 + len(list((store / "lineages").glob("0*"))))
    assert check_at_rest(store, history)[1] == newest + 1


def leave_unfinished(case: Case) -> None:
    """Make the store whose last agent was killed: epoch 2 is prepared, epoch 3 has only begun."""
    case.script = Script(saves(1))
    told, code = case.run(trace_options())
    assert code == 0
    case.history.add(case.script, told)
    case.disk.rename(case.template)
    case.script = Script(saves(2))
    decision = [call for call in case.learn() if call.name == "linkat" and "/epochs>" in call.text]
    told, code = case.run(kill_at(decision[-1]))
    assert (told, code) == ([], -9)
    case.history.add(case.script, told)
    begin(case.store, 3)
    assert len(os.listdir(case.store / "prepared")) == 1
    assert len(os.listdir(case.store / "inflight")) == 2
    shutil.rmtree(case.template)
    case.disk.rename(case.template)


def begin(store: Path, epoch: int) -> None:
    """Leave behind what an agent has written of an epoch that it never prepared."""
    dead = Writer("no such boot", 1, 1, "elsewhere")
    job = JobStore(str(store), store.name, "vanished", dead)
    key = DecisionKey(1, epoch, 1)
    job.open((DecisionKey(1, 2, 1),))
    job.publish(fx.PublishInflight(0, key, 7, WORLD))
    segment = job.backend.create_segment(segment_name(key, "vanished", 0))
    segment.write_tail(0, b"the beginning of a segment")
    segment.sync_close(26)
    job.close()


def make(name: str, server: ForkServer, folder: Path) -> Case:
    """The case "first", "resume" or "rewind", with its calls learnt."""
    folder.mkdir()
    case = Case(server, folder, FIRST)
    if name == "resume":
        leave_unfinished(case)
        case.script = RESUME
    elif name == "rewind":
        case.script = Script(saves(1, 2, 3))
        told, code = case.run(trace_options())
        assert code == 0
        case.history.add(case.script, told)
        case.disk.rename(case.template)
        case.script, case.lineage = REWIND, 2
    case.learn()
    return case


@contextmanager
def fork_servers() -> Iterator[list[ForkServer]]:
    """One for each worker."""
    with ExitStack() as stack:
        yield [stack.enter_context(ForkServer()) for _ in range(WORKERS)]


def share(
    servers: Sequence[ForkServer],
    name: str,
    folder: Path,
    choose: Callable[[Sequence[Call]], Sequence[T]],
    act: Callable[[Case, T], None],
) -> int:
    """Do ``act`` for all that ``choose`` picks of a case's calls; how many that were.

    Each worker has a store of its own and takes its share; their runs make the same calls.
    """

    def work(number: int) -> int:
        case = make(name, servers[number], folder / str(number))
        chosen = choose(case.calls)
        for item in chosen[number :: len(servers)]:
            act(case, item)
        return len(chosen)

    with ThreadPoolExecutor(len(servers)) as pool:
        counts = set(pool.map(work, range(len(servers))))
    assert len(counts) == 1, f"the runs differ: {counts}"
    return counts.pop()
