"""The checks of ``groupio doctor``: one function a question, each with a finding and advice."""

from __future__ import annotations

import grp
import importlib.metadata
import os
import platform
import pwd
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from groupio.agent import process
from groupio.agent.memory import default_budget
from groupio.backend.base import BackendInfo
from groupio.backend.posix import PosixBackend
from groupio.cli.host import Host, open_file_limits
from groupio.cli.output import size
from groupio.errors import GroupIOError, NotFound
from groupio.settings import Settings

TORCH_OLDEST = (2, 6)
FILES_NEEDED = 256
"""groupio's own files and sockets stay below this, whatever the number of tensors."""

BUDGET_SMALL = 1 << 30

VOLATILE = {
    "tmpfs": "it is memory: DURABLE there survives neither power loss nor a restart",
    "ramfs": "it is memory: DURABLE there survives neither power loss nor a restart",
    "overlay": "it is a container's layer, which is removed with it: use a mounted volume",
}
"""File systems whose bytes go with something that a store should outlive, and what to know."""


class Verdict(StrEnum):
    """How a check came out; only FAIL makes the answer "no"."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """The answer to one question. ``advice`` says what to do, "" when there is nothing to do."""

    name: str
    verdict: Verdict
    finding: str
    advice: str = ""
    data: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """This check as JSON values."""
        return asdict(self)


def check_python() -> Check:
    """Linux and a Python that groupio is tested with."""
    version = platform.python_version()
    finding = f"Python {version} on {platform.system()} {platform.release()}"
    data = {"python": version, "system": platform.system(), "kernel": platform.release()}
    if sys.platform != "linux":
        return Check("python", Verdict.FAIL, finding, "groupio runs on Linux only", data)
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        return Check("python", Verdict.WARN, finding, "use Python 3.11, 3.12 or 3.13", data)
    return Check("python", Verdict.OK, finding, "", data)


def check_torch() -> Check:
    """Whether torch is there and new enough; it is not imported."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        advice = "pip install 'groupio[torch]' if you need groupio.torch"
        finding = "not installed; only groupio.torch and the demo need it"
        return Check("torch", Verdict.OK, finding, advice, {"version": None})
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    data = {"version": version}
    if numbers < TORCH_OLDEST:
        advice = f"groupio.torch needs torch {'.'.join(map(str, TORCH_OLDEST))} or newer"
        return Check("torch", Verdict.FAIL, version, advice, data)
    return Check("torch", Verdict.OK, version, "", data)


def check_memory(host: Host) -> Check:
    """How much memory this process may take, by the machine and by cgroups."""
    memory = host.memory()
    finding = f"{size(memory.available)} of {size(memory.total)} available"
    data: dict[str, Any] = {
        "total": memory.total,
        "available": memory.available,
        "usable": memory.usable,
        "limit": asdict(memory.limit) if memory.limit else None,
        "swap": host.swap_bytes(),
    }
    advice = ""
    if memory.limit is None:
        finding += "; no cgroup limit"
    else:
        finding += f"; cgroup limit {size(memory.limit.limit)} ({size(memory.limit.used)} used)"
        advice = f"the limit stands in {memory.limit.path}; staged checkpoints count against it"
    if host.swap_bytes():
        advice = (
            advice + "; " if advice else ""
        ) + "swap is on: a staged checkpoint may be swapped"
    return Check("memory", Verdict.OK, finding, advice, data)


def planned_budget() -> int:
    """The staging budget that an agent started now would take, in bytes."""
    return Settings.from_env().memory_bytes or default_budget()


def check_budget(budget: int, host: Host) -> Check:
    """Whether a staging budget of ``budget`` bytes can be had."""
    memory = host.memory()
    data = {"budget": budget, "usable": memory.usable}
    finding = f"{size(budget)} for staging"
    if budget > memory.usable:
        advice = (
            f"only {size(memory.usable)} can be had: lower GROUPIO_MEMORY_BYTES or free memory, "
            "else the kernel may kill the agent"
        )
        return Check("budget", Verdict.FAIL, finding, advice, data)
    if budget < BUDGET_SMALL:
        advice = (
            "a node's share of a checkpoint that is larger goes through in waves and blocks "
            "longer: raise GROUPIO_MEMORY_BYTES"
        )
        return Check("budget", Verdict.WARN, finding, advice, data)
    return Check("budget", Verdict.OK, finding, "", data)


def check_files() -> Check:
    """The limit of open files."""
    soft, hard = open_file_limits()
    finding, data = f"{soft} (hard limit {hard})", {"soft": soft, "hard": hard}
    if hard < FILES_NEEDED:
        advice = f"raise the hard limit to {FILES_NEEDED} or more (ulimit -Hn)"
        return Check("open files", Verdict.FAIL, finding, advice, data)
    return Check("open files", Verdict.OK, finding, "", data)


def check_runtime_dir(paths: process.RuntimePaths) -> Check:
    """Whether the agent's directory can be trusted, and whether an agent lives in it."""
    data: dict[str, Any] = {"path": str(paths.directory), "running": False}
    try:
        process.make_runtime_dir(paths)
        data["running"] = process.is_alive(paths)
    except GroupIOError as error:
        return Check("agent's place", Verdict.FAIL, error.message, "", data)
    living = "an agent runs" if data["running"] else "no agent runs"
    verdict = Verdict.WARN if paths.note else Verdict.OK
    return Check("agent's place", verdict, f"{paths.directory}, {living}", paths.note, data)


def check_shared_memory(host: Host) -> Check:
    """The size of /dev/shm, which groupio does not use."""
    path = str(host.root / "dev/shm")
    try:
        status = os.statvfs(path)
    except OSError:
        finding = "absent; groupio does not need it"
        return Check("/dev/shm", Verdict.OK, finding, "", {"size": None})
    total = status.f_frsize * status.f_blocks
    finding = f"{size(total)}; groupio stages in memory files of its own and does not use it"
    return Check("/dev/shm", Verdict.OK, finding, "", {"size": total})


def check_huge_pages(host: Host) -> Check:
    """The modes of transparent huge pages."""
    private, shared = host.thp()
    finding = f"private memory: {private}, shared memory: {shared}"
    advice = ""
    if shared == "never":
        advice = (
            "the first touch of staging memory is slower without them (later epochs reuse it): "
            "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled, if you administer "
            "the node"
        )
    data = {"private": private, "shared": shared}
    return Check("huge pages", Verdict.OK, finding, advice, data)


_SCOPE_ADVICE = {
    "slurm": (
        "Slurm ends the agent with the job step, so STAGED survives rank exit only: start it in a "
        "step of its own before training (srun --overlap --ntasks-per-node=1 groupio agent run "
        "--foreground &), or wait for DURABLE before the step ends"
    ),
    "container": (
        "the agent ends with this container, so STAGED survives rank exit only: keep the container "
        "alive until the last epoch is DURABLE (groupio agent drain waits for that), or run the "
        "agent in a container of its own that shares the runtime directory and PID namespace"
    ),
    "pid-namespace": (
        "when process 1 of this namespace ends, so does the agent: STAGED survives rank exit only; "
        "end with groupio agent drain"
    ),
    "login": (
        "systemd ends the agent at logout (KillUserProcesses=yes): loginctl enable-linger, and "
        "start it with systemd-run --user --scope groupio agent run"
    ),
    "service": (
        "an agent that a service starts ends with the service (KillMode=control-group): start it "
        "before, with systemd-run --user --scope groupio agent run"
    ),
}


def check_scope(host: Host) -> Check:
    """Whether an agent started from here would die with its launcher."""
    scope = host.scope()
    data = {"kind": scope.kind, "where": scope.where}
    harmless = scope.kind == "login" and not host.kills_login_processes()
    if scope.kind == "none" or harmless:
        return Check("agent's life", Verdict.OK, "the agent outlives its launcher", "", data)
    finding = f"the agent ends with its {scope.kind.replace('-', ' ')} ({scope.where})"
    return Check("agent's life", Verdict.WARN, finding, _SCOPE_ADVICE[scope.kind], data)


def check_store(store: str) -> Iterator[Check]:
    """What the store's disk really does, tried out with small files."""
    settings = Settings.from_env()
    try:
        backend = PosixBackend.open(store, create=False, file_mode=settings.file_mode)
    except NotFound:
        yield from _check_future_store(store)
        return
    try:
        try:
            record = backend.store_record()
            finding = f"job {record.job}, id {record.store_id}"
            data: dict[str, Any] = {"store_id": record.store_id, "job": record.job}
            yield Check("store", Verdict.OK, finding, "", data)
        except NotFound:
            finding = "a directory, not a store yet"
            yield Check("store", Verdict.OK, finding, "the first save makes it one")
        yield check_access(backend.path)
        yield from _check_disk(backend.info())
    finally:
        backend.close()


def check_access(path: str) -> Check:
    """Who can read a store, by the modes of its directories and of its newest files."""
    try:
        return _access(Path(path))
    except OSError as error:
        finding = f"it cannot be seen who can read: {error.filename}: {error.strerror}"
        return Check("access", Verdict.WARN, finding)


def _access(root: Path) -> Check:
    status = root.stat()
    needed = [(root, status)]
    for folder in ("epochs", "lineages", "segments"):
        if (root / folder).is_dir():
            needed.append((root / folder, (root / folder).lstat()))
            newest = max((root / folder).iterdir(), default=None)
            needed += [(newest, newest.lstat())] if newest is not None else []
    owner, group = _name_of(pwd.getpwuid, status.st_uid), _name_of(grp.getgrgid, status.st_gid)
    shut = {
        "group": [where for where, found in needed if not _lets(found, 3, status.st_gid)],
        "others": [where for where, found in needed if not _lets(found, 0, None)],
    }
    parents = [(parent, parent.stat()) for parent in root.resolve().parents]
    blocking = {
        "group": [p for p, found in parents if not _passes(found, status.st_gid)],
        "others": [p for p, found in parents if not _passes(found, None)],
    }
    reads = {who: not shut[who] and not blocking[who] for who in shut}
    finding = (
        f"owner {owner} reads; group {group} {'reads' if reads['group'] else 'cannot read'}; "
        f"others {'read' if reads['others'] else 'cannot read'}"
    )
    data = {"owner": owner, "group": group, "group_reads": reads["group"]} | {
        "others_read": reads["others"],
        "blocked_by": sorted({str(p) for where in blocking.values() for p in where}),
    }
    for who in ("group", "others"):
        if not shut[who] and blocking[who]:
            parent = blocking[who][0]
            advice = f"the store lets {who} read, and {parent} lets them not pass: chmod a+x it"
            return Check("access", Verdict.WARN, finding, advice, data)
    advice = "" if reads["group"] else f"{shut['group'][0]} is not for the group: see umask(1)"
    return Check("access", Verdict.OK, finding, advice if shut["group"] else "", data)


def _lets(status: os.stat_result, shift: int, group: int | None) -> bool:
    """Whether a class of users may read a file, or list and pass a directory."""
    needed = 0o5 if stat.S_ISDIR(status.st_mode) else 0o4
    mine = group is None or status.st_gid == group
    return status.st_mode >> (shift if mine else 0) & needed == needed


def _passes(status: os.stat_result, group: int | None) -> bool:
    return bool(status.st_mode & (0o010 if group == status.st_gid else 0o001))


def _name_of(look_up: Callable[[int], Any], number: int) -> str:
    try:
        return str(look_up(number)[0])
    except KeyError:
        return str(number)


def _check_future_store(store: str) -> Iterator[Check]:
    path = Path(store.removeprefix("file://")).absolute()
    parent = next(folder for folder in path.parents if folder.is_dir())
    finding = f"not there yet; the first save creates it in {parent}"
    yield Check("store", Verdict.OK, finding, "", {"store_id": None, "job": None})
    try:
        with tempfile.TemporaryDirectory(prefix=".groupio-doctor-", dir=parent) as probe:
            backend = PosixBackend.open(probe, create=False)
            try:
                yield from _check_disk(backend.info())
            finally:
                backend.close()
    except OSError as error:
        advice = f"make {parent} writable for this user, or choose another store"
        yield Check("disk", Verdict.FAIL, f"{parent}: {error.strerror}", advice)


def _check_disk(info: BackendInfo) -> Iterator[Check]:
    where = "on this node only" if info.node_local else "shared"
    place = f"{info.filesystem}, {where}"
    data: dict[str, Any] = asdict(info)
    if info.filesystem in VOLATILE:
        yield Check("file system", Verdict.WARN, place, VOLATILE[info.filesystem], data)
    elif info.node_local:
        advice = "an epoch there does not survive the loss of this node"
        yield Check("file system", Verdict.OK, place, advice, data)
    else:
        yield Check("file system", Verdict.OK, place, "", data)
    if not info.writable:
        advice = "loads work; to save, make it writable for this user"
        yield Check("writing", Verdict.WARN, "the store cannot be written", advice, data)
        return
    if info.io_mode == "direct":
        yield Check("writing", Verdict.OK, "O_DIRECT works", "", data)
    else:
        finding = f"buffered: {info.filesystem} refuses O_DIRECT"
        advice = "segments go through the page cache, which costs memory and some speed"
        yield Check("writing", Verdict.OK, finding, advice, data)
    yield Check("commit", Verdict.OK, f"create-if-absent by {info.commit_mode}", "", data)
    if info.free_bytes is not None:
        yield Check("free space", Verdict.OK, size(info.free_bytes), "", data)


def store_failed(error: GroupIOError) -> Check:
    """A store that cannot be opened at all."""
    return Check("store", Verdict.FAIL, error.message)
