"""False replicas on four real ranks: found to the byte, divided evenly, per-rank values kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import groupio
import groupio.torch as gt
from groupio.client.values import Part
from groupio.errors import InvalidInput
from groupio.format.structure import SAMPLE, owner_of, part_name
from groupio.plan.splits import SPLIT
from groupio.torch.flatten import flatten
from groupio.torch.members import Members
from groupio.torch.replicas import Sharing

WORKER = Path(__file__).with_name("replica_worker.py")
RANKS = 4
DRIFT_BYTE = 4 * 123_457


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each rank reported; the four ran once for all tests."""
    folder = tmp_path_factory.mktemp("replicas")
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(RANKS), "--monitor-interval", "0.3", str(WORKER), str(folder)),
    ]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        env=environ,
        timeout=170,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("name", "members"),
    # Of the two ranks that hold a hybrid shard none is the majority.
    [("hsdp", [1, 3]), ("experts", [3]), ("plain", [3])],
)
def test_one_flipped_bit_is_found_and_located(found: Any, name: str, members: list[int]) -> None:
    for result in found:
        error = result["full"][name]
        assert error["error"] == "ReplicaDivergence"
        assert (error["items"], error["members"]) == ([name], members)
        assert error["offsets"] == [DRIFT_BYTE]
        reference = members[0] if len(members) > 1 else 0
        told = f"{name!r} (rank {reference} and rank(s) 3 first differ at byte {DRIFT_BYTE})"
        assert told in error["message"]


def test_divided_replicas_weigh_the_same_everywhere(found: Any) -> None:
    full, off = (found[0]["divided"][verify] for verify in ("full", "off"))
    mean = sum(off["carried"]) / RANKS
    assert max(off["carried"]) <= 1.05 * mean
    # All together hand over about one copy, where each handed over a whole one.
    assert sum(off["carried"]) <= 1.01 * full["unique"]
    assert min(full["carried"]) > 3 * max(off["carried"])


def test_samples_cost_little(found: Any) -> None:
    off, sampled = (found[0]["divided"][verify] for verify in ("off", "sampled"))
    assert sum(sampled["carried"]) > sum(off["carried"])
    whole = sum(found[0]["divided"]["full"]["carried"])
    assert sum(sampled["carried"]) - sum(off["carried"]) <= 0.2 * whole


def test_divided_replicas_are_the_same_chunks(found: Any) -> None:
    """The second and third epoch store nothing anew but their own records."""
    for verify in ("off", "sampled"):
        assert found[0]["divided"][verify]["stored"] < 1 << 20


def test_divided_replicas_come_back(found: Any) -> None:
    for result in found:
        for verify in ("full", "off", "sampled"):
            assert "result" in result["divided"][verify]["loaded"], result["divided"][verify]
            assert result["divided"][verify]["equal"], verify
        assert result["divided"]["taken"]["equal"], result["divided"]["taken"]
        assert result["divided"]["taken"]["hsdp"]


def test_a_drift_of_everything_is_in_any_sample(found: Any) -> None:
    for result in found:
        error = result["drifted"]["sampled"]
        assert error["error"] == "ReplicaDivergence"
        assert error["items"]
        assert not any(name.startswith("groupio:") for name in error["items"])
        assert 3 in error["members"]
        assert "was compared" in error["message"]


def test_off_stores_what_each_holder_gave(found: Any) -> None:
    for result in found:
        drifted = result["drifted"]
        assert "error" not in drifted["off"]
        assert "result" in drifted["loaded"], drifted["loaded"]
        assert drifted["mixed"]


def test_what_off_does_is_documented() -> None:
    assert "replicas\n    that drifted apart are mixed without notice" in str(gt.save.__doc__)


def test_state_dicts_that_depend_on_the_rank_cannot_be_divided(found: Any) -> None:
    """Never a save in which a part is missing: an error on all ranks, soon."""
    for result in found:
        other, absent = result["unequal"]["other"], result["unequal"]["absent"]
        assert (other["error"], absent["error"]) == ("InvalidInput", "InvalidInput")
        assert "rank(s) 1 divide their replicated tensors otherwise" in other["message"]
        assert "only rank(s) 0, 2, 3 handed over" in absent["message"]
        assert 'verify_replicas="full"' in absent["message"]
        assert max(other["seconds"], absent["seconds"]) < 30
        assert "error" not in result["unequal"]["full"]


def test_random_states_of_one_name_come_back_to_their_ranks(found: Any) -> None:
    for rank, result in enumerate(found):
        assert "error" not in result["per rank"]["saved"]
        assert result["per rank"]["same"], rank


def test_random_states_on_fewer_ranks(found: Any) -> None:
    for rank in (0, 1):
        assert "result" in found[rank]["per rank"]["fewer"], found[rank]["per rank"]["fewer"]
        assert found[rank]["per rank"]["fewer"]["equal"], rank


def test_random_states_on_more_ranks_are_missing_where_none_were_saved(found: Any) -> None:
    for rank, result in enumerate(found):
        strict = result["per rank"]["strict"]
        assert strict["error"] == "StateMismatch"
        assert strict["untouched"]
        assert result["per rank"]["w"], "what is equal everywhere is everybody's"
        if rank < 3:
            assert result["per rank"]["missing"] == []
            assert result["per rank"]["more"]
        else:
            missing = set(result["per rank"]["missing"])
            assert {"torch", "generator", "python"} <= missing
            assert "w" not in missing
    assert {"torch", "generator", "python"} <= set(found[3]["per rank"]["strict"]["missing"])


# -- one process ---------------------------------------------------------


def divided(
    state: dict[str, Any], rank: int, *, world: int = 3, verify: str = "off", step: int = 1
) -> dict[str, Any]:
    root = flatten(state)
    items = {
        leaf.name: Part(leaf.value, tuple(leaf.value.shape), (0,) * leaf.value.ndim)
        for leaf in root.leaves()
    }
    return Sharing(verify, Members(rank, world), step, ["*"]).divide(items, root.leaves())


def test_a_word_that_is_none_of_the_three() -> None:
    with pytest.raises(InvalidInput, match="'some' must be one of off, sampled, full"):
        gt.save({}, "/nowhere", step=1, verify_replicas="some")


def test_one_rank_alone_divides_nothing(store: str) -> None:
    state = {"w": torch.randn(1 << 19)}
    gt.save(state, store, step=1, verify_replicas="sampled", replicated=["*"], dcp_door=False).wait(
        "durable", 60
    )
    into = {"w": torch.zeros(1 << 19)}
    gt.load(into, store)
    assert torch.equal(into["w"], state["w"])
    assert "w" in groupio.connect(store, rank=0, world_size=1).load()


def test_tied_tensors_stay_tied() -> None:
    """Their parts are the same memory on every rank, so that they are one item's bytes."""
    tensor = torch.randn(3, 1 << 20)
    state = {"head": tensor, "embedding": tensor, "other": torch.randn(3, 1 << 20)}
    for rank in range(3):
        items = divided(state, rank)
        one, two = items["head"], items["embedding"]
        assert one.value.data_ptr() == two.value.data_ptr()
        assert (one.offsets, one.value.shape) == (two.offsets, two.value.shape)
    total = sum(divided(state, rank)["other"].value.nbytes for rank in range(3))
    assert total == tensor.nbytes


def test_the_order_of_the_state_dict_does_not_matter() -> None:
    state = {name: torch.ones(1 << 19) for name in "abcdef"}
    back = dict(reversed(state.items()))
    for rank in range(3):
        one, two = divided(state, rank), divided(back, rank)
        assert {n: p.offsets for n, p in one.items() if n in state} == {
            n: p.offsets for n, p in two.items() if n in state
        }
        records = [p.value for items in (one, two) for n, p in items.items() if SPLIT in n]
        assert records[0] == records[1]


def test_other_shapes_give_other_records() -> None:
    records = set()
    for size in (1 << 19, 1 << 20):
        items = divided({"w": torch.ones(size)}, 0)
        records |= {p.value for name, p in items.items() if name.startswith(SPLIT)}
    assert len(records) == 2


def test_what_is_small_or_in_parts_already_is_left_whole() -> None:
    small, large = torch.ones(100), torch.ones(1 << 19)
    root = flatten({"small": small, "large": large})
    items: dict[str, Any] = {"small": Part(small), "large": Part(large)}
    items[part_name("large", 1)] = Part(large)
    assert Sharing("off", Members(0, 3), 1, ["*"]).divide(items, root.leaves()) is items
    long = "x" * 4090
    root = flatten({long: large})
    items = {long: Part(large)}
    assert Sharing("off", Members(0, 3), 1, ["*"]).divide(items, root.leaves()) is items


def test_samples_are_views_declared_replicas_and_belong_to_nobody() -> None:
    state = {"w": torch.randn(16, 1 << 20)}
    for step in range(5):
        items = divided(state, 1, verify="sampled", step=step)
        sample = items[SAMPLE + "w"]
        assert sample.replicated
        assert sample.value.nbytes == 4 << 20
        corner = sample.offsets[0]
        assert sample.value.data_ptr() == state["w"][corner].data_ptr()
        assert {owner_of(name) for name in items} == {"w", ""}
