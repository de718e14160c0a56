"""Groups of some of the ranks, saves at the same time, values of one rank only, damage."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_ranks import run_ranks, told
from dcp_states import differences, full, wiped
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import groupio
import groupio.torch as gt
from groupio.errors import InvalidInput


def loads_back(sd: dict[str, Any], store: str, step: int, **more: Any) -> list[str]:
    template = wiped(sd)
    reader = gt.GroupStorageReader(store, process_group=more.get("process_group"))
    dcp.load(template, checkpoint_id=str(step), storage_reader=reader, **more)
    return differences(sd, template)


def several(rank: int, folder: Path) -> Any:
    store = os.fspath(folder / "store")
    found: dict[str, Any] = {}
    group = dist.new_group([1, 2])
    sd = {"w": full(1, 700, 500), "own": rank, "rng": full(rank, 5)}

    def every(step: int, **more: Any) -> list[str]:
        made = gt.GroupStorageWriter(store)
        dcp.save(sd, checkpoint_id=str(step), storage_writer=made, **more)
        return loads_back(sd, store, step)

    found["no collectives"] = every(1, use_collectives=False)
    found["no collectives, planner"] = every(
        2, use_collectives=False, planner=gt.GroupSavePlanner()
    )
    if rank > 0:
        store2 = os.fspath(folder / "store2")
        made = gt.GroupStorageWriter(store2, process_group=group)
        options: dict[str, Any] = {"storage_writer": made, "process_group": group}
        dcp.save(sd, checkpoint_id="3", planner=gt.GroupSavePlanner(), **options)
        dcp.async_save(sd, checkpoint_id="4", **options).result()
        found["group"] = [loads_back(sd, store2, step, process_group=group) for step in (3, 4)]
    dist.barrier()
    found["alone"] = saved_alone(rank, folder, sd)
    return found | saved_by_all(rank, store, sd)


def saved_alone(rank: int, folder: Path, sd: dict[str, Any]) -> list[list[str]]:
    """One rank alone, beside the others."""
    alone = gt.GroupStorageWriter(folder / f"alone-{rank}", no_dist=True)
    options: dict[str, Any] = {"storage_writer": alone, "no_dist": True}
    dcp.save(sd, checkpoint_id="5", **options)
    dcp.async_save(sd, checkpoint_id="6", **options).result()
    where = os.fspath(folder / f"alone-{rank}")
    return [loads_back(sd, where, step, no_dist=True) for step in (5, 6)]


def saved_by_all(rank: int, store: str, sd: dict[str, Any]) -> dict[str, Any]:
    """Saves at the same time, with another stager, with odd values, with the id given before."""
    found: dict[str, Any] = {}
    made = gt.GroupStorageWriter(store)
    futures = []
    for step in (10, 11):
        sd = {**sd, "w": full(step, 700, 500)}
        # DCP's own collectives would mix on one process group.
        group = dist.new_group()
        futures.append(
            dcp.async_save(sd, checkpoint_id=str(step), storage_writer=made, process_group=group)
        )
    for future in futures:
        future.result()
    found["overlapping"] = loads_back(sd, store, 11)
    stager = DefaultStager(StagingOptions(False, False, False, False))
    staged = dcp.async_save(
        sd,
        checkpoint_id="12",
        storage_writer=made,
        planner=gt.GroupSavePlanner(),
        async_stager=stager,
    )
    getattr(staged, "upload_completion", staged).result()
    found["stager"] = loads_back(sd, store, 12)
    odd = {"r": full(1, 3 + rank) if rank else "none here", "only": rank} if rank < 2 else {"z": 1}
    dcp.save(odd, checkpoint_id="13", storage_writer=made, planner=gt.GroupSavePlanner())
    found["odd"] = loads_back(odd, store, 13)
    made.reset("run/14")
    dcp.save(sd, storage_writer=made)
    made.reset("run/15")
    dcp.async_save(sd, storage_writer=made).result()
    found["reset"] = loads_back(sd, store, 15)
    latest = wiped(sd)
    dcp.load(latest, storage_reader=gt.GroupStorageReader(store))
    found["latest"] = differences(sd, latest)
    differing = told(
        lambda: dcp.load(
            wiped(sd),
            checkpoint_id=str(14 + (rank == 1)),
            storage_reader=gt.GroupStorageReader(store),
        )
    )
    found["disagree"] = (differing["type"], differing["ordinary"], differing["message"][:40])
    return found


def test_groups_and_saves_at_the_same_time(tmp_path: Path) -> None:
    results = run_ranks(tmp_path, 3, several)
    for rank, found in results.items():
        assert found.pop("disagree")[:2] == ("InvalidInput", True)
        assert found.pop("group", [[], []]) == [[], []]
        assert found.pop("alone") == [[], []]
        assert found == {name: [] for name in found}, rank


@pytest.fixture
def single(store: str) -> Callable[..., Any]:
    """Saves a state dict of this process alone."""

    def save(sd: dict[str, Any], step: int, **more: Any) -> Any:
        options = {"checkpoint_id": str(step), "storage_writer": gt.GroupStorageWriter(store)}
        with pytest.warns(UserWarning, match="single process"):
            return dcp.save(sd, **(options | more))

    return save


def load(sd: dict[str, Any], store: str, step: int) -> None:
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(sd, checkpoint_id=str(step), storage_reader=gt.GroupStorageReader(store))


def test_damage_is_found_before_it_is_used(single: Callable[..., Any], store: str) -> None:
    single({"w": full(1, 2000, 300), "v": "x"}, 1)
    (segment,) = Path(store, "segments").glob("*")
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    failed = told(lambda: load({"w": torch.zeros(2000, 300)}, store, 1))
    assert failed["failures"] == {0: "IntegrityError"}


def test_dtypes_are_converted_and_views_filled(single: Callable[..., Any], store: str) -> None:
    saved = {
        "w": full(1, 60, 40),
        "d": full(2, 8, 3).double(),
        "u": torch.arange(9).to(torch.uint16),
    }
    single(saved, 1)
    template = {
        "w": torch.zeros(40, 60).t(),
        "d": torch.zeros(8, 3, dtype=torch.bfloat16),
        "u": torch.zeros(9, dtype=torch.uint16),
    }
    load(template, store, 1)
    assert torch.equal(template["w"], saved["w"])
    assert torch.equal(template["d"], saved["d"].to(torch.bfloat16))
    assert torch.equal(template["u"], saved["u"])
    wrong = told(lambda: load({"w": torch.zeros(60, 41)}, store, 1))
    assert "Size mismatch" in wrong["message"]


def test_what_other_savers_made_is_loaded(store: str) -> None:
    gt.save({"a": {"b": [torch.ones(3), {"c": 5}]}, "t": (1, 2)}, store, step=1).wait()
    gt.close()
    with groupio.connect(store) as client:
        client.save({"x": full(1, 4), "y": [1, "z"], "b": b"raw"}, epoch=2).wait()
    template: dict[str, Any] = {"a": {"b": [torch.zeros(3), {"c": 0}]}, "t": None}
    load(template, store, 1)
    assert template["a"]["b"][1] == {"c": 5}
    assert torch.equal(template["a"]["b"][0], torch.ones(3))
    assert template["t"] == (1, 2)
    flat: dict[str, Any] = {"y": None, "b": None}
    load(flat, store, 2)
    assert flat == {"y": [1, "z"], "b": b"raw"}


def test_objects_that_no_rule_covers(single: Callable[..., Any], store: str) -> None:
    for value, hint in (
        (torch.Generator(), "get_state"),
        ((torch.ones(2),), "make it a list"),
        (object(), "cannot be stored"),
        (torch.ones(2).to_sparse(), "sparse"),
    ):
        failed = told(lambda value=value: single({"deep": {"name": value}}, 1))
        assert failed["failures"] == {0: "InvalidInput"}, failed
        assert "deep.name" in failed["texts"][0]
        assert hint in failed["texts"][0]


def test_bad_stores() -> None:
    for make in (gt.GroupStorageWriter, gt.GroupStorageReader):
        with pytest.raises(InvalidInput):
            make("s3://bucket/x")


def test_a_store_that_is_not_there(tmp_path: Path) -> None:
    reader = gt.GroupStorageReader(tmp_path / "nothing")
    metadata = reader.read_metadata()
    with pytest.raises(groupio.NotFound):
        len(metadata.state_dict_metadata)
    failed = told(lambda: load({"w": torch.zeros(1)}, os.fspath(tmp_path / "nothing"), 1))
    assert failed["failures"] == {0: "NotFound"}
