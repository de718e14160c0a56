"""A store with its worker threads; agents that a test started end with it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from agent_tools import WAIT_S, Store

import groupio
from groupio.agent import process
from groupio.agent.workers import WorkerPool


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    workers = WorkerPool()
    yield workers
    assert workers.close(WAIT_S)


@pytest.fixture
def store(tmp_path: Path, pool: WorkerPool) -> Iterator[Store]:
    made = Store(tmp_path / "store", pool)
    yield made
    made.backend.close()


@pytest.fixture
def paths(tmp_path: Path) -> process.RuntimePaths:
    made = process.runtime_paths(str(tmp_path / "run"), groupio.__version__)
    process.make_runtime_dir(made)
    return made


@pytest.fixture
def end_agent(paths: process.RuntimePaths) -> Iterator[Callable[[], int | None]]:
    """Kills the agent of ``paths`` and waits for its end; also at the end of the test."""

    def end() -> int | None:
        if not process.is_alive(paths):
            return None
        pid = process.holder_pid(paths)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + WAIT_S
        while process.is_alive(paths):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return pid

    yield end
    end()
