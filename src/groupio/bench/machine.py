"""The conditions of a run: machine, file system and versions."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

from groupio.agent.memory import available
from groupio.backend.mounts import filesystem_type

PACKAGES = (
    *("groupio", "torch", "numpy", "orbax-checkpoint", "jax", "nvidia-resiliency-ext"),
    "torchsnapshot",
)


def conditions(folder: Path, command: str) -> dict[str, Any]:
    """What the figures depend on; sizes in bytes, the date in UTC."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        file_system = filesystem_type(fd)
    finally:
        os.close(fd)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "cpus": len(os.sched_getaffinity(0)),
        "cpu": _cpu_name(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_before": round(os.getloadavg()[0], 2),
        "file_system": file_system,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": versions(),
    }


def versions() -> dict[str, str]:
    """The versions of the packages that are measured, as far as they are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def room(folder: Path) -> tuple[int, int]:
    """Free bytes of the file system of ``folder`` and of the memory."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize, available()


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return platform.machine()
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if "model name" in line]
    return names[0] if names else platform.machine()
