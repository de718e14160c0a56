"""Ranks that are children of multiprocessing, one of which is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from groupio.client.store_reader import StoreReader

WORKER = Path(__file__).with_name("children_process.py")


def test_a_killed_child_fails_the_save_of_the_others_in_bounded_time(
    node: Any, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    done = subprocess.run(
        [sys.executable, str(WORKER), str(store)],
        env=node.environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "[0, -9]\n", done.stderr
    assert "epoch 2 was not saved (rank 0" in done.stderr
    assert "GroupAborted" in done.stderr
    assert "1 of 2 saves of this process failed" in done.stderr
    assert "the last durable epoch is 1" in done.stderr
    with StoreReader.open(str(store)) as reader:
        assert [one.epoch for one in reader.epochs()] == [1]
