"""Who writes to a store: enough for a later agent to tell whether the writer still lives."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Writer:
    """One agent process, as in-flight records name it."""

    boot_id: str
    pid: int
    pid_start: int
    host: str

    @classmethod
    def of_this_process(cls) -> Writer:
        """The identity of the calling process."""
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot_id = file.read().strip()
        return cls(boot_id, os.getpid(), process_start(os.getpid()), socket.gethostname())


def process_start(pid: int) -> int:
    """When the process started, in clock ticks since boot; 0 when it cannot be seen."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0


def node_name() -> str:
    """This node's name, in the characters that segment names allow."""
    return re.sub(r"[^A-Za-z0-9_.]", "_", socket.gethostname())[:64] or "node"
