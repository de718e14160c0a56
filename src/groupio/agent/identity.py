"""The identity of a process: host, boot, pid and start time."""

from __future__ import annotations

import errno
import os
import re
import socket
from dataclasses import dataclass

_WILDCARDS = ("0.0.0.0", "[::]", "*")


@dataclass(frozen=True, slots=True)
class Writer:
    """One agent process, as in-flight records name it."""

    boot_id: str
    pid: int
    pid_start: int
    host: str
    pid_space: int = 0
    """The PID namespace, in which alone ``pid`` is its; 0 when it is not known."""

    @classmethod
    def of_this_process(cls) -> Writer:
        """The identity of the calling process."""
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot_id = file.read().strip()
        pid = os.getpid()
        return cls(boot_id, pid, process_start(pid), socket.gethostname(), _pid_space())


def _pid_space() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def process_start(pid: int) -> int:
    """When the process started, in clock ticks since boot; 0 when it cannot be seen.

    OSError when this process cannot open another file: that says nothing of the other one.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return 0


def node_name(configured: str | None = None) -> str:
    """This node's name, in the characters that segment names allow."""
    return re.sub(r"[^A-Za-z0-9_.]", "_", configured or socket.gethostname())[:64] or "node"


def reachable(host: str) -> str:
    """Where other nodes reach what listens at ``host``: a wildcard stands for this node."""
    return own_address() if host in _WILDCARDS else host


def own_address() -> str:
    """The address of the interface that leads to other machines; sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # of a range that nobody has (RFC 5737)
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostbyname(socket.gethostname())
