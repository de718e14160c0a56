"""Kill a program, or fail it, at any one of its system calls.

A first run under strace counts the calls after a marker; further runs repeat it and inject a
signal or an error at the n-th call of one kind. The program must do the same calls each time.
strace is attached while the program waits at the marker, so that what the interpreter does
before, which varies, neither counts nor is hit.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

COMMIT_CALLS = (
    *("openat", "pwrite64", "pwritev", "pwritev2", "fsync", "fdatasync", "close", "fcntl"),
    *("?link", "linkat", "?rename", "?renameat", "renameat2", "?unlink", "unlinkat"),
    *("?mkdir", "mkdirat", "ftruncate", "fallocate", "?newfstatat", "fstat"),
)
"""Every kind of call by which a save changes a disk, or learns of it."""

_LINE = re.compile(r"^(\d+ +)?(\w+)\((.*)$")


@dataclass(frozen=True, slots=True)
class Call:
    """One system call: the ``number``-th of its ``name`` in its thread after the marker."""

    name: str
    number: int
    text: str


def mark() -> None:
    """Begin the part of the program that is traced: tell the tracer, wait for its line."""
    print(json.dumps({"marked": os.getpid()}), flush=True)
    sys.stdin.readline()


def calls(
    command: Sequence[str], log: Path, names: Sequence[str] = COMMIT_CALLS, timeout_s: float = 60
) -> tuple[subprocess.CompletedProcess[str], list[Call]]:
    """Run ``command``; its result and the calls it made after the marker, in order.

    Descriptors show with their paths (``5</tmp/x>``).
    """
    done = _traced(command, log, ["-y", "-e", "trace=" + ",".join(names)], timeout_s)
    counts: dict[tuple[str, str], int] = {}
    found: list[Call] = []
    for line in log.read_text(errors="replace").splitlines():
        match = _LINE.match(line)
        if match is not None:
            thread, name, text = match.groups()
            counts[thread, name] = counts.get((thread, name), 0) + 1
            found.append(Call(name, counts[thread, name], text))
    return done, found


def inject(
    command: Sequence[str], log: Path, call: Call, action: str, timeout_s: float = 60
) -> subprocess.CompletedProcess[str]:
    """Run ``command`` with ``action`` at ``call``, such as "signal=SIGKILL" or "error=EIO"."""
    what = f"inject={call.name}:{action}:when={call.number}"
    return _traced(command, log, ["-e", f"trace={call.name}", "-e", what], timeout_s)


@contextmanager
def attached(pid: int, log: Path, options: Sequence[str]) -> Iterator[None]:
    """Trace the process ``pid`` and all its threads from now on, until it ends.

    The process has to end inside the block.
    """
    command = ["strace", "-f", "-p", str(pid), "-o", str(log), *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracer:
        assert tracer.stderr is not None
        said, line = "", " "
        while "attached" not in line:
            line = tracer.stderr.readline()
            said += line
            if not line:
                raise RuntimeError(f"strace cannot attach to process {pid}: {said}")
        yield
        tracer.wait(timeout=30)


def _traced(
    command: Sequence[str], log: Path, options: Sequence[str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        try:
            said = process.stdout.readline()
            if "marked" not in said:
                raise RuntimeError(f"{command} never reached the marker: {said}")
            with attached(json.loads(said)["marked"], log, options):
                # Lines for the marker and for every later pause.
                out, err = process.communicate("\n" * 1000, timeout=timeout_s)
        finally:
            process.kill()
    return subprocess.CompletedProcess(list(command), process.returncode, out, err)
