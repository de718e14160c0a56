"""Limits that a process runs into: their names, and going on with less."""

from __future__ import annotations

import errno
import os
import threading
from typing import Any

import pytest

from groupio import exhaustion
from groupio.agent import workers
from groupio.agent.workers import BouncePool
from groupio.backend.faults import storage_error
from groupio.errors import GroupAborted, StagingFull, StorageError
from groupio.exhaustion import ThreadPool, exhausted, is_exhaustion, start_some

NO_THREAD = RuntimeError("can't start new thread")


@pytest.fixture
def threads_left(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many threads can still be started."""
    left = [1]
    real = threading.Thread.start

    def start(self: threading.Thread) -> None:
        if not left[0]:
            raise NO_THREAD
        left[0] -= 1
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    return left


@pytest.mark.parametrize(
    ("error", "kind", "limit"),
    [
        (OSError(errno.EMFILE, "x"), GroupAborted, "ulimit -n"),
        (OSError(errno.ENFILE, "x"), GroupAborted, "fs.file-max"),
        (OSError(errno.EFBIG, "x"), StagingFull, "ulimit -f"),
        (OSError(errno.ENOMEM, "x"), StagingFull, "ulimit -v"),
        (OSError(errno.ENOSPC, "x"), StagingFull, "vm.overcommit_memory"),
        (OSError(133, "x"), StagingFull, "damaged"),
        (MemoryError(), StagingFull, "cgroup"),
        (NO_THREAD, GroupAborted, "ulimit -u"),
    ],
)
def test_each_limit_has_its_name(error: BaseException, kind: type, limit: str) -> None:
    assert is_exhaustion(error)
    made = exhausted(error, "stage epoch 5", needed=77)
    assert type(made) is kind
    assert made.message.startswith("cannot stage epoch 5: ")
    assert limit in made.message
    if isinstance(made, StagingFull):
        assert made.needed == 77


@pytest.mark.parametrize("error", [OSError(errno.EIO, "x"), RuntimeError("x"), ValueError("x")])
def test_other_faults_are_no_limits(error: BaseException) -> None:
    assert not is_exhaustion(error)


def test_a_store_is_not_blamed_for_descriptors() -> None:
    error = storage_error(OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "/store", "open")
    assert isinstance(error, StorageError)
    assert error.errno == errno.EMFILE
    assert "not the store's fault" in error.message
    assert "ulimit -n" in error.message


def test_a_pool_goes_on_with_the_threads_that_it_has(threads_left: list[int]) -> None:
    with ThreadPool(4, "few") as pool:
        assert sorted(pool.map(lambda n: n, range(8))) == list(range(8))
        assert len(pool._threads) == 1
    with pytest.raises(GroupAborted, match="ulimit -u"):
        ThreadPool(4, "none")


def test_some_threads_are_better_than_none(threads_left: list[int]) -> None:
    ran: list[int] = []
    made = [threading.Thread(target=ran.append, args=(n,)) for n in range(3)]
    assert start_some(made) == 1
    made[0].join()
    assert ran == [0]
    with pytest.raises(GroupAborted):
        start_some(made[1:])
    assert start_some([]) == 0


def test_writers_share_the_bounce_buffers_that_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, real = BouncePool(3), workers._new_buffer
    made: list[Any] = []

    def new() -> Any:
        if len(made) != 1:
            made.append(None)
            raise OSError(errno.ENOMEM, "x")
        return real()

    monkeypatch.setattr(workers, "_new_buffer", new)
    with pytest.raises(OSError, match="x"):
        pool.take(lambda: False)
    first = pool.take(lambda: False)
    assert first is not None
    made.append(None)
    threading.Timer(0.05, pool.give_back, [first]).start()
    assert pool.take(lambda: False) is first
    assert exhaustion.why(MemoryError()).startswith("the system has no memory for it")
