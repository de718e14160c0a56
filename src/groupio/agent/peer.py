"""One connected client as the agent sees it."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from groupio.agent.identity import process_start
from groupio.agent.memory import cgroup_of
from groupio.protocol.events import Process
from groupio.protocol.messages import Hello
from groupio.wire import Channel

if TYPE_CHECKING:
    from groupio.agent.job import Job


_UNKNOWN = Process(0, 0)


@dataclass(slots=True, eq=False)
class Peer:
    """A connection, the process behind it, and what it said of itself."""

    channel: Channel
    pid: int
    """0 when the process cannot be seen from here."""
    process: Process = _UNKNOWN
    """Known from its Hello on."""
    unseen: bool = False
    """Its process cannot be watched from here: the end of its socket has to do."""
    hello: Hello | None = None
    job: Job | None = None
    notes: tuple[str, ...] = ()
    connected: bool = True
    unreachable: bool = False
    """Nothing can be sent to it any more: its connection is about to be closed."""
    process_gone: bool = False
    fenced: bool = False
    """It writes to no memory of this agent any more."""
    closed: bool = False
    """It said goodbye."""
    broke_off: bool = False
    """Its connection ended without that, and its process lives on."""
    opened: bool = False
    """It opened a save."""
    seated: bool = False
    """A save of it was STAGED at least: its controller knows it as the member of its rank."""
    rewound: bool = False
    """A save of it is DURABLE, on the line that it may have asked for."""
    called_at: dict[int, float] = field(default_factory=dict)

    def __str__(self) -> str:
        hello = self.hello
        if hello is None:
            return f"process {self.pid}, which has not said who it is,"
        return f"rank {hello.rank} of {hello.store} (process {self.pid})"

    @property
    def client(self) -> str:
        """The client's id."""
        assert self.hello is not None
        return self.hello.client_id

    @property
    def place(self) -> tuple[object, ...]:
        """Clients of one process with equal places follow each other as one member of a job."""
        hello = self.hello
        assert hello is not None
        return id(self.job), hello.job, hello.rank, hello.world_size, hello.launch_id


@dataclass(slots=True)
class _Watch:
    """``peers`` are those that wait for the end of the process, in the order of their Hellos."""

    pidfd: int
    peers: list[Peer] = field(default_factory=list)


class Watches:
    """The processes behind clients: one pidfd each, however often they connect. For the loop."""

    def __init__(self, ended: Callable[[list[Peer]], None]) -> None:
        """``ended`` is called with the clients of a process that has ended."""
        self._ended = ended
        self._watches: dict[Process, _Watch] = {}

    def add(self, peer: Peer) -> None:
        """Learn whose connection this is, and notice the end of that process from now on.

        OSError when no descriptor can be had for that.
        """
        pid = peer.pid
        peer.process = Process(pid, process_start(pid) if pid > 0 else 0)
        watch = self._watches.get(peer.process)
        if watch is None:
            pidfd = _pidfd(pid)
            if pidfd < 0:
                peer.unseen = True
                return
            try:
                asyncio.get_running_loop().add_reader(pidfd, self._readable, peer.process)
            except OSError:
                os.close(pidfd)
                raise
            watch = self._watches[peer.process] = _Watch(pidfd)
        watch.peers.append(peer)

    def _readable(self, process: Process) -> None:
        self._ended(list(self._watches[process].peers))

    def remove(self, peer: Peer) -> None:
        """The end of its process does not matter any more to this client."""
        watch = self._watches.get(peer.process)
        if watch is None or peer not in watch.peers:
            return
        watch.peers.remove(peer)
        if not watch.peers:
            del self._watches[peer.process]
            asyncio.get_running_loop().remove_reader(watch.pidfd)
            os.close(watch.pidfd)

    def before(self, peer: Peer) -> list[Peer]:
        """Clients of the same process and place that were there before this one and are not now."""
        watch = self._watches.get(peer.process)
        if watch is None or peer not in watch.peers:
            return []
        older = watch.peers[: watch.peers.index(peer)]
        return [p for p in older if p.fenced and not p.connected and p.place == peer.place]

    def of_job(self, job: Job) -> list[Peer]:
        """The clients of a job whose processes are watched."""
        return [p for watch in self._watches.values() for p in watch.peers if p.job is job]

    def close(self) -> None:
        """Watch no process any more."""
        for watch in list(self._watches.values()):
            for peer in list(watch.peers):
                self.remove(peer)


def _pidfd(pid: int) -> int:
    """A descriptor that becomes readable when the process ends; -1 when it cannot be seen."""
    if pid <= 0:
        return -1
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        # Without a descriptor its memory would be used again while it may still write there.
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise
        return -1


def staged_notes(pid: int) -> tuple[str, ...]:
    """What STAGED survives with this rank, where it is less than usual."""
    if pid <= 0:
        return ("staged: survives rank exit only (the rank is in another PID namespace)",)
    if _namespace(pid) != _namespace(os.getpid()) or _is_init_child():
        return ("staged: survives rank exit only (the agent shares the rank's PID namespace)",)
    ours, theirs = cgroup_of("self"), cgroup_of(pid)
    inside = any(line.split(":", 2)[2] not in ("/", "") for line in ours.splitlines())
    if ours and ours == theirs and inside:
        return ("staged: survives rank exit only (the agent shares the rank's cgroup)",)
    return ()


def _namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""


def _is_init_child() -> bool:
    """In a container whose first process is a launcher, its end ends the agent too."""
    try:
        with open("/proc/1/comm", encoding="ascii", errors="replace") as file:
            return file.read().strip().startswith(("python", "torchrun"))
    except OSError:
        return False
