"""Each call to the system fails once: a typed error, no lie about the outcome, no leak."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from backend_writer import check, commit

from groupio.backend.base import EPOCHS, INFLIGHT, PREPARED, SEGMENTS
from groupio.backend.posix import PosixBackend
from groupio.errors import GroupIOError, Outcome
from groupio.model import PAGE_BYTES
from open_files import open_files

NAMES = (
    *("open", "close", "fsync", "pwrite", "pwritev", "pread", "preadv", "link", "rename", "unlink"),
    *("mkdir", "stat", "lstat", "fstat", "listdir", "scandir", "fstatvfs", "posix_fadvise"),
)


class Gate:
    """Counts the calls of ``NAMES`` and makes the ``number``-th fail with ``error``."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.count, self.number, self.error, self.failed = 0, 0, 0, ""
        for name in NAMES:
            patch.setattr(os, name, self.wrap(name, getattr(os, name)))

    def wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **rest: Any) -> Any:
            self.count += 1
            if self.count != self.number:
                return real(*args, **rest)
            self.failed = name
            if name == "close":
                real(*args)  # Linux frees the descriptor also when it reports an error
            raise OSError(self.error, os.strerror(self.error))

        return call

    def arm(self, number: int, error: int) -> None:
        self.count, self.number, self.error, self.failed = 0, number, error, ""


def life(path: Path, done: list[str]) -> None:
    """Create a store, commit an epoch, use every call once; ``done`` says how far it came."""
    with PosixBackend.open(path, create=True) as store:
        store.ensure_store_record("job")
        store.info()
        store.put(INFLIGHT, "x", b"running", durable=False)
        assert commit(store, 1)
        done.append("committed")
        store.check_identity()
        for folder in (EPOCHS, INFLIGHT, PREPARED, SEGMENTS):
            for name in store.list(folder):
                assert store.exists(folder, name)
                assert len(store.read(folder, name)) == store.size(folder, name)
        view = memoryview(bytearray(PAGE_BYTES))
        store.read_into(SEGMENTS, store.list(SEGMENTS)[0], 0, view)
        store.delete(INFLIGHT, "x")
        store.remove_temporary(0.0)


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EACCES])
def test_failure_of_each_call(error: int) -> None:
    # In memory, because each of some hundred lives flushes a few dozen times.
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        with pytest.MonkeyPatch.context() as patch:
            gate = Gate(patch)
            life(Path(folder) / "whole", [])
            total = gate.count
        assert total > 150
        problems = []
        for number in range(1, total + 1):
            problems += attempt(Path(folder) / f"store{number}", number, error)
        assert not problems, "\n".join(problems)


def attempt(store: Path, number: int, error: int) -> list[str]:
    """Live with one failing call, then go on without; what is wrong."""
    done: list[str] = []
    wrong: list[str] = []
    answer = None
    with pytest.MonkeyPatch.context() as patch:
        gate = Gate(patch)
        gate.arm(number, error)
        try:
            life(store, done)
        except Exception as raised:  # noqa: BLE001  judged below
            answer = raised
    if answer is not None and not isinstance(answer, GroupIOError):
        wrong.append("not a typed error")
    if leaked := open_files(str(store)):
        wrong.append(f"descriptors leak: {leaked}")
    left = check(store)
    said_no = isinstance(answer, GroupIOError) and answer.outcome == Outcome.NOT_COMMITTED
    if (done and left != {1}) or (said_no and not done and left):
        wrong.append(f"the store has {left}")
    with PosixBackend.open(store, create=True) as again:
        again.ensure_store_record("job")
        if not commit(again, 2) or check(store) != left | {2}:
            wrong.append("the next process cannot go on")
    return [f"call {number}, {gate.failed}: {text} ({answer!r})" for text in wrong]
