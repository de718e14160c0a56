"""Ranks under torchrun with gloo: FSDP2, HSDP and DDP resume exactly; all agree, or all fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).with_name("torchrun_worker.py")


def torchrun(folder: Path, ranks: int, scenarios: str, *, dies: bool = False) -> Any:
    """Run the scenarios; what each reported, by its name and rank."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(ranks), "--monitor-interval", "0.3"),
        *(str(WORKER), scenarios, str(folder)),
    ]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        env=environ,
        timeout=170,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert (done.returncode != 0) == dies, done.stdout[-4000:]
    return {
        name: {
            rank: json.loads(path.read_text())
            for rank in range(ranks)
            if (path := folder / f"{name}-{rank}.json").exists()
        }
        for name in scenarios.split(",")
    }


@pytest.mark.timeout(180)
def test_four_ranks_resume_and_agree(tmp_path: Path) -> None:
    found = torchrun(tmp_path, 4, "fsdp,hsdp,ddp,agreement,declared")
    for parallel, copies in (("fsdp", 1), ("hsdp", 2), ("ddp", 4)):
        results = found[parallel]
        assert len(results) == 4
        for rank, result in results.items():
            assert result["equal"], (parallel, rank)
            assert (result["step"], result["rank"]) == (2, rank)
            assert result["whole"] == [[133, 10], [133], [133, 133], [133], [3, 133], [3]]
        ratio = results[0]["logical"] / results[0]["unique"]
        assert copies - 0.9 < ratio < copies + 0.9, parallel
    check_agreement(found["agreement"])
    check_declared(found["declared"])


def check_agreement(found: dict[int, Any]) -> None:
    for rank, result in found.items():
        other = "" if rank == 1 else "rank 1: "
        assert result["mismatch"]["error"] == "StateMismatch"
        assert result["mismatch"]["different"] == ["own"]
        assert result["mismatch"]["message"].startswith(f"{other}the state dict does not fit")
        assert result["untouched"]
        assert result["refused"]["error"] == "InvalidInput"
        assert "['x']" in result["refused"]["message"]
        assert result["steps"]["error"] == "InvalidInput"
        assert "step=1" in result["steps"]["message"]
        assert "step=2" in result["steps"]["message"]
        assert result["damage"]["error"] == "IntegrityError"
        assert result["damage"]["chunk"]
        assert result["fallback"] == [1, [2]]
        assert result["value"] == 10 + rank


def check_declared(found: dict[int, Any]) -> None:
    for rank, result in found.items():
        assert result["saved"] == {}
        # "good" and "same" and rank 0's "own" are one; three more "own"; the uneven shards.
        assert result["copies"] == 4
        assert result["equal"]
        assert result["dtensor"]["error"] == "ReplicaDivergence"
        assert result["dtensor"]["items"] == ["bad.w"]
        assert result["pattern"]["error"] == "ReplicaDivergence"
        assert result["pattern"]["items"] == ["own"]
        assert result["withdrawn"]["error"] == ("InvalidInput" if rank == 1 else "GroupAborted")
        assert result["soon"]
        if rank != 1:
            assert result["withdrawn"]["members"] == [1]


@pytest.mark.timeout(180)
def test_two_ranks_one_of_them_killed_while_it_copies(tmp_path: Path) -> None:
    found = torchrun(tmp_path, 2, "killed", dies=True)["killed"]
    assert list(found) == [0]
    assert found[0]["error"] == "GroupAborted"
    assert found[0]["members"] == [1]
    assert found[0]["epochs"] == [1]
