"""Kill a process, or fail it, at any one of the system calls by which it touches a store.

A first run under strace lists the calls; further runs repeat it and inject a signal or an error at
one of them. The process must do the same to the store each time, whatever its threads do besides.
strace counts for each thread by itself, so a call is told by its name, a path that it names and
its number among the calls of its thread with that name and path.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CHANGES = frozenset(
    (
        *("pwrite64", "pwritev", "pwritev2", "write", "fsync", "fdatasync", "sync_file_range"),
        *("link", "linkat", "rename", "renameat", "renameat2", "unlink", "unlinkat", "rmdir"),
        *("mkdir", "mkdirat", "ftruncate", "fallocate", "fchmod", "fchmodat", "chmod"),
    )
)
"""Calls that change what is on the disk; ``openat`` does with O_CREAT."""

_LOOKS = (
    *("openat", "close", "fcntl", "newfstatat", "fstat", "statfs", "fstatfs", "getdents64"),
    *("pread64", "preadv", "preadv2", "read", "lseek", "fadvise64"),
)

STORE_CALLS = tuple(f"?{name}" for name in (*sorted(CHANGES), *_LOOKS))
"""All kinds of calls that a save, a recovery or a load makes on a store."""

_DATA_CALLS = (
    *("write", "pwrite64", "pwritev", "pwritev2"),
    *("read", "pread64", "preadv", "preadv2", "getdents64"),
)

_LINE = re.compile(r"^(\d+) +(\w+)\((.*)$")
_DESCRIPTOR = re.compile(r"\b(?:\d+|AT_FDCWD)<([^<>]*)>")
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')
_RESULT = re.compile(r"\) += .*$")


@dataclass(frozen=True, slots=True)
class Call:
    """One system call on the store.

    ``text`` is its line without the result. ``paths`` are the paths of its descriptors and then
    its path arguments, ``selector`` is the most special of them, ``number`` counts the calls of
    this name in this thread that have the selector; ``number_of_all`` counts those on the store.
    """

    thread: str
    name: str
    text: str
    paths: tuple[str, ...]
    selector: str
    number: int = 0
    number_of_all: int = 0

    @property
    def changes(self) -> bool:
        """The call changes the disk."""
        return self.name in CHANGES or "O_CREAT" in self.text

    def __str__(self) -> str:
        return f"{self.name}({self.text[:160]}"


def read_calls(log: Path, store: Path) -> list[Call]:
    """The calls in a log of ``strace -f -y`` that touch ``store``, in order."""
    found: list[Call] = []
    counts: dict[tuple[str, ...], int] = {}
    for line in log.read_text(errors="replace").splitlines():
        call = _parse(line, str(store))
        if call is not None:
            # Every call counts for each of its paths, as it does for strace.
            for path in dict.fromkeys(call.paths):
                key = call.thread, call.name, path
                counts[key] = counts.get(key, 0) + 1
            key = call.thread, call.name
            counts[key] = counts.get(key, 0) + 1
            number = counts[call.thread, call.name, call.selector]
            found.append(
                Call(
                    *(call.thread, call.name, call.text, call.paths, call.selector),
                    *(number, counts[key]),
                )
            )
    return found


def _parse(line: str, store: str) -> Call | None:
    match = _LINE.match(line)
    if match is None:
        return None
    thread, name, text = match.groups()
    text = _RESULT.sub("", text)
    # Of a read or write the data shows in quotes too; the descriptor alone tells the path.
    where = text.partition(",")[0] if name in _DATA_CALLS else text
    descriptors = _DESCRIPTOR.findall(where)
    arguments = [path for path in _QUOTED.findall(where) if path and path != "."]
    paths = [path for path in descriptors if _is_under(path, store)]
    if not paths and not any(_is_under(path, store) for path in arguments):
        return None
    paths += arguments
    return Call(thread, name, text, tuple(paths), arguments[0] if arguments else paths[0])


def _is_under(path: str, store: str) -> bool:
    return path == store or path.startswith(store + "/")


def trace_options() -> list[str]:
    """Options for :func:`stracing.attached` that log all calls on a store."""
    return ["-y", "-s", "256", "-e", "trace=" + ",".join(STORE_CALLS)]


def kill_at(call: Call) -> list[str]:
    """Options that kill the process when it enters ``call``."""
    return _inject(call, "signal=SIGKILL", str(call.number), [call.selector])


def fail_once(call: Call, error: str) -> list[str]:
    """Options that let ``call`` fail with ``error``."""
    return _inject(call, f"error={error}", str(call.number), [call.selector])


def fail_forever(call: Call, error: str, calls: Sequence[Call]) -> list[str]:
    """Options that let all calls of this kind on the store fail from ``call`` on.

    ``calls`` are all those of a whole run. Each thread begins to fail at the same number.
    """
    names = dict.fromkeys(path for one in calls if one.name == call.name for path in one.paths)
    return _inject(call, f"error={error}", f"{call.number_of_all}+", list(names))


def threads_hit(call: Call, calls: Sequence[Call]) -> int:
    """In how many threads :func:`fail_once` lets a call fail."""
    counts: dict[str, int] = {}
    for one in calls:
        if one.name == call.name and call.selector in one.paths:
            counts[one.thread] = counts.get(one.thread, 0) + 1
    return sum(count >= call.number for count in counts.values())


def _inject(call: Call, what: str, when: str, paths: Sequence[str]) -> list[str]:
    options = ["-e", f"trace={call.name}", "-e", f"inject={call.name}:{what}:when={when}"]
    return [*options, *(part for path in paths for part in ("-P", path))]
