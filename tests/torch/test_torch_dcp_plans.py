"""Who writes what: equal bytes on all ranks, and plans that are kept from save to save."""

from __future__ import annotations

import os
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_ranks import run_ranks, told
from dcp_states import differences, full, meshes, spread, state, wiped
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.tensor import Replicate, Shard

import groupio
import groupio.torch as gt
from groupio.client.store_reader import StoreReader
from groupio.errors import InvalidInput
from groupio.torch.dcp.names import check_names, epoch_of
from groupio.torch.dcp.split import UNIT_BYTES, Box, Shared, divide, sample_box


def carried(store: str, epoch: int) -> list[int]:
    """The bytes that each member handed over."""
    with StoreReader.open(store) as reader:
        manifest = reader.resolve(epoch)
        members = [manifest.member(rank) for rank in manifest.ranks]
        return [sum(spec.nbytes for spec in member.items) for member in members]


def llama() -> dict[str, Any]:
    """Replicated like a small llama: one large embedding, layers, many small norms."""
    layer = {"q": (512, 512), "kv": (256, 512), "up": (1376, 512), "down": (512, 1376)}
    sd: dict[str, Any] = {"embed": full(1, 8000, 512), "head": full(2, 8000, 512)}
    for number in range(4):
        for at, (name, shape) in enumerate(layer.items()):
            sd[f"layers.{number}.{name}"] = full(10 * number + at, *shape)
        sd[f"layers.{number}.norm"] = full(number, 512)
    return sd


def balanced(rank: int, folder: Path) -> Any:
    store = os.fspath(folder / "store")
    made = gt.GroupStorageWriter(store)
    planner = gt.GroupSavePlanner()
    sd = llama()
    done = dcp.save(sd, checkpoint_id="1", storage_writer=made, planner=planner)
    flat, two = meshes()
    assert two is not None
    mixed = {
        "hsdp": spread(full(1, 3000, 500), two, [Replicate(), Shard(0)]),
        "fsdp": spread(full(2, 3000, 500), flat, [Shard(0)]),
        "rep": spread(full(3, 3000, 500), flat, [Replicate()]),
        # Only one rank has it: the others carry more of the replicas.
        **({"stage": full(4, 900, 500)} if rank == 1 else {}),
    }
    dcp.save(mixed, checkpoint_id="2", storage_writer=made, planner=planner)
    # torch's own writer and reader with the same planner.
    path = folder / "stock"
    dcp.save(sd, checkpoint_id=path, planner=gt.GroupSavePlanner())
    template = wiped(sd)
    dcp.load(template, checkpoint_id=path)
    own = state(rank)
    dcp.save(own, checkpoint_id=folder / "stock2", planner=gt.GroupSavePlanner())
    template2 = wiped(own)
    dcp.load(template2, checkpoint_id=folder / "stock2")
    wanted = {**own, "own": state(0)["own"]}
    return {
        "sizes": sum(entry.size for entry in done.storage_data.values()),
        "stock": differences(sd, template),
        "stock2": differences(wanted, template2),
    }


def test_all_ranks_carry_equal_bytes(tmp_path: Path) -> None:
    found = run_ranks(tmp_path, 4, balanced)
    store = os.fspath(tmp_path / "store")
    total = sum(tensor.nbytes for tensor in llama().values())
    for epoch in (1, 2):
        loads = carried(store, epoch)
        assert max(loads) <= 1.05 * sum(loads) / 4, loads
        assert max(loads) - min(loads) < 1 << 20, loads
    # Tensors below 1 MiB are handed over by all.
    small = sum(tensor.nbytes for tensor in llama().values() if tensor.nbytes < 1 << 20)
    assert sum(carried(store, 1)) < total + 3 * small + (1 << 20)
    for result in found.values():
        assert result == {"sizes": total, "stock": [], "stock2": []}
    files = [path.stat().st_size for path in (tmp_path / "stock").glob("*.distcp")]
    assert len(files) == 4
    assert max(files) <= 1.05 * sum(files) / 4


class _Watched(gt.GroupSavePlanner):
    """Notes how many items went to the coordinator."""

    sent: list[int]

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        self.sent.append(len(plan.items))
        return plan


def cached(rank: int, folder: Path) -> Any:
    store = os.fspath(folder / "store")
    made = gt.GroupStorageWriter(store)
    planners = [_Watched(enable_plan_caching=True) for _ in range(2)]
    for planner in planners:
        planner.sent = []

    def check(step: int, sd: dict[str, Any], planner: Any) -> list[str]:
        done = dcp.save(sd, checkpoint_id=str(step), storage_writer=made, planner=planner)
        template = wiped(sd)
        dcp.load(template, checkpoint_id=str(step), storage_reader=gt.GroupStorageReader(store))
        bad = [] if done.storage_data else ["no storage data"]
        return bad + differences(sd, template)

    first, second = planners
    sd = {"a": full(1, 800, 500), "b": full(2, 30), "r": f"{rank}"}
    other = {"a": full(3, 700, 400)}
    found = [check(1, sd, first), check(2, other, second)]
    sd = {**sd, "a": full(4, 800, 500), "r": f"new {rank}"}
    found += [check(3, sd, first), check(4, other, second)]
    sd = {**sd, "a": sd["a"].bfloat16()}
    found.append(check(5, sd, first))
    if rank == 1:
        sd = {**sd, "b": full(2, 31)}
    found.append(check(6, sd, first))
    sd = {"a": {"a": sd["a"]}} if rank == 0 else sd
    failed = told(
        lambda: dcp.save(
            {"w": torch.ones(2), "x": sd}, checkpoint_id="7", storage_writer=made, planner=first
        )
    )
    # A plan that failed is not in the cache of anybody.
    broken = {"w": spread(full(1, 8, 4), meshes()[0], [Shard(0)])} if rank else {"w": full(1, 8, 4)}
    failed = told(lambda: dcp.save(broken, checkpoint_id="8", storage_writer=made, planner=second))
    found.append(check(9, other, second))
    new = _Watched(enable_plan_caching=True) if rank == 0 else second
    new.sent = []
    mixed = told(lambda: dcp.save(other, checkpoint_id="10", storage_writer=made, planner=new))
    return {
        "found": found,
        "sent": first.sent[:4],
        "failed": failed["failures"],
        "mixed": mixed["texts"],
    }


def test_plans_are_kept_by_planner_and_content(tmp_path: Path) -> None:
    for rank, result in run_ranks(tmp_path, 2, cached).items():
        assert all(one == [] for one in result["found"]), result
        # Sent, kept, sent again for another dtype; then only where something changed.
        assert result["sent"] == [3, 0, 3, 3 if rank == 1 else 0]
        assert list(result["failed"].values()) == ["InvalidInput"]
        assert "same cached plan" in result["mixed"][0]


def stale_cache(rank: int, folder: Path) -> Any:
    store = os.fspath(folder / "store")
    made = gt.GroupStorageWriter(store)
    planner = DefaultSavePlanner(enable_plan_caching=True)

    def save(step: int, tensor: torch.Tensor) -> Any:
        return told(
            lambda: dcp.save(
                {"w": tensor}, checkpoint_id=str(step), storage_writer=made, planner=planner
            )
        )

    return [save(1, full(1, 4, 4)), save(2, full(2, 4, 4)), save(3, full(3, 4, 4).bfloat16())]


def test_a_stale_plan_of_torch_is_noticed(tmp_path: Path) -> None:
    first, second, third = run_ranks(tmp_path, 1, stale_cache)[0]
    assert first["type"] == second["type"] == ""
    assert third["failures"] == {0: "InvalidInput"}, third["message"]
    assert "bfloat16" in third["texts"][0]
    with groupio.connect(tmp_path / "store", rank=0, world_size=1) as client:
        assert [info.epoch for info in client.epochs()] == [1, 2]


@pytest.mark.parametrize(
    ("text", "epoch"), [("1000", 1000), ("run/step-12", 12), ("/a/b7/3/", 3), ("step=0004", 4)]
)
def test_the_epoch_is_the_number_at_the_end(text: str, epoch: int) -> None:
    assert epoch_of(text) == epoch == epoch_of(Path(text))
    assert gt.GroupStorageWriter.validate_checkpoint_id(text)
    assert gt.GroupStorageReader.validate_checkpoint_id(text)


@pytest.mark.parametrize("text", ["", "latest", "step-3-final", "9" * 30, None, 7])
def test_other_ids_are_refused(text: Any) -> None:
    with pytest.raises(InvalidInput, match="checkpoint_id"):
        epoch_of(text)
    with pytest.raises(InvalidInput, match="checkpoint_id"):
        # None alone means to go on with the one before.
        gt.GroupStorageWriter("/store").reset(text if text is not None else object())
    assert not gt.GroupStorageWriter.validate_checkpoint_id(text)
    assert not gt.GroupStorageReader.validate_checkpoint_id(text)


@pytest.mark.parametrize("name", ["", "groupio:x", "a\0b", "x" * 5000])
def test_names_that_are_no_item_names(name: str) -> None:
    with pytest.raises(InvalidInput, match="name"):
        check_names(["good", name])


def test_unknown_verify_replicas() -> None:
    with pytest.raises(InvalidInput, match="off, sampled, full"):
        gt.GroupSavePlanner(verify_replicas="some")


@pytest.mark.parametrize("seed", range(40))
def test_divided_tensors_are_whole_and_balanced(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def pick(*choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    world = pick(2, 3, 4, 8)
    tensors = []
    for _ in range(pick(1, 5, 12)):
        sizes = tuple(pick(1, 3, 70, 1000, 4099) for _ in range(pick(1, 2, 3)))
        if prod(sizes) < 1 << 24:
            holders = pick(tuple(range(world)), tuple(range(world)), (0, world - 1))
            tensors.append(Shared(Box((5,) * len(sizes), sizes), pick(1, 2, 4), holders))
    loads = [pick(0, 1000, 1 << 20) for _ in range(world)]
    given = divide(tensors, loads)
    assert given == divide(tensors, loads)
    after = list(loads)
    for tensor, pieces in zip(tensors, given, strict=True):
        cells = torch.zeros(tensor.box.sizes, dtype=torch.uint8)
        for rank, box in pieces:
            assert rank in tensor.holders
            places = zip(box.offsets, box.sizes, strict=True)
            cells[tuple(slice(at - 5, at - 5 + size) for at, size in places)] += 1
            after[rank] += prod(box.sizes) * tensor.itemsize
        assert bool((cells == 1).all())
    free = [tensor.nbytes for tensor in tensors if len(tensor.holders) == world]
    if sum(free) > sum(max(after) - load for load in loads):
        assert max(after) - min(after) <= 4 * UNIT_BYTES


@pytest.mark.parametrize(
    ("sizes", "sample"),
    [((10,), (1,)), ((1 << 20,), (4096,)), ((1000, 8192), (1000, 16)), ((512, 64), (128, 1))],
)
def test_a_sample_is_a_box_from_the_middle(sizes: tuple[int, ...], sample: Any) -> None:
    box = sample_box(Box((7,) * len(sizes), sizes), 4)
    assert box.sizes == sample
    assert prod(box.sizes) * 4 <= 64 << 10
    for offset, size, whole in zip(*box, sizes, strict=True):
        assert offset >= 7
        assert offset + size <= 7 + whole
