"""Every way to save x every way to load gives equal values, on other numbers of ranks too."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_ranks import run_ranks
from dcp_states import differences, state, whole_state, wiped

import groupio
import groupio.torch as gt

EPOCHS = {"torch.save": 1, "dcp.save": 2, "dcp.save plain": 3, "dcp.async_save": 4, "full": 5}


def save_all_ways(rank: int, folder: Path) -> Any:
    store = os.fspath(folder / "store")
    writer = gt.GroupStorageWriter(store)
    planner = gt.GroupSavePlanner()
    notes = {}
    gt.save(state(rank, 1), store, step=1).wait("durable", 60)
    done = dcp.save(
        state(rank, 2), checkpoint_id="run/step-2", storage_writer=writer, planner=planner
    )
    notes["names"] = sorted(done.state_dict_metadata)
    notes["meta"] = (str(done.storage_meta.checkpoint_id), len(done.storage_data))
    dcp.save(state(rank, 3), checkpoint_id="3", storage_writer=writer)
    changing = state(rank, 4)
    future = dcp.async_save(changing, checkpoint_id="step-4", storage_writer=writer)
    changing["model"]["plain.big"].zero_()
    changing["model"]["fsdp.big"].to_local().zero_()
    changing["optim"]["param_groups"][0]["lr"] = "changed"
    notes["async"] = type(future.result()).__name__
    full = gt.GroupSavePlanner(verify_replicas="full")
    dcp.save(state(rank, 5), checkpoint_id="5", storage_writer=writer, planner=full)
    notes["loads"] = load_all_ways(rank, folder)
    return notes


def load_all_ways(rank: int, folder: Path) -> dict[str, list[str]]:
    """The differences found, by way of saving and of loading; none where all is well."""
    store = os.fspath(folder / "store")
    reader = gt.GroupStorageReader(store)
    found = {}
    for way, epoch in EPOCHS.items():
        # Without groupio's planner one rank's values are kept for all.
        same_own = way == "dcp.save plain"
        wanted = state(rank, epoch)
        if rank >= 4 or same_own:
            del wanted["own"]
        for load in ("torch.load", "dcp.load", "door"):
            template = wiped(wanted)
            if load == "torch.load":
                gt.load(template, store, step=epoch, strict=False)
            elif load == "dcp.load":
                dcp.load(template, checkpoint_id=f"run/{epoch}", storage_reader=reader)
            else:
                dcp.load(template, checkpoint_id=f"{store}/dcp/{epoch}")
            expected = {**wanted, "own": state(0, epoch)["own"]} if load == "door" else wanted
            expected = expected if "own" in wanted else wanted
            found[f"{way} -> {load}"] = differences(expected, template)
    return found


def reload(rank: int, folder: Path) -> Any:
    return load_all_ways(rank, folder)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Any]]:
    """What four ranks saved in every way, and what they found when they loaded it."""
    folder = tmp_path_factory.mktemp("matrix")
    return folder, run_ranks(folder, 4, save_all_ways)


def test_four_ranks_save_and_load_in_every_way(saved: tuple[Path, dict[int, Any]]) -> None:
    _, notes = saved
    assert len(notes) == 4
    for rank, note in notes.items():
        assert note["async"] == "Metadata"
        assert note["meta"][0] == "run/step-2"
        assert note["meta"][1] > len(note["names"])
        assert "optim.state.0.exp_avg" in note["names"]
        assert len(note["loads"]) == 15
        for way, found in note["loads"].items():
            assert found == [], (rank, way)


def test_another_number_of_ranks_loads_it(saved: tuple[Path, dict[int, Any]]) -> None:
    folder, _ = saved
    for rank, loads in run_ranks(folder, 3, reload).items():
        for way, found in loads.items():
            assert found == [], (rank, way)


@pytest.mark.parametrize("epoch", EPOCHS.values())
def test_one_process_without_a_group_loads_it(
    saved: tuple[Path, dict[int, Any]], epoch: int
) -> None:
    folder, _ = saved
    store = os.fspath(folder / "store")
    assert not dist.is_initialized()
    wanted = whole_state(epoch)
    if epoch == EPOCHS["dcp.save plain"]:
        del wanted["own"]
    template = wiped(wanted)
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(
            template,
            checkpoint_id=f"{epoch}",
            storage_reader=gt.GroupStorageReader(store),
            no_dist=True,
        )
    assert differences(wanted, template) == []


def test_each_epoch_is_one_copy(saved: tuple[Path, dict[int, Any]]) -> None:
    folder, _ = saved
    with groupio.connect(folder / "store", rank=0, world_size=1) as client:
        sizes = {info.epoch: info.bytes_unique for info in client.epochs()}
    assert max(sizes.values()) < 1.05 * min(sizes.values())
