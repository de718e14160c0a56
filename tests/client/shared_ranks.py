"""Ranks of one host as real processes that read an epoch together; no torch, the test's parent
tells them each other's addresses."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from groupio.backend.posix import PosixBackend
from groupio.client import shared_read, shared_window
from groupio.client.chunk_reader import Wants
from groupio.client.shared_link import Address, Meeting
from groupio.client.shared_read import GroupedRead
from groupio.client.store_reader import StoreReader
from groupio.errors import GroupIOError, IntegrityError, StorageError
from groupio.model import ChunkTable

ENGINE = multiprocessing.get_context("forkserver")
ENGINE.set_forkserver_preload(["groupio.client.shared_read", "groupio.client.store_reader"])

FAR = 30.0
"""No test waits so long for anything, in seconds."""


NO_MEMORY = -1
"""As the size of the window: the system has none."""


@dataclass
class Role:
    """What one rank does. ``act`` happens at ``point``: "linked", "read:N" (the N-th read of the
    store), "copy:N" (the N-th chunk brought to its place), "done"; ``seconds`` goes with "late".

    ``act``: "kill", "fail" (a storage error), "break" (an error that is none of ours), "late",
    "damage" (the rank leaves the fill with IntegrityError before it fetched), "no map", "no thread"
    (from then on the system has none for this rank).
    """

    rows: Sequence[int]
    parts: bool = False
    """Takes chunks by ``copies`` instead of ``views``."""
    point: str = ""
    act: str = ""
    seconds: float = 0.0
    deadline_s: float = FAR
    fills: int = 1


@dataclass
class Outcome:
    """How it went for one rank; ``content`` says whether every wanted intact chunk came."""

    error: Any = None
    damaged: list[list[bytes]] = field(default_factory=list)
    content: bool = False
    bytes_read: int = 0
    bytes_forwarded: int = 0
    notes: list[str] = field(default_factory=list)
    ended_at: float = 0.0
    fds_left: list[str] = field(default_factory=list)
    threads_left: int = 0
    maps_left: int = 0
    reads: int = 0


def run(
    store: Path,
    roles: Sequence[Role],
    *,
    window_bytes: int | None = None,
    ranks: Sequence[int] | None = None,
) -> list[Outcome | None]:
    """Let the roles read the newest epoch; None for a rank that was killed."""
    numbers = list(ranks or range(len(roles)))
    pipes, processes = [], []
    for place, role in enumerate(roles):
        ours, theirs = ENGINE.Pipe()
        process = ENGINE.Process(
            target=_rank, args=(theirs, store, role, numbers, place, window_bytes), daemon=True
        )
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        addresses = [_hear(pipe) for pipe in pipes]
        for pipe in pipes:
            pipe.send(addresses[0])
        return [_hear(pipe) for pipe in pipes]
    finally:
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.close()
            process.kill()
            process.join(FAR)


def _hear(pipe: Connection) -> Any:
    if not pipe.poll(2 * FAR):
        raise AssertionError("a rank hangs")
    try:
        said = pipe.recv()
    except EOFError:
        return None
    if isinstance(said, str):
        raise AssertionError(said)
    return said


def _rank(
    pipe: Connection,
    store: Path,
    role: Role,
    numbers: list[int],
    place: int,
    window_bytes: int | None,
) -> None:
    try:
        if window_bytes == NO_MEMORY:
            shared_read.new_window = _no_window
        elif window_bytes is not None:
            shared_window.WINDOW_BYTES = window_bytes
        pipe.send(_play(pipe, store, role, numbers, place))
    except BaseException:
        pipe.send(traceback.format_exc())
        raise


def _no_window(size: int) -> int:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


def _play(pipe: Connection, store: Path, role: Role, numbers: list[int], place: int) -> Outcome:
    outcome = Outcome()
    with StoreReader.open(store) as reader:
        manifest = reader.resolve()
        table = manifest.chunks
        reader.backend.list("segments")  # opens the folder, which stays open
        before = _fds()
        meeting = Meeting()
        pipe.send(tuple(meeting.address))
        hub = Address(*pipe.recv())
        link = meeting.link(numbers, numbers[place], hub, FAR)
        meeting.close()
        point = _Point(role)
        point("linked")
        backend: Any = _Watched(reader.backend, point)
        with GroupedRead(link) as grouped:
            try:
                for _ in range(role.fills):
                    deadline = time.monotonic() + role.deadline_s
                    want = _Want(table, role, point)
                    with grouped.fill(manifest.header.epoch, deadline):
                        point("fill")
                        bad = grouped.fetch(
                            backend,
                            manifest.segments,
                            table,
                            want.wants,
                            deadline=deadline,
                            threads=4,
                            epoch=manifest.header.epoch,
                        )
                    outcome.damaged.append(bad)
                    outcome.content = want.came(set(bad))
                    point("done")
            except GroupIOError as error:
                outcome.error = error
            except ZeroDivisionError as error:
                outcome.error = repr(error)
            outcome.ended_at = time.monotonic()
            outcome.bytes_read = grouped.bytes_read
            outcome.bytes_forwarded = grouped.bytes_forwarded
            outcome.notes = grouped.notes
        outcome.reads = point.counts.get("read", 0)
        outcome.threads_left = _threads_left()
        outcome.fds_left = sorted(_fds() - before)
        outcome.maps_left = Path("/proc/self/maps").read_text().count("groupio-read")
    return outcome


def _threads_left() -> int:
    """After an error a thread may be at the end of a read."""
    end = time.monotonic() + FAR / 4
    while True:
        found = [t for t in threading.enumerate() if t.name.startswith("groupio")]
        if not found or time.monotonic() > end:
            return len(found)
        found[0].join(0.05)


def _fds() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except FileNotFoundError:
            pass  # the listing's own
    return found


class _Point:
    """Calls the act when its point is reached."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._lock = threading.Lock()
        self.counts: dict[str, int] = {}

    def __call__(self, name: str) -> None:
        with self._lock:
            self.counts[name] = self.counts.get(name, 0) + 1
            point = self._role.point
            if point not in (name, f"{name}:{self.counts[name]}"):
                return
        act = self._role.act
        if act == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif act == "fail":
            raise StorageError("the disk is on fire", path="x", errno=5)
        elif act == "damage":
            raise IntegrityError("a record is damaged", path="x")
        elif act == "break":
            raise ZeroDivisionError("a defect")
        elif act == "late":
            time.sleep(self._role.seconds)
        elif act == "no map":
            shared_window.map_shared = _no_map
        elif act == "no thread":
            threading.Thread.start = _no_thread  # type: ignore[method-assign]


def _no_map(*_: object) -> Any:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def _no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


class _Want:
    """Memory for the chunks that a rank wants."""

    def __init__(self, table: ChunkTable, role: Role, point: Callable[[str], None]) -> None:
        rows = np.array(role.rows, np.int64)
        lengths = table.lengths[rows]
        ends = np.cumsum(lengths)
        self._memory = bytearray(int(ends[-1]) if len(rows) else 0)
        view = memoryview(self._memory)
        self._digests = [table.digests[row].tobytes() for row in rows]
        self._pieces = [view[end - length : end] for end, length in zip(ends, lengths, strict=True)]
        nothing = np.zeros(0, np.int64)
        copies = [
            (int(row), self._copier(piece, point))
            for row, piece in zip(rows, self._pieces, strict=True)
        ]
        if role.parts or role.point.startswith("copy"):
            self.wants = Wants(nothing, nothing, nothing, [], copies)
        else:
            self.wants = Wants(rows, np.zeros(len(rows), np.int64), ends - lengths, [view])

    @staticmethod
    def _copier(piece: memoryview, point: Callable[[str], None]) -> Callable[[memoryview], None]:
        def copy(data: memoryview) -> None:
            point("copy")
            piece[:] = data

        return copy

    def came(self, damaged: set[bytes]) -> bool:
        """Whether all intact chunks are in their places."""
        return all(
            digest in damaged or blake3(piece).digest() == digest
            for digest, piece in zip(self._digests, self._pieces, strict=True)
        )


class _Watched:
    """A backend whose reads are counted and can be made to fail."""

    def __init__(self, inner: PosixBackend, point: Callable[[str], None]) -> None:
        self._inner = inner
        self._point = point

    @property
    def path(self) -> str:
        return self._inner.path

    def reader(self, folder: str, name: str) -> Any:
        return _WatchedFile(self._inner.reader(folder, name), self._point)


class _WatchedFile:
    def __init__(self, inner: Any, point: Callable[[str], None]) -> None:
        self._inner = inner
        self._point = point

    def read_into(self, offset: int, view: memoryview) -> None:
        self._point("read")
        self._inner.read_into(offset, view)

    def close(self) -> None:
        self._inner.close()
