"""All ranks of a job load together by their process group, each chunk leaving the store once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from groupio.torch.exchange import device_of

WORKER = Path(__file__).with_name("exchange_worker.py")
RANKS = 3
BYTES = (5 << 18) * 4


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What ranks 0 and 2 saw; rank 1 is killed in the end."""
    folder = tmp_path_factory.mktemp("exchange")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    common = {**os.environ, **place, "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}
    common["GROUPIO_FABRIC"] = "torch"
    logs = [folder / f"{rank}.log" for rank in range(RANKS)]
    processes = []
    for rank, log in enumerate(logs):
        environ = {**common, "RANK": str(rank), "WORLD_SIZE": str(RANKS)}
        with log.open("w") as out:
            command = [sys.executable, str(WORKER), str(folder)]
            processes.append(subprocess.Popen(command, env=environ, stdout=out, stderr=out))
    try:
        codes = [process.wait(100) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait(10)
    said = "\n".join(log.read_text()[-3000:] for log in logs)
    assert codes == [0, -signal.SIGKILL, 0], said
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 2)]


@pytest.mark.parametrize("scenario", ["together", "small_window"])
def test_each_chunk_leaves_the_store_once(found: list[dict[str, Any]], scenario: str) -> None:
    for result in found:
        got = result[scenario]
        assert got["right"]
        assert "process group (" in got["notes"][0]
        assert "gloo" in got["notes"][0]
        assert len(got["notes"]) == 1
        # Of 5 equal parts, 3 of them different, each rank reads its own and a third of the rest.
        assert got["read"] + got["forwarded"] >= 3 * BYTES
        assert got["forwarded"] > 0
        assert got["read"] <= BYTES + 2 * BYTES / 3 + (4 << 20)
    assert all(result["together"]["main_thread_only"] for result in found)


def test_rank_that_wants_nothing_holds_nobody_up(found: list[dict[str, Any]]) -> None:
    assert found[0]["nothing_wanted"]["right"]
    assert found[0]["nothing_wanted"]["forwarded"] > 0
    assert found[1]["nothing_wanted"] == {"right": True, "read": 0, "forwarded": 0}


def test_wrong_bytes_are_read_again(found: list[dict[str, Any]]) -> None:
    for result in found:
        got = result["bits_flipped_on_the_way"]
        assert got["right"]
        assert got["read"] + got["forwarded"] >= 3 * BYTES
    again = [result["bits_flipped_on_the_way"]["read"] for result in found]
    assert sum(again) > sum(result["together"]["read"] for result in found)


@pytest.mark.parametrize(
    ("scenario", "words"),
    [
        ("reader_fails", ["rank 1", "the store is away"]),
        ("rank_fails_before_it_reads", ["rank 1", "none left"]),
        ("settings_differ", ["rank 1", "fabric='torch'"]),
        ("killed", ["lost each other"]),
    ],
)
def test_what_goes_wrong_on_one_rank_is_raised_by_all(
    found: list[dict[str, Any]], scenario: str, words: list[str]
) -> None:
    for result in found:
        assert all(word in result[scenario]["said"] for word in words), result[scenario]


def test_all_fall_back_together(found: list[dict[str, Any]]) -> None:
    for result in found:
        got = result["damaged"]
        assert got["right"]
        assert got["skipped"] == [2]
        assert got["forwarded"] > 0


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,cuda:nccl", "mpi", "cpu:gloo"])
def test_groups_that_can_move_host_memory_do(backend: str) -> None:
    assert device_of(backend) == torch.device("cpu")
