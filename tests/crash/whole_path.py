"""A whole job in one process: two members, their agent, and the store that a test may break.

The code is the real one: clients that talk to the driver over its socket, machines, hash and
writer threads, recovery. Only what makes a run repeatable is changed: one thread of each kind,
names that count up instead of random ones, and limits small enough to matter (a segment is full
after one large chunk, a write takes one batch). :func:`perform` runs a script; ``forkserver.py``
runs scripts in processes of their own.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import os
import secrets
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import groupio
from groupio.agent import driver as driver_module
from groupio.agent import process, segment_writer
from groupio.agent.workers import WorkerPool
from groupio.backend.posix import PosixBackend
from groupio.errors import GroupIOError, to_wire
from groupio.model import DecisionKey
from groupio.protocol import group
from groupio.settings import Settings

WORLD = 2

PATIENCE_S = 10.0
"""Nothing that a script does takes so long; a wait that does is a hang."""

Say = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Step:
    """Both members save ``epoch`` and wait until it is decided.

    ``content`` picks the bytes (by default the epoch's number does). With ``diverge`` the items
    declared as replicas differ, so that the group has to be aborted.
    """

    epoch: int
    content: int = -1
    diverge: bool = False

    @property
    def number(self) -> int:
        """The number of the content."""
        return self.epoch if self.content < 0 else self.content


@dataclass(frozen=True, slots=True)
class Script:
    """What the members of one life of the job do; ``rewind_to`` as in ``connect``."""

    steps: tuple[Step, ...]
    rewind_to: int | None = None
    guard: str = ""
    """A guard of the commit path that is taken away, to prove that the tests would notice."""
    pause: bool = False
    """Wait for a line on the control channel after each acknowledged epoch."""
    load: bool = False
    """At the end each member loads the newest epoch."""

    def contents(self) -> dict[int, set[int]]:
        """Which contents each epoch may have when it is committed."""
        found: dict[int, set[int]] = {}
        for step in self.steps:
            if not step.diverge:
                found.setdefault(step.epoch, set()).add(step.number)
        return found

    def plain(self) -> dict[str, Any]:
        """The script as plain values."""
        return asdict(self)

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Script:
        """The script that :meth:`plain` described."""
        steps = tuple(Step(**step) for step in plain.pop("steps"))
        return cls(steps, **plain)


def saves(*epochs: int) -> tuple[Step, ...]:
    """A plain save of each epoch."""
    return tuple(Step(epoch) for epoch in epochs)


def items_of(step: Step, rank: int) -> dict[str, Any]:
    """What one member saves in a step."""
    return content_of(step.number, rank, shift=rank if step.diverge else 0)


def content_of(content: int, rank: int, *, shift: int = 0) -> dict[str, Any]:
    """The items of one member: some change with the content, some never, some are shared."""
    return {
        "frozen": _noise(0, rank, (1 << 20) + 5),
        "weights": _noise(content, rank, (1 << 20) + 4096),
        "shared": _noise(content, 1000 + shift, 70_001),
        "small": _noise(content, rank, 1003),
        "step": content,
    }


@functools.lru_cache(maxsize=256)
def _noise(content: int, rank: int, size: int) -> Any:
    return np.frombuffer(np.random.default_rng([content, rank]).bytes(size), np.uint8)


@contextmanager
def agent(runtime: Path) -> Iterator[None]:
    """An agent in a thread of this process, for clients with this runtime directory."""
    paths = process.runtime_paths(str(runtime), groupio.__version__)
    process.make_runtime_dir(paths)
    residence = process.Residence.take(paths)
    driver = driver_module.Driver(Settings(memory_bytes=64 << 20), residence)
    ready = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(driver.run(ready.set)), daemon=True)
    thread.start()
    assert ready.wait(PATIENCE_S)
    try:
        yield
    finally:
        driver.post(driver.quit)
        thread.join(PATIENCE_S)
        residence.close()


@contextmanager
def members(store: Path, runtime: Path, rewind_to: int | None = None) -> Iterator[list[Any]]:
    """The connected clients of a job in this process."""
    settings = Settings(runtime_dir=str(runtime), close_timeout_s=0.0, read_threads=1)
    clients = [
        groupio.connect(store, rank=rank, world_size=WORLD, rewind_to=rewind_to, settings=settings)
        for rank in range(WORLD)
    ]
    try:
        yield clients
    finally:
        for client in clients:
            client.close()


def save(client: Any, step: Step, say: Say) -> bool:
    """One member's part of a step, told as it goes; True when it became durable."""
    told = {"epoch": step.epoch, "rank": client.rank}
    handle = client.save(
        items_of(step, client.rank),
        epoch=step.epoch,
        deadline_s=PATIENCE_S,
        replicated=("shared",),
        metadata={"content": step.number},
    )
    try:
        handle.wait("durable", PATIENCE_S)
    except GroupIOError as error:
        say({"failed": to_wire(error), **told})
        return False
    say({"acked": "durable", **told})
    return True


def load(client: Any, say: Say) -> None:
    """Load the newest epoch and tell what came: "loaded", "wrong", or a typed error."""
    told = {"rank": client.rank}
    try:
        got = client.load(deadline_s=PATIENCE_S)
    except GroupIOError as error:
        say({"load_failed": to_wire(error), **told})
        return
    wanted = content_of(int(got["step"]), client.rank)
    whole = all(np.array_equal(got.get(name), wanted[name]) for name in wanted)
    say({"loaded" if whole and len(got) == len(wanted) else "wrong": got["step"], **told})


def perform(
    script: Script, store: Path, runtime: Path, say: Say, go_on: Callable[[], None]
) -> None:
    """Run a script with an agent of its own; ``say`` gets what the members are told.

    ``go_on`` returns when the script may continue after an acknowledged epoch.
    """
    with (
        agent(runtime),
        members(store, runtime, script.rewind_to) as clients,
        ThreadPoolExecutor(WORLD, "member") as pool,
    ):
        for step in script.steps:
            saving = [pool.submit(save, client, step, say) for client in clients]
            done = [future.result() for future in saving]
            if script.pause and all(done):
                go_on()
        for client in clients if script.load else ():
            load(client, say)


# -- what makes a run repeatable, or worse than it is ---------------------------------------------


def make_repeatable(tag: str) -> None:
    """Change this process for the rest of its life; ``tag`` keeps its names apart from others'."""
    numbers = itertools.count(1)

    def token_hex(nbytes: int = 32) -> str:
        return f"{tag}{next(numbers):0{2 * nbytes - len(tag)}x}"

    secrets.token_hex = token_hex
    driver_module.WorkerPool = functools.partial(WorkerPool, hash_threads=1, write_threads=1)
    segment_writer.SEGMENT_BYTES = 1 << 20
    segment_writer.WRITE_BYTES = 1
    group.DECIDE_BACKOFF_S = 0.002


def remove_guard(guard: str) -> None:
    """Take a guard of the commit path away from this process.

    "fsync" and "dirsync" leave out the flush of files and of directories; "atomic" lets the
    decision appear piece by piece instead of by one link.
    """
    real = os.fsync

    def fsync(fd: int) -> None:
        is_directory = stat.S_ISDIR(os.fstat(fd).st_mode)
        if is_directory if guard == "fsync" else not is_directory:
            real(fd)

    def commit_prepared(backend: Any, key: DecisionKey) -> bool:
        data = backend.read("prepared", str(key))
        with open(os.path.join(backend.path, "epochs", str(key)), "wb", buffering=0) as file:
            file.write(data[:100])
            file.write(data[100:])
        return True

    if guard in ("fsync", "dirsync"):
        os.fsync = fsync
    elif guard == "atomic":
        PosixBackend.commit_prepared = commit_prepared
    elif guard:
        raise ValueError(guard)


class Crier(logging.Handler):
    """Tells of defects that the agent logged."""

    def __init__(self, say: Say) -> None:
        super().__init__(logging.CRITICAL)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        """Tell."""
        self._say({"defect": f"{record.getMessage()} {record.exc_info}"})


def quiet(say: Say) -> None:
    """Send the log nowhere, but tell of defects."""
    root = logging.getLogger("groupio")
    root.handlers = [logging.NullHandler(), Crier(say)]
    root.propagate = False
