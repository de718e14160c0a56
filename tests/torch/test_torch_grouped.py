"""Ranks of one host load together: each chunk leaves the store once, and nobody waits in vain."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

WORKER = Path(__file__).with_name("grouped_worker.py")
RANKS = 3
BYTES = (5 << 18) * 4


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What ranks 0 and 2 saw; rank 1 is killed in the end."""
    folder = tmp_path_factory.mktemp("grouped")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    common = {**os.environ, **place, "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}
    logs = [folder / f"{rank}.log" for rank in range(RANKS)]
    processes = []
    for rank, log in enumerate(logs):
        environ = {**common, "RANK": str(rank), "WORLD_SIZE": str(RANKS)}
        with log.open("w") as out:
            command = [sys.executable, str(WORKER), str(folder)]
            processes.append(subprocess.Popen(command, env=environ, stdout=out, stderr=out))
    try:
        codes = [process.wait(120) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait(10)
    said = "\n".join(log.read_text()[-3000:] for log in logs)
    assert codes == [0, -signal.SIGKILL, 0], said
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 2)]


def test_each_chunk_leaves_the_store_once(found: list[dict[str, Any]]) -> None:
    for result in found:
        got = result["together"]
        assert got["right"]
        assert got["notes"] == []
        assert got["read"] + got["forwarded"] >= 3 * BYTES
        assert got["forwarded"] > 0
        # Of 5 equal parts, 3 of them different, each rank reads its own and a third of the rest.
        assert got["read"] <= BYTES + 2 * BYTES / 3 + (4 << 20)


def test_another_host_reads_for_itself(found: list[dict[str, Any]]) -> None:
    here, elsewhere = (result["two_hosts"] for result in found)
    assert here["right"]
    assert elsewhere["right"]
    assert here["forwarded"] > 0
    assert elsewhere["forwarded"] == 0
    assert elsewhere["read"] >= 3 * BYTES
    assert elsewhere["notes"] == []


def test_ranks_that_cannot_reach_each_other_say_so(found: list[dict[str, Any]]) -> None:
    for result in found:
        got = result["unreachable"]
        assert got["right"]
        assert got["forwarded"] == 0
        assert "cannot reach each other (rank" in got["notes"][0]


def test_all_fall_back_together(found: list[dict[str, Any]]) -> None:
    for result in found:
        got = result["damaged"]
        assert got["right"]
        assert got["skipped"] == [2]
        assert got["forwarded"] > 0


def test_a_rank_that_dies_while_it_reads_is_named_at_once(found: list[dict[str, Any]]) -> None:
    for result in found:
        assert result["killed"]["members"] == [1]
        assert result["killed"]["took"] < 10.0  # without the end of its socket: half an hour
