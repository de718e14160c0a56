"""Ranks that torchrun starts find each other's agents without any setting."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import groupio
from groupio.cli import main

RANK = Path(__file__).with_name("deploy_rank.py")
RESTARTED = Path(__file__).with_name("deploy_restarted_rank.py")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_two_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], worker: list[str]
) -> list[str]:
    """The output of the two launchers, which have to end well, and so have their agents."""
    nodes = []
    for number in (0, 1):
        here = {"GROUPIO_NODE": f"n{number}", "GROUPIO_RUNTIME_DIR": str(tmp_path / f"n{number}")}
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
        command += ["--nproc-per-node=1", *(option.format(node=number) for option in options)]
        nodes.append(
            subprocess.Popen(
                [*command, *worker],
                env={**os.environ, "OMP_NUM_THREADS": "1", **here},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        answers = [node.communicate(timeout=150) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
        for name in ("n0", "n1"):
            monkeypatch.setenv("GROUPIO_RUNTIME_DIR", str(tmp_path / name))
            assert main.run(["agent", "stop"]) == 0
    assert [node.returncode for node in nodes] == [0, 0], answers
    return [out for out, _ in answers]


def test_two_nodes_of_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "store"
    options = ["--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    answers = run_two_nodes(tmp_path, monkeypatch, options, [str(RANK), str(store)])
    places = [json.loads(out.splitlines()[-1]) for out in answers]
    assert places == [{"rank": 0, "world_size": 2}, {"rank": 1, "world_size": 2}]
    logs = [next((tmp_path / name).glob("agent-*.log")).read_text() for name in ("n0", "n1")]
    # torchrun's first node has the controller, the other one follows it.
    assert ["this agent has the controller" in log for log in logs] == [True, False]
    with groupio.connect(store, rank=0, world_size=1) as client:
        assert [info.epoch for info in client.epochs()] == [1]


@pytest.mark.timeout(200)
def test_an_elastic_restart_is_one_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker is killed: its node counts a restart, the other one does not."""
    store = tmp_path / "store"
    options = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    options += ["--rdzv-id=job", "--max-restarts=2"]
    options += ["--monitor-interval=0.1", "--local-addr=127.0.0.1"]
    run_two_nodes(tmp_path, monkeypatch, options, [str(RESTARTED), str(store), str(tmp_path)])
    assert (tmp_path / "killed").exists()
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert [one["latest"] for one in seen] == [1, 1]
    assert sorted(one["restarts"] for one in seen) == ["0", "1"]
    with groupio.connect(store, rank=0, world_size=1) as client:
        assert [info.epoch for info in client.epochs()] == [1, 2, 3]
