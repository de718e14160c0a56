"""A failure of one rank is an error on all, typed and soon; a killed rank hangs nobody."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_ranks import die, run_ranks, told
from dcp_states import full, meshes, spread
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.tensor import DTensor, Replicate

import groupio
import groupio.torch as gt
from groupio.torch.dcp import staging, writer


def failing(rank: int, folder: Path) -> Any:
    store = os.fspath(folder / "store")
    made = gt.GroupStorageWriter(store, deadline_s=60)
    planner = gt.GroupSavePlanner()

    def save(sd: dict[str, Any], step: str, use: Any = planner) -> dict[str, Any]:
        return told(lambda: dcp.save(sd, checkpoint_id=step, storage_writer=made, planner=use))

    def later(sd: dict[str, Any], step: str, **more: Any) -> dict[str, Any]:
        return told(
            lambda: dcp.async_save(sd, checkpoint_id=step, storage_writer=made, **more).result(60)
        )

    found = {}
    good = {"a": {"w": full(1, 600, 500)}, "v": 1}
    bad = {**good, "v": torch.Generator() if rank == 1 else 1}
    found["value"] = save(bad, "1")
    found["value async"] = later(bad, "2")
    false = {"a": {"w": full(int(rank == 2), 600, 500)}}
    found["replica"] = save(false, "3")
    flat, _ = meshes()
    small = DTensor.from_local(full(int(rank == 2), 60, 50), flat, [Replicate()], run_check=False)
    found["declared"] = save({"d": small}, "4")
    found["declared async"] = later({"d": small}, "5")
    found["own async"] = later(false, "6")
    found["steps"] = save(good, str(7 + (rank == 1)))
    found["steps async"] = later(good, "no step")
    found["no id"] = told(lambda: dcp.save(good, storage_writer=made))
    found["no id async"] = told(lambda: dcp.async_save(good, storage_writer=made).result(60))
    found["twice"] = later({"x": full(1, 3), "y": {"z": 1}, "y.z": 2}, "9")
    found["name"] = save({"groupio:x": 1}, "10")
    found["shape"] = save({"w": spread(full(1, 4 + rank, 4), flat, [Replicate()])}, "11")
    found["load"] = told(
        lambda: dcp.load(good, checkpoint_id="77", storage_reader=gt.GroupStorageReader(store))
    )
    found["missing"] = told(
        lambda: dcp.load(
            {"nothing": full(1, 2)}, checkpoint_id="6", storage_reader=gt.GroupStorageReader(store)
        )
    )
    found["good"] = save(good, "20")
    with groupio.connect(store, rank=0, world_size=1) as client:
        found["epochs"] = [info.epoch for info in client.epochs()]
    return found


def test_what_one_rank_does_wrong_is_told_to_all(tmp_path: Path) -> None:
    results = run_ranks(tmp_path, 3, failing)
    assert len(results) == 3
    for found in results.values():
        for name, one in found.items():
            assert name == "epochs" or one["soon"], name
        for name in ("value async", "declared async", "steps", "no id", "no id async", "name"):
            assert found[name]["ordinary"], (name, found[name])
            assert found[name]["both"] is (name != "steps async"), (name, found[name])
        assert found["value"]["failures"][1] == "InvalidInput"
        assert "['v']" in found["value"]["texts"][1]
        assert found["value async"]["type"] == "InvalidInput"
        assert found["value async"]["message"].startswith("rank 1: ")
        assert set(found["replica"]["failures"].values()) == {"ReplicaDivergence"}
        assert set(found["declared"]["failures"].values()) == {"ReplicaDivergence"}
        assert found["declared async"]["type"] == "ReplicaDivergence"
        assert found["declared async"]["items"] == ["d"]
        assert found["own async"]["type"] == ""
        assert found["steps"]["type"] == "InvalidInput"
        assert "rank 1 epoch 8" in found["steps"]["message"]
        assert found["steps async"]["type"] == "InvalidInput"
        assert "no step" in found["steps async"]["message"]
        assert found["no id"]["type"] == found["no id async"]["type"] == "InvalidInput"
        assert found["twice"]["type"] != ""
        assert found["name"]["type"] == "InvalidInput"
        assert found["load"]["failures"] == dict.fromkeys(range(3), "NotFound")
        assert "Missing key" in found["missing"]["message"]
        assert found["good"]["type"] == ""
        assert found["epochs"][-1] == 20
        assert {1, 2, 3, 4, 5, 7, 8, 9, 10}.isdisjoint(found["epochs"])


class _Dies(gt.GroupSavePlanner):
    def create_local_plan(self) -> Any:
        die()
        return super().create_local_plan()


def _save_and_survive(rank: int, folder: Path, how: str, victim: int = 1) -> Any:
    store = os.fspath(folder / "store")
    made = gt.GroupStorageWriter(store)  # its deadline is 600 s
    is_victim = rank == victim
    planner = _Dies() if is_victim and how == "planning" else gt.GroupSavePlanner()
    if is_victim and how == "staging":
        staging.state_items = lambda *args: die()  # type: ignore[assignment]
    if is_victim and how == "writing":
        writer.plan_items = lambda *args: die()  # type: ignore[assignment]
    if is_victim and how == "after":
        made.synchronize_staging = lambda: (  # type: ignore[method-assign]
            gt.GroupStorageWriter.synchronize_staging(made),
            die(),
        )
    if is_victim and how == "finishing":
        made.finish = lambda *args, **more: die()  # type: ignore[method-assign]
    sd = {"w": full(1, 600, 500), "rank": rank}
    options: dict[str, Any] = {"checkpoint_id": "5", "storage_writer": made, "planner": planner}
    if how in ("staging", "after"):
        return told(lambda: dcp.async_save(sd, **options).result(60))
    return told(lambda: dcp.save(sd, **options))


def killed_planning(rank: int, folder: Path) -> Any:
    return _save_and_survive(rank, folder, "planning")


def killed_staging(rank: int, folder: Path) -> Any:
    return _save_and_survive(rank, folder, "staging")


def killed_after_staging(rank: int, folder: Path) -> Any:
    return _save_and_survive(rank, folder, "after")


def killed_writing(rank: int, folder: Path) -> Any:
    return _save_and_survive(rank, folder, "writing")


def killed_finishing(rank: int, folder: Path) -> Any:
    return _save_and_survive(rank, folder, "finishing", victim=0)


@pytest.mark.parametrize(
    ("work", "committed"),
    [
        (killed_planning, False),
        (killed_staging, False),
        (killed_after_staging, None),
        (killed_writing, False),
        (killed_finishing, True),
    ],
)
def test_nobody_waits_for_a_killed_rank(
    tmp_path: Path, work: Callable[[int, Path], Any], committed: bool | None
) -> None:
    found = run_ranks(tmp_path, 3, work, limit_s=60)
    assert len(found) == 2
    for one in found.values():
        assert one["type"] != ""
        assert one["soon"], one
    with groupio.connect(tmp_path / "store", rank=0, world_size=1) as client:
        epochs = [info.epoch for info in client.epochs()]
    if committed is not None:
        assert epochs == ([5] if committed else [])


def in_another_process(rank: int, folder: Path) -> Any:
    made = gt.GroupStorageWriter(folder / "store")
    return told(
        lambda: dcp.async_save(
            {"a": torch.ones(2)},
            checkpoint_id="1",
            storage_writer=made,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        ).result(60)
    )


def test_the_process_type_of_async_save_is_refused(tmp_path: Path) -> None:
    found = run_ranks(tmp_path, 1, in_another_process)[0]
    assert found["type"] == "InvalidInput"
    assert "THREAD" in found["message"]
