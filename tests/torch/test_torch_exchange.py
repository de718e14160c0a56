"""All ranks of a job load together by their process group, each chunk leaving the store once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch_spawned import found_by_ranks

from groupio.torch.exchange import device_of

WORKER = Path(__file__).with_name("exchange_worker.py")
BYTES = (5 << 18) * 4


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What ranks 0 and 2 saw; rank 1 is killed in the end."""
    return found_by_ranks(WORKER, tmp_path_factory.mktemp("exchange"), GROUPIO_FABRIC="torch")


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
