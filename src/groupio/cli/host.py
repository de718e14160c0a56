"""Limits of this machine: memory, processes, and who may end whom.

All paths are below ``Host.root``, so that tests can lay out a machine of their own.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 1 << 60
"""cgroup v1 writes "no limit" as a number near 2**63."""

_INITS = {"systemd", "init", "runit", "openrc-init", "s6-svscan", "dinit"}


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A cgroup that bounds this process's memory; sizes in bytes."""

    path: str
    limit: int
    used: int


@dataclass(frozen=True, slots=True)
class Memory:
    """The machine's memory and the tightest limit on this process; sizes in bytes."""

    total: int
    available: int
    limit: MemoryLimit | None

    @property
    def usable(self) -> int:
        """What this process and its group may still take."""
        if self.limit is None:
            return self.available
        return min(self.available, max(self.limit.limit - self.limit.used, 0))

    @property
    def bound(self) -> int:
        """The most that this process and its group may ever take."""
        return self.total if self.limit is None else min(self.total, self.limit.limit)


@dataclass(frozen=True, slots=True)
class Scope:
    """What ends together with this process's launcher.

    ``kind`` is "slurm", "container", "login", "service", "pid-namespace" or "none"; ``where``
    names it.
    """

    kind: str
    where: str


@dataclass(frozen=True, slots=True)
class Host:
    """A machine, looked at through its file system."""

    root: Path = Path("/")

    def read(self, path: str) -> str | None:
        """The text of a file of the machine, without the last line break; None if there is none."""
        try:
            return (self.root / path.lstrip("/")).read_text(errors="replace").rstrip("\n")
        except OSError:
            return None

    def memory(self) -> Memory:
        """Memory of the machine and the tightest cgroup limit, v1 or v2."""
        table = {}
        for line in (self.read("/proc/meminfo") or "").splitlines():
            name, _, value = line.partition(":")
            digits = value.split()
            if digits and digits[0].isdigit():
                table[name] = int(digits[0]) << 10
        total = table.get("MemTotal", 0)
        limits = [limit for limit in self._memory_limits() if limit.limit < total]
        tightest = min(limits, key=lambda limit: limit.limit, default=None)
        return Memory(total, table.get("MemAvailable", 0), tightest)

    def _memory_limits(self) -> list[MemoryLimit]:
        found = []
        for mount, path, maximum, current in self._memory_groups():
            # A container may see its own cgroup at the mount itself instead of below it.
            parts = [part for part in path.split("/") if part]
            for depth in range(len(parts) + 1):
                where = "/".join([mount, *parts[:depth]])
                limit = self.read(f"{where}/{maximum}")
                if limit is not None and limit.isdigit() and int(limit) < _UNLIMITED:
                    used = self.read(f"{where}/{current}") or "0"
                    found.append(MemoryLimit(where, int(limit), int(used)))
        return found

    def _memory_groups(self) -> list[tuple[str, str, str, str]]:
        groups = []
        for controllers, path in self.cgroups():
            if controllers == "":
                for mount in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"):
                    groups.append((mount, path, "memory.max", "memory.current"))
            elif "memory" in controllers.split(","):
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
                groups.append(("/sys/fs/cgroup/memory", path, *names))
        return groups

    def cgroups(self) -> list[tuple[str, str]]:
        """(controllers, path) of this process's cgroups; controllers is "" for v2."""
        found = []
        for line in (self.read("/proc/self/cgroup") or "").splitlines():
            fields = line.split(":", 2)
            if len(fields) == 3:
                found.append((fields[1], fields[2]))
        return found

    def swap_bytes(self) -> int:
        """Swap space of the machine, in bytes."""
        for line in (self.read("/proc/meminfo") or "").splitlines():
            if line.startswith("SwapTotal:"):
                return int(line.split()[1]) << 10
        return 0

    def scope(self) -> Scope:
        """The tightest thing that takes all its processes along when it ends."""
        paths = [path for _, path in self.cgroups()]
        for path in paths:
            if "/slurm" in path or "slurmstepd" in path:
                return Scope("slurm", path)
        for path in paths:
            if any(mark in path for mark in ("kubepods", "docker", "libpod", "containerd", "lxc")):
                return Scope("container", path)
        first = self.read("/proc/1/comm") or ""
        status = self.read("/proc/self/status") or ""
        nested = any(len(s.split()) > 2 for s in status.splitlines() if s.startswith("NSpid:"))
        if nested or (first and first not in _INITS):
            return Scope("pid-namespace", f"process 1 is {first or 'unknown'}")
        for path in paths:
            if ".scope" in path and "session-" in path:
                return Scope("login", path)
        for path in paths:
            if path.endswith((".service", ".scope")):
                return Scope("service", path)
        return Scope("none", "")

    def kills_login_processes(self) -> bool:
        """Whether systemd ends what a user left running when the user logs out."""
        text = self.read("/etc/systemd/logind.conf") or ""
        values = [line.partition("=")[2] for line in text.splitlines() if _is_kill_setting(line)]
        return bool(values) and values[-1].strip().lower() in {"yes", "true", "1", "on"}

    def thp(self) -> tuple[str, str]:
        """The chosen modes of transparent huge pages for private memory and for shared memory."""
        folder = "/sys/kernel/mm/transparent_hugepage"
        return _chosen(self.read(f"{folder}/enabled")), _chosen(
            self.read(f"{folder}/shmem_enabled")
        )


def _is_kill_setting(line: str) -> bool:
    return line.partition("=")[0].strip() == "KillUserProcesses"


def _chosen(text: str | None) -> str:
    if text is None or "[" not in text:
        return "unknown"
    return text.partition("[")[2].partition("]")[0]


def open_file_limits() -> tuple[int, int]:
    """The soft and the hard limit of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft, hard
