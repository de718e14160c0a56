"""A job goes on from an older step than the latest one: through torch's API and through DCP's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_ranks import run_ranks

import groupio
import groupio.torch as gt
from groupio.errors import GroupIOError, InvalidInput, StaleEpoch

EARLIER = """
import sys, numpy, groupio
for store in sys.argv[1:]:
    with groupio.connect(store, rank=0, world_size=1) as client:
        for step in (100, 150, 200):
            client.save({"w": numpy.full(5, step, "f4")}, epoch=step, wait_for="durable")
"""


def earlier_life(*stores: str) -> None:
    """Another process saves steps 100, 150 and 200, and ends."""
    subprocess.run([sys.executable, "-c", EARLIER, *stores], check=True, timeout=60)


def why(handle: groupio.SaveHandle) -> GroupIOError:
    with pytest.raises(GroupIOError) as failed:
        handle.wait("durable", 60)
    return failed.value


def lineage_notes(handle: groupio.SaveHandle) -> list[str]:
    return [note for note in handle.wait("durable", 60).notes if note.startswith("lineage")]


def shown(store: str) -> list[int]:
    with groupio.connect(store) as client:
        return [one.epoch for one in client.epochs() if not one.abandoned]


def go_on(rank: int, folder: Path) -> Any:
    """Both ranks load step 100 and save 150."""
    store, other = os.fspath(folder / "store"), os.fspath(folder / "other")
    found: dict[str, Any] = {}
    state = {"w": torch.zeros(5)}
    found["loaded"] = gt.load(state, store, step=100).step
    state["w"] += 1
    found["began"] = lineage_notes(gt.save(state, store, step=150))
    found["went on"] = lineage_notes(gt.save(state, store, step=160))
    gt.load(state, store, step=100)
    found["own"] = why(gt.save(state, store, step=155))
    dist.barrier()
    found["asked"] = lineage_notes(gt.save(state, store, step=155, rewind_to=100))
    found["asked again"] = lineage_notes(gt.save(state, store, step=165, rewind_to=100))

    reader, writer = gt.GroupStorageReader(other), gt.GroupStorageWriter(other)
    state = {"w": torch.zeros(5)}
    dcp.load(state, checkpoint_id="step-100", storage_reader=reader)
    dcp.save(state, checkpoint_id="step-150", storage_writer=writer)
    with pytest.raises(dcp.api.CheckpointException) as failed:
        dcp.save(state, checkpoint_id="step-140", storage_writer=writer)
    found["dcp"] = failed.value.failures[rank][0]
    writer = gt.GroupStorageWriter(other, rewind_to=100)
    for step in (140, 145):
        dcp.save(state, checkpoint_id=f"step-{step}", storage_writer=writer)
    return found


def test_two_ranks_go_on_from_an_older_step(tmp_path: Path) -> None:
    store, other = os.fspath(tmp_path / "store"), os.fspath(tmp_path / "other")
    earlier_life(store, other)
    for found in run_ranks(tmp_path, 2, go_on).values():
        assert found["loaded"] == 100
        assert len(found["began"]) == 1
        assert "epoch 150 goes on after epoch 100" in found["began"][0]
        assert "up to 200 are abandoned" in found["began"][0]
        assert found["went on"] == []
        assert isinstance(found["own"], StaleEpoch)
        assert "groupio.torch.save(rewind_to=E)" in found["own"].message
        assert "epoch 155 goes on after epoch 100" in found["asked"][0]
        assert found["asked again"] == []
        assert isinstance(found["dcp"], StaleEpoch)
        assert "GroupStorageWriter(rewind_to=E)" in found["dcp"].message
    assert shown(store) == [100, 155, 165]
    assert shown(other) == [100, 140, 145]


def test_what_does_not_go_back(store: str, caplog: pytest.LogCaptureFixture) -> None:
    earlier_life(store)
    state = {"w": torch.zeros(5)}
    gt.load(state, store, step=100)
    gt.load(state, store)
    error = why(gt.save(state, store, step=170))
    assert isinstance(error, StaleEpoch)
    assert shown(store) == [100, 150, 200]
    gt.load(state, store, step=100)
    assert lineage_notes(gt.save(state, store, step=300)) == []
    assert shown(store) == [100, 150, 200, 300]
    with pytest.raises(InvalidInput, match="not older than epoch 400"):
        gt.save(state, store, step=400, rewind_to=400)
    error = why(gt.save(state, store, step=400, rewind_to=120))
    assert "groupio.torch.save(rewind_to=120)" in error.message
    assert not [r for r in caplog.records if "goes on after" in r.message]
    gt.save(state, store, step=160, rewind_to=150).wait("durable", 60)
    warned = [r for r in caplog.records if "goes on after" in r.message]
    assert [r.levelname for r in warned] == ["WARNING"]
    assert shown(store) == [100, 150, 160]
