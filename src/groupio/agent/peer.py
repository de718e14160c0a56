"""One connected client as the agent sees it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from groupio.agent.identity import process_start
from groupio.agent.memory import cgroup_of
from groupio.protocol.events import Process
from groupio.protocol.messages import Hello
from groupio.wire import Channel

if TYPE_CHECKING:
    from groupio.agent.job import Job


@dataclass(slots=True, eq=False)
class Peer:
    """A connection, the process behind it, and what it said of itself."""

    channel: Channel
    process: Process
    pidfd: int
    """Readable when the process has ended; -1 when the process cannot be seen from here."""
    hello: Hello | None = None
    job: Job | None = None
    notes: tuple[str, ...] = ()
    connected: bool = True
    process_gone: bool = False
    rewound: bool = False
    """A save of it is DURABLE, on the line that it may have asked for."""
    called_at: dict[int, float] = field(default_factory=dict)

    @property
    def client(self) -> str:
        """The client's id."""
        assert self.hello is not None
        return self.hello.client_id

    @classmethod
    def of(cls, channel: Channel) -> Peer:
        """The peer at the other end of ``channel``."""
        pid, _ = channel.peer()
        try:
            pidfd = os.pidfd_open(pid) if pid > 0 else -1
        except OSError:
            pidfd = -1
        return cls(channel, Process(pid, process_start(pid) if pid > 0 else 0), pidfd)


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
