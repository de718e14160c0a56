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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_two_nodes_of_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, port = tmp_path / "store", free_port()
    nodes = []
    for number in (0, 1):
        here = {"GROUPIO_NODE": f"n{number}", "GROUPIO_RUNTIME_DIR": str(tmp_path / f"n{number}")}
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes=2",
            "--nproc-per-node=1",
        ]
        command += [f"--node-rank={number}", "--master-addr=127.0.0.1", f"--master-port={port}"]
        nodes.append(
            subprocess.Popen(
                [*command, str(RANK), str(store)],
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
    places = [json.loads(out.splitlines()[-1]) for out, _ in answers]
    assert places == [{"rank": 0, "world_size": 2}, {"rank": 1, "world_size": 2}]
    logs = [next((tmp_path / name).glob("agent-*.log")).read_text() for name in ("n0", "n1")]
    # torchrun's first node has the controller, the other one follows it.
    assert ["this agent has the controller" in log for log in logs] == [True, False]
    with groupio.connect(store, rank=0, world_size=1) as client:
        assert [info.epoch for info in client.epochs()] == [1]
