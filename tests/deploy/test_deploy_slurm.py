"""``deploy/slurm.sbatch`` under a real Slurm, Debian's slurm-wlm, on this one machine."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_help import Slurm, missing_programs

import groupio

ROOT = Path(__file__).parents[2]
RANK = Path(__file__).with_name("deploy_rank.py")

pytestmark = pytest.mark.root


@pytest.fixture
def slurm() -> Iterator[Slurm]:
    """A cluster of this machine. Its folder is short: sockets are in it."""
    if missing_programs():
        pytest.skip("peer not installed: slurm-wlm and munge (Debian packages)")
    with tempfile.TemporaryDirectory(prefix="slurm") as folder:
        cluster = Slurm(Path(folder))
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


def submit(slurm: Slurm, tmp_path: Path, *command: str) -> tuple[str, str]:
    """Run the batch script to its end: ``exit code:signal`` and what it printed."""
    out = tmp_path / "job.out"
    options = ("--parsable", "--nodes=1", "--ntasks-per-node=2", f"--output={out}")
    os.environ["GROUPIO"] = str(Path(sys.executable).with_name("groupio"))
    try:
        done = slurm.command("sbatch", *options, str(ROOT / "deploy" / "slurm.sbatch"), *command)
    finally:
        del os.environ["GROUPIO"]
    assert done.returncode == 0, done.stderr
    deadline = time.monotonic() + 100
    while True:
        shown = slurm.command("scontrol", "show", "job", done.stdout.strip(), "--oneliner").stdout
        job = dict(pair.split("=", 1) for pair in shown.split() if "=" in pair)
        if job["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT"):
            return job["ExitCode"], out.read_text() if out.exists() else slurm.logs()
        assert time.monotonic() < deadline, (shown, slurm.logs())
        time.sleep(0.2)


def test_a_batch_job_saves_through_its_own_agent(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = tmp_path / "agent"
    monkeypatch.setenv("GROUPIO_RUNTIME_DIR", str(agent))
    store = tmp_path / "store"
    code, out = submit(slurm, tmp_path, sys.executable, str(RANK), str(store))
    assert code == "0:0", out
    places = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert sorted(place["rank"] for place in places) == [0, 1]
    assert {place["world_size"] for place in places} == {2}
    assert "the agent has ended" in out
    (log,) = agent.glob("agent-*.log")
    assert log.read_text().count("agent ends") == 1  # the one of the script, and no other
    with groupio.connect(store, rank=0, world_size=1) as client:
        assert [info.epoch for info in client.epochs()] == [1]


def test_the_job_fails_with_its_training(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GROUPIO_RUNTIME_DIR", str(tmp_path / "agent"))
    code, out = submit(slurm, tmp_path, "bash", "-c", "exit 7")
    assert code == "7:0", out
    assert "the agent has ended" in out
