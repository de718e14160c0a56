"""Ranks of one host load together: each chunk leaves the store once, and nobody waits in vain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch_spawned import found_by_ranks

WORKER = Path(__file__).with_name("grouped_worker.py")
BYTES = (5 << 18) * 4


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What ranks 0 and 2 saw; rank 1 is killed in the end."""
    return found_by_ranks(WORKER, tmp_path_factory.mktemp("grouped"))


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
