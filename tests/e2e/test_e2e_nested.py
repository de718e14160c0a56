"""Signal handlers that save while a call of groupio is under way in their thread."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from groupio.client.store_reader import StoreReader

WORKER = Path(__file__).with_name("nested_process.py")
LONGEST_S = 30.0
"""Far more than a handler takes; a call that waits for itself takes its deadline, 600 s."""


def start(node: Any, *arguments: str, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(WORKER), *arguments],
        env={**node.environ, **environ},
        stdout=subprocess.PIPE,
        text=True,
    )


def end(process: subprocess.Popen[str]) -> dict[str, Any]:
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def check_alone(node: Any, store: Path, seed: int, seconds: float) -> None:
    found = end(start(node, "alone", str(store), str(seed), str(seconds)))
    assert found["errors"] == []
    assert found["interrupting"] > 0
    assert found["slowest_s"] < LONGEST_S
    # A handler that runs between two calls saves as anyone does: what is called later is stale.
    between = len(found["nested"]) - found["interrupting"]
    assert set(found["nested"]) <= {"durable", "StaleEpoch"}
    assert set(found["outer"]) <= {"durable", "StaleEpoch"}
    assert found["outer"].count("StaleEpoch") <= between


def test_handlers_of_one_rank_save_and_load_at_any_moment(node: Any, tmp_path: Path) -> None:
    check_alone(node, tmp_path / "store", 1, 2)


def check_dcp(node: Any, store: Path, seed: int, seconds: float) -> None:
    found = end(start(node, "dcp", str(store), str(seed), str(seconds)))
    assert found["errors"] == []
    assert found["slowest_s"] < LONGEST_S
    assert found["nested"].count("durable") > 0
    # A handler between two calls, or before its epoch is named, makes what is called later stale.
    assert set(found["nested"]) <= {"durable", "StaleEpoch"}
    assert set(found["outer"]) <= {"durable", "StaleEpoch"}


def test_handlers_save_with_the_dcp_writer_of_the_interrupted_save(
    node: Any, tmp_path: Path
) -> None:
    check_dcp(node, tmp_path / "store", 1, 4)


@pytest.mark.proof
@pytest.mark.parametrize("seed", range(30, 40))
def test_dcp_saves_in_handlers_many_times(node: Any, tmp_path: Path, seed: int) -> None:
    check_dcp(node, tmp_path / "store", seed, 10)


@pytest.mark.proof
@pytest.mark.parametrize("seed", range(10, 20))
def test_handlers_of_one_rank_many_times(node: Any, tmp_path: Path, seed: int) -> None:
    check_alone(node, tmp_path / "store", seed, 5)


def check_pair(node: Any, store: Path, seed: int, trials: int, api: str) -> None:
    chance = random.Random(seed)
    ranks = [
        start(node, "pair", str(store), str(n), str(trials), api, RANK=str(n), WORLD_SIZE="2")
        for n in range(2)
    ]
    try:
        for _ in range(trials):
            for rank in ranks:
                assert rank.stdout is not None
                assert rank.stdout.readline() == "trial\n"
            for rank in ranks:  # the same moment, or nearly
                time.sleep(chance.choice([0.0, chance.random() * 0.04]))
                rank.send_signal(signal.SIGUSR1)
        zero, one = [end(rank) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert zero["nested"] == one["nested"] == ["durable"] * trials
    assert zero["outer"] == one["outer"]
    assert set(zero["outer"]) <= {"durable", "StaleEpoch"}
    assert max(zero["slowest_s"], one["slowest_s"]) < LONGEST_S
    with StoreReader.open(str(store)) as reader:
        epochs = [entry.epoch for entry in reader.epochs()]
    assert {trial * 1000 + 500 for trial in range(1, trials + 1)} <= set(epochs)


@pytest.mark.parametrize("api", ["client", "torch"])
def test_handlers_of_two_ranks_save_one_epoch(node: Any, tmp_path: Path, api: str) -> None:
    check_pair(node, tmp_path / "store", 3, 12, api)


@pytest.mark.proof
@pytest.mark.parametrize("seed", range(20, 26))
def test_handlers_of_two_ranks_many_times(node: Any, tmp_path: Path, seed: int) -> None:
    check_pair(node, tmp_path / "store", seed, 60, "client")
