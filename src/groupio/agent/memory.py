"""How much host memory the agent may use when nobody says."""

from __future__ import annotations

from pathlib import Path

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


def cgroup_room() -> int | None:
    """Bytes that this process's memory cgroups still allow; None when nothing limits them."""
    rooms: list[int] = []
    for line in cgroup_of("self").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            rooms += _rooms(_V2, path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            rooms += _rooms(_V1, path, "memory.limit_in_bytes", "memory.usage_in_bytes")
    return min(rooms, default=None)


def _rooms(root: Path, path: str, limit_name: str, usage_name: str) -> list[int]:
    """The room in a cgroup and in each of its ancestors that has a limit."""
    rooms = []
    folder = root / path.strip("/")
    while True:
        limit, usage = _number(folder / limit_name), _number(folder / usage_name)
        if limit is not None and usage is not None and limit < _UNLIMITED:
            rooms.append(max(0, limit - usage))
        if folder == root:
            return rooms
        folder = folder.parent


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def available() -> int:
    """Bytes of memory that the node and this process's cgroups have free."""
    free = 0
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    room = cgroup_room()
    return free if room is None else min(free, room)


def default_budget() -> int:
    """The staging budget in bytes: BUDGET_SHARE of what is free now."""
    return max(BUDGET_BYTES_MIN, int(available() * BUDGET_SHARE))
