"""Children of multiprocessing, which run no exit handlers, wait for their saves all the same."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
from pathlib import Path

import pytest
from fake_agent import FakeAgent

from groupio.protocol import messages as msg

WORKER = Path(__file__).with_name("children_worker.py")


@pytest.mark.parametrize(
    "method",
    [
        "fork",
        "fork-again",
        "spawn",
        "forkserver",
        "fork-pool",
        "spawn-pool",
        "executor",
        pytest.param("torch", marks=pytest.mark.proof),
    ],
)
def test_a_child_waits_for_its_save(agent: FakeAgent, tmp_path: Path, method: str) -> None:
    environ = {**os.environ, "TEST_FOLDER": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, str(WORKER), method], env=environ)
    try:
        if method == "fork-again":
            agent.peer()
        peer = agent.peer()
        opened = peer.take(msg.OpenSave, timeout_s=60)
        peer.receive(opened)
        # Without a wait the child's end closes the connection now.
        with pytest.raises(queue.Empty):
            peer.take(msg.Bye, timeout_s=0.3)
        peer.reach(opened, "staged", "durable")
        peer.take(msg.Bye)
        assert parent.wait(20) == 0
    finally:
        parent.kill()
        parent.wait(20)
