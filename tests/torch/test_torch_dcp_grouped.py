"""``dcp.load`` on one host: its ranks read each chunk once between them, and fail together."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_ranks import run_ranks, told
from dcp_states import full, meshes, spread
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.tensor import Replicate, Shard

import groupio.torch as gt
from groupio.torch import grouped

RANKS = 3
ROWS = 3 << 10
BYTES = ROWS * 1024 * 4


class Broken(DefaultLoadPlanner):
    """Fails at the memory of a tensor, when the others are already reading."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        raise ValueError("no such memory")


class Late(DefaultLoadPlanner):
    """Fails after the plans were made and before anything is read."""

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        raise ValueError("no such plan")


class Nothing(DefaultLoadPlanner):
    """Wants nothing of what all have."""

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        new_plan.items = []
        return new_plan


def _load(store: str, state: dict[str, Any], **more: Any) -> dict[str, Any]:
    reader = gt.GroupStorageReader(store)
    found = told(lambda: dcp.load(state, checkpoint_id="1", storage_reader=reader, **more))
    counts = {"read": reader.bytes_read, "forwarded": reader.bytes_forwarded}
    return {"told": found, "notes": reader.notes, **counts}


def reading(rank: int, folder: Path) -> Any:
    store = os.fspath(folder / "store")
    flat, _ = meshes()
    saved = {
        "same": spread(full(1, ROWS, 1024), flat, [Replicate()]),
        "split": spread(full(2, ROWS, 1024), flat, [Shard(0)]),
    }
    gt.save(saved, store, step=1).wait("durable", 60)
    dist.barrier()

    def empty() -> dict[str, Any]:
        return {
            "same": spread(torch.zeros(ROWS, 1024), flat, [Replicate()]),
            "split": spread(torch.zeros(ROWS, 1024), flat, [Shard(0)]),
        }

    state = empty()
    found = {"all": _load(store, state)}
    found["all"]["right"] = all(
        torch.equal(state[name].to_local(), saved[name].to_local()) for name in saved
    )
    state = empty()
    found["nothing"] = _load(store, state, planner=Nothing() if rank == 1 else None)
    found["nothing"]["right"] = rank == 1 or torch.equal(
        state["same"].to_local(), saved["same"].to_local()
    )
    found["broken"] = _load(store, empty(), planner=Broken() if rank == 1 else None)
    grouped.LINK_S = 1.0
    found["late"] = _load(store, empty(), planner=Late() if rank == 0 else None)
    grouped.LINK_S = 20.0
    alone = {"same": torch.zeros(ROWS, 1024)}
    found["no_dist"] = _load(store, alone, no_dist=True)
    found["no_dist"]["right"] = torch.equal(alone["same"], saved["same"].to_local())
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """What each rank saw."""
    return run_ranks(tmp_path_factory.mktemp("dcp-grouped"), RANKS, reading)


def test_every_chunk_leaves_the_store_once(found: dict[int, Any]) -> None:
    ranks = [result["all"] for result in found.values()]
    assert all(rank["right"] and not rank["notes"] for rank in ranks)
    assert sum(rank["read"] for rank in ranks) == 2 * BYTES
    assert all(rank["forwarded"] > 0 for rank in ranks)


def test_a_rank_that_wants_nothing_takes_part(found: dict[int, Any]) -> None:
    ranks = [result["nothing"] for result in found.values()]
    assert all(rank["right"] and not rank["notes"] for rank in ranks)
    assert ranks[1]["read"] == ranks[1]["forwarded"] == 0
    assert sum(rank["read"] for rank in ranks) == BYTES + 2 * BYTES // 3


def test_what_goes_wrong_on_one_rank_is_raised_on_all(found: dict[int, Any]) -> None:
    for result in found.values():
        text = str(result["broken"]["told"])
        assert "no such memory" in text
        assert "rank 1" in text


def test_a_rank_that_failed_before_makes_the_others_read_by_themselves(
    found: dict[int, Any],
) -> None:
    for rank, result in found.items():
        assert "no such plan" in str(result["late"]["told"])
        if rank:
            assert "cannot reach each other" in result["late"]["notes"][0]
            assert result["late"]["read"] == BYTES + BYTES // 3


def test_without_dist_each_rank_reads_for_itself(found: dict[int, Any]) -> None:
    for result in found.values():
        got = result["no_dist"]
        assert got["right"]
        assert (got["read"], got["forwarded"], got["notes"]) == (BYTES, 0, ())
