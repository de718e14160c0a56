"""Kill a program, or fail it, at any one of its system calls.

A first run under strace counts the calls after a marker; further runs repeat it and inject a
signal or an error at the n-th call of one kind. At the marker the program forks: strace counts
for each process, so what the interpreter does before, which varies, does not shift the numbers.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MARKER = "/groupio-marker"
"""The program calls ``mark()`` where the part of interest begins."""

COMMIT_CALLS = (
    *("openat", "pwrite64", "pwritev", "pwritev2", "fsync", "fdatasync", "close", "fcntl"),
    *("?link", "linkat", "?rename", "?renameat", "renameat2", "?unlink", "unlinkat"),
    *("?mkdir", "mkdirat", "ftruncate", "fallocate", "?newfstatat", "fstat"),
)
"""Every kind of call by which a save changes a disk, or learns of it."""

_LINE = re.compile(r"^(\d+)\s+(\w+)\((.*)$")


@dataclass(frozen=True, slots=True)
class Call:
    """One system call of a run: the ``number``-th of its ``name`` after the marker."""

    name: str
    number: int
    text: str


def mark() -> None:
    """Begin the part of the program that :func:`calls` returns: it goes on in a child.

    The parent waits and ends as the child does (128 + the number of a signal that killed it).
    """
    child = os.fork()
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os._exit(code if code >= 0 else 128 - code)
    os.access(MARKER, os.F_OK)


def calls(
    command: Sequence[str], log: Path, names: Sequence[str] = COMMIT_CALLS, timeout_s: float = 60
) -> tuple[subprocess.CompletedProcess[str], list[Call]]:
    """Run ``command``; its result and the calls it made after the marker, in order.

    Descriptors show with their paths (``5</tmp/x>``).
    """
    done = _strace(command, log, ["-y", "-e", "trace=" + ",".join((*names, *_MARKS))], timeout_s)
    counts: dict[str, int] = {}
    found: list[Call] = []
    marked = ""
    for line in log.read_text(errors="replace").splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        process, name, text = match.groups()
        if MARKER in text:
            marked = process
        elif marked == process:
            counts[name] = counts.get(name, 0) + 1
            found.append(Call(name, counts[name], text))
    if not marked:
        raise RuntimeError(f"{command} never reached the marker:\n{done.stdout}{done.stderr}")
    return done, found


def inject(
    command: Sequence[str], log: Path, call: Call, action: str, timeout_s: float = 60
) -> subprocess.CompletedProcess[str]:
    """Run ``command`` with ``action`` at ``call``, such as "signal=SIGKILL" or "error=EIO"."""
    what = f"inject={call.name}:{action}:when={call.number}"
    return _strace(command, log, ["-e", f"trace={call.name}", "-e", what], timeout_s)


_MARKS = ("?access", "faccessat", "?faccessat2")


def _strace(
    command: Sequence[str], log: Path, options: Sequence[str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["strace", "-f", "--seccomp-bpf", "-qq", "-o", str(log), *options, "--", *command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
