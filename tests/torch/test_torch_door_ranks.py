"""Doors of epochs that four ranks saved: shards of any kind, values of each rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import door_help
import door_worker
import pytest
import torch
from door_help import door_files, stock_load

WORKER = Path(__file__).with_name("door_worker.py")


@pytest.mark.timeout(150)
def test_shards_of_four_ranks(store: str, tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"),
        *("--monitor-interval", "0.3", str(WORKER), store, str(tmp_path)),
    ]
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=140,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in range(4)] == ["equal"] * 4
    for step in (1, 2):
        check_whole(store, step)
    # The second epoch wrote ten rows anew; its door refers to the first one's segments.
    assert "__extra.bin" not in door_files(store, 2)
    assert sum(door_files(store, 2).values()) < 64 << 10
    places = {path for path, _ in door_help.pieces(store, 2)["model.row"]}
    assert len(places) >= 2


def check_whole(store: str, step: int) -> None:
    """One process, without a mesh, reads what the four wrote; rank 0's where they differ."""
    full = door_worker.whole(step)
    template = {
        "model": full,
        "plain": full["same"],
        "own": torch.zeros(3),
        "rank": 0,
        "only": {str(rank): torch.full((2,), float(rank)) for rank in range(4)},
    }
    assert door_help.differences(template, stock_load(store, step, template)) == []
