"""An agent of the tests' own, which ends with them."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from groupio import wire
from groupio.agent import process
from groupio.protocol import messages as msg

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID")


@pytest.fixture(scope="session", autouse=True)
def runtime_dir() -> Iterator[str]:
    """A short path: a socket's is limited to about 100 bytes."""
    with tempfile.TemporaryDirectory(prefix="gt-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("GROUPIO_RUNTIME_DIR", folder)
        patch.setenv("GROUPIO_IDLE_S", "0.5")
        patch.setenv("GROUPIO_MEMORY_BYTES", "1G")
        for name in LAUNCHER:
            patch.delenv(name, raising=False)
        yield folder
        import groupio.torch

        groupio.torch.close()
        paths = process.runtime_paths(folder, groupio.__version__)
        if process.is_alive(paths):
            stop(paths)


def stop(paths: process.RuntimePaths) -> None:
    """Ask the agent to end, and wait until it did."""
    channel = wire.Channel(wire.connect(paths.socket, timeout_s=5), msg.ToRank)
    try:
        channel.send(msg.Ask(1, "stop"))
        channel.recv(10)
    finally:
        channel.close()
    end = time.monotonic() + 20
    while process.is_alive(paths) and time.monotonic() < end:
        time.sleep(0.02)
    assert not process.is_alive(paths), "the agent did not end when it was asked to"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    """A path for a store of this test; its clients are closed at the end."""
    yield os.fspath(tmp_path / "store")
    import groupio.torch

    groupio.torch.close()
