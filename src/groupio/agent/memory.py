"""Default budget of staging memory."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from groupio.errors import InvalidInput

BUDGET_SHARE = 0.4
"""The share of the free memory that staging takes unless ``memory_bytes`` is set."""

BUDGET_BYTES_MIN = 64 << 20

_UNLIMITED = 1 << 60
_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")


def cgroup_of(pid: int | str) -> str:
    """The cgroup membership of a process as the kernel prints it; "" when it cannot be seen."""
    try:
        return Path(f"/proc/{pid}/cgroup").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


class _Limit(NamedTuple):
    """A memory cgroup's limit and use, in bytes."""

    limit: int
    used: int


def _limits() -> list[_Limit]:
    """Those of this process's memory cgroups."""
    found: list[_Limit] = []
    for line in cgroup_of("self").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found += _limits_in(_V2, path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            found += _limits_in(_V1, path, "memory.limit_in_bytes", "memory.usage_in_bytes")
    return found


def _limits_in(root: Path, path: str, limit_name: str, usage_name: str) -> list[_Limit]:
    """Those of a cgroup and of each of its ancestors."""
    found = []
    folder = root / path.strip("/")
    while True:
        limit, usage = _number(folder / limit_name), _number(folder / usage_name)
        if limit is not None and usage is not None and limit < _UNLIMITED:
            found.append(_Limit(limit, usage))
        if folder == root:
            return found
        folder = folder.parent


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def cgroup_room() -> int | None:
    """Bytes that this process's memory cgroups still allow; None when nothing limits them."""
    return min((max(0, one.limit - one.used) for one in _limits()), default=None)


def _meminfo(name: str) -> int:
    with open("/proc/meminfo", encoding="ascii") as file:
        return next((int(x.split()[1]) << 10 for x in file if x.startswith(f"{name}:")), 0)


def available() -> int:
    """Bytes of memory that the node and this process's cgroups have free."""
    free, room = _meminfo("MemAvailable"), cgroup_room()
    return free if room is None else min(free, room)


def check_budget(nbytes: int | None) -> None:
    """InvalidInput for a budget that this machine, or its cgroup, does not have in all.

    The kernel would kill the agent, and with it all that is staged, before the budget was used up.
    """
    total = min([_meminfo("MemTotal"), *(one.limit for one in _limits())])
    if nbytes is not None and nbytes > total:
        raise InvalidInput(
            f"memory_bytes (--memory, GROUPIO_MEMORY_BYTES) is {nbytes} bytes, and this machine or "
            f"its cgroup has {total}; give less, and leave room for the training"
        )


def default_budget() -> int:
    """The staging budget in bytes: BUDGET_SHARE of what is free now."""
    return max(BUDGET_BYTES_MIN, int(available() * BUDGET_SHARE))
