"""One step in several calls: parts, each of which is an epoch of its own under one number."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_ranks import run_ranks

import groupio
import groupio.torch as gt
from groupio.cli.main import run
from groupio.errors import IntegrityError, InvalidInput, NotFound, StaleEpoch, StateMismatch

BOTH = ("model", "optimizer")


def model(step: int) -> dict[str, Any]:
    return {"w": torch.full((50, 3), float(step)), "step": step}


def optimizer(step: int) -> dict[str, Any]:
    return {"w": torch.full((50, 3), step + 0.5)}


def save_parts(store: str, step: int, *parts: str) -> None:
    for part in parts or BOTH:
        made = model(step) if part == "model" else optimizer(step)
        gt.save(made, store, step=step, part=part).wait("durable", 60)


def wiped() -> dict[Any, Any]:
    return {"model": {"w": torch.zeros(50, 3), "step": 0}, "optimizer": {"w": torch.zeros(50, 3)}}


def damage(store: str, part: str, step: int) -> None:
    folder = Path(store, "parts", part, "segments")
    segment = next(path for path in folder.iterdir() if f"E{step:020d}" in path.name)
    data = bytearray(segment.read_bytes())
    data[data.index(np.full(9, step + 0.5, np.float32).tobytes())] ^= 255
    segment.write_bytes(data)


def test_the_step_that_all_parts_have_is_loaded(store: str) -> None:
    save_parts(store, 100)
    save_parts(store, 200)
    save_parts(store, 300, "model")
    state = wiped()
    assert gt.load(state, store, parts=BOTH).step == 200
    assert state["model"]["step"] == 200
    assert torch.equal(state["optimizer"]["w"], optimizer(200)["w"])
    assert gt.load(state, store, parts=BOTH, step=100).step == 100
    assert state["model"]["step"] == 100
    with pytest.raises(NotFound, match=r"part 'optimizer'.*no epoch 300"):
        gt.load(state, store, parts=BOTH, step=300)
    with pytest.raises(NotFound, match="part 'ema' was never saved"):
        gt.load({**state, "ema": {}}, store, parts=(*BOTH, "ema"))
    assert state["model"]["step"] == 100
    save_parts(store, 400, "optimizer")
    gt.save({"w": torch.ones(3)}, store, step=400).wait("durable", 60)
    with pytest.raises(NotFound, match="the unnamed part, part 'model'"):
        gt.load({None: {}, "model": {}}, store, parts=(None, "model"))
    mixed = {None: {"w": torch.zeros(3)}, "optimizer": {"w": torch.zeros(50, 3)}}
    assert gt.load(mixed, store, parts=(None, "optimizer")).step == 400
    bad = {"model": {"w": torch.zeros(50, 3)}, "optimizer": {"w": torch.zeros(1)}}
    with pytest.raises(StateMismatch):
        gt.load(bad, store, parts=BOTH)


def test_damage_in_one_part_passes_the_step_over_in_all(store: str) -> None:
    save_parts(store, 100)
    save_parts(store, 200)
    damage(store, "optimizer", 200)
    state = wiped()
    report = gt.load(state, store, parts=BOTH, fallback=True)
    assert (report.step, [one.epoch for one in report.skipped_epochs]) == (100, [200])
    assert state["model"]["step"] == 100
    with groupio.connect(store) as client:
        found = client.load(parts=BOTH, fallback=True)
        assert found["model"]["step"] == 100
        assert [epoch for epoch, _ in client.skipped_epochs] == [200]
        assert {(one.epoch, one.part) for one in client.epochs()} == {
            (step, part) for step in (100, 200) for part in BOTH
        }


def test_a_part_that_does_not_fit_leaves_all_parts_as_they_were(store: str) -> None:
    save_parts(store, 100)
    state = wiped()
    state["optimizer"] = {"w": torch.zeros(7)}
    with pytest.raises(StateMismatch, match="Nothing was changed"):
        gt.load(state, store, parts=BOTH)
    assert (float(state["model"]["w"].sum()), state["model"]["step"]) == (0.0, 0)
    arrays = {"model": {"w": np.zeros((50, 3), np.float32)}, "optimizer": {"w": np.zeros(7)}}
    with groupio.connect(store) as client:
        with pytest.raises(InvalidInput, match="dtype"):
            client.load(parts=BOTH, into=arrays)
        arrays["optimizer"]["w"] = np.zeros(7, np.float32)
        with pytest.raises(InvalidInput, match="bytes"):
            client.load(parts=BOTH, into=arrays)
        arrays["optimizer"] = {"v": np.zeros((50, 3), np.float32)}
        with pytest.raises(NotFound, match="'v'"):
            client.load(parts=BOTH, into=arrays)
        assert not arrays["model"]["w"].any()
        arrays["optimizer"] = {"w": np.zeros((50, 3), np.float32)}
        client.load(parts=BOTH, into=arrays)
        assert [int(arrays[part]["w"][0, 0] * 2) for part in BOTH] == [200, 201]


def test_a_step_that_is_passed_over_has_replaced_no_plain_value(store: str) -> None:
    for step, extra in ((100, {"a": 1, "b": 2}), (200, {"a": torch.ones(3)})):
        gt.save({**model(step), "extra": extra}, store, step=step, part="model").wait("durable", 60)
        save_parts(store, step, "optimizer")
    damage(store, "optimizer", 200)
    state = wiped()
    state["model"]["extra"] = None
    with pytest.raises(IntegrityError):
        gt.load(state, store, parts=BOTH, step=200)
    assert (state["model"]["extra"], state["model"]["step"]) == (None, 0)
    assert gt.load(state, store, parts=BOTH, fallback=True).step == 100
    assert (state["model"]["extra"], state["model"]["step"]) == ({"a": 1, "b": 2}, 100)


def test_any_number_of_damaged_steps_is_passed_over(store: str) -> None:
    steps = range(1, 20)
    with groupio.connect(store) as client:
        for step in steps:
            for part, value in (("model", step), ("optimizer", step + 0.5)):
                items = {"w": np.full((50, 3), value, np.float32)}
                client.save(items, epoch=step, part=part).wait("durable", 60)
        for step in steps[1:]:
            damage(store, "optimizer", step)
        state = {part: {"w": torch.zeros(50, 3)} for part in BOTH}
        report = gt.load(state, store, parts=BOTH, fallback=True)
        assert (report.step, len(report.skipped_epochs)) == (1, len(steps) - 1)
        assert [float(state[part]["w"][0, 0]) for part in BOTH] == [1.0, 1.5]
        assert client.load(parts=BOTH, fallback=True)["model"]["w"][0, 0] == 1
        damage(store, "optimizer", 1)
        with pytest.raises(IntegrityError, match="epoch 19"):
            gt.load(state, store, parts=BOTH, fallback=True)
        with pytest.raises(IntegrityError, match="epoch 19"):
            client.load(parts=BOTH, fallback=True)


def test_the_core_client_saves_and_loads_parts(store: str) -> None:
    with groupio.connect(store, job="train") as client:
        for step in (1, 2):
            client.save({"a": step}, epoch=step).wait("durable", 60)
            client.save({"b": np.full(3, step)}, epoch=step, part="b.c").wait("durable", 60)
        client.save({"a": 3}, epoch=3).wait("durable", 60)
        found = client.load(parts=(None, "b.c"))
        assert found[None] == {"a": 2}
        assert found["b.c"]["b"].tolist() == [2, 2, 2]
        into = np.zeros(3, np.int64)
        client.load(1, parts=("b.c",), into={"b.c": {"b": into}})
        assert into.tolist() == [1, 1, 1]
        assert client.load() == {"a": 3}
    record = json.loads(Path(store, "parts", "b.c", "groupio.json").read_text())
    assert record["job"] == "train/b.c"


@pytest.mark.parametrize("part", ["", ".", "..", "a/b", "/a", ".hidden", "a b", "ä", "x" * 65, 7])
def test_what_is_no_name_of_a_part(store: str, part: Any) -> None:
    with pytest.raises(InvalidInput, match="part"):
        gt.save(model(1), store, step=1, part=part)
    with pytest.raises(InvalidInput, match="part"):
        gt.load(wiped(), store, parts=(part,))
    with pytest.raises(InvalidInput, match="part"):
        gt.GroupStorageWriter(store, part=part)
    with groupio.connect(store) as client:
        with pytest.raises(InvalidInput, match="part"):
            client.save({"a": 1}, epoch=1, part=part)
        with pytest.raises(InvalidInput, match="part"):
            client.load(parts=("model", part))
    assert not os.path.exists(store)


@pytest.mark.parametrize("parts", ["model", (), ("model", "model"), 3])
def test_what_are_no_parts_to_load(store: str, parts: Any) -> None:
    with pytest.raises(InvalidInput, match="parts"):
        gt.load({"model": {}}, store, parts=parts)
    with pytest.raises(InvalidInput, match="state_dict must map"):
        gt.load({"model": {}, "more": {}}, store, parts=("model",))
    with groupio.connect(store) as client, pytest.raises(InvalidInput, match="leave it out"):
        client.load(parts=("model",), names=["w"])


EARLIER = """
import sys, groupio
with groupio.connect(sys.argv[1], rank=0, world_size=1) as client:
    for step in (100, 150, 200):
        for part in ("a", "b"):
            client.save({"x": step}, epoch=step, part=part, wait_for="durable")
"""


def test_each_part_goes_on_from_an_older_step_by_itself(store: str) -> None:
    subprocess.run([sys.executable, "-c", EARLIER, store], check=True, timeout=60)
    state: dict[str, Any] = {"a": {"x": 0}, "b": {"x": 0}}
    gt.load(state, store, parts=("a", "b"), step=100)
    notes = gt.save(state["a"], store, step=150, part="a").wait("durable", 60).notes
    assert any("epoch 150 goes on after epoch 100" in note for note in notes)
    with groupio.connect(store) as client:
        shown = [(one.epoch, one.part) for one in client.epochs() if not one.abandoned]
    assert shown == [(100, "a"), (100, "b"), (150, "a"), (150, "b"), (200, "b")]
    # The newest step of all parts is no older step: part b goes on in its line.
    gt.load(state, store, parts=("a", "b"))
    with pytest.raises(StaleEpoch):
        gt.save(state["b"], store, step=160, part="b").wait("durable", 60)


def two_calls(rank: int, folder: Path) -> Any:
    """A trainer that saves model and optimizer by dcp.save, and goes back a step."""
    store = os.fspath(folder / "store")
    for step in (100, 200):
        for part, made in (("model", model(step)), ("optimizer", optimizer(step))):
            writer = gt.GroupStorageWriter(store, part=part)
            dcp.save(made, checkpoint_id=f"step-{step}", storage_writer=writer)
    found: dict[str, Any] = {}
    for part, template in wiped().items():
        reader = gt.GroupStorageReader(store, part=part)
        dcp.load(template, checkpoint_id="step-200", storage_reader=reader)
        found[part] = float(template["w"][0, 0])
    state = wiped()
    found["step"] = gt.load(state, store, parts=BOTH, step=100).step
    # What this run has saved itself is rewound only where somebody asks for it.
    for part in BOTH:
        handle = gt.save(state[part], store, step=150, part=part, rewind_to=100)
        found[f"{part} line"] = [n for n in handle.wait("durable", 60).notes if "lineage" in n]
    found["latest"] = gt.load(state, store, parts=BOTH).step
    return found


def unequal_parts(rank: int, folder: Path) -> Any:
    """Rank 1 has an optimizer of another size; then both have what was saved."""
    store = os.fspath(folder / "store")
    for step in (100, 200):
        for part, made in (("model", model(step)), ("optimizer", optimizer(step))):
            gt.save(made, store, step=step, part=part).wait("durable", 60)
    state = wiped()
    if rank == 1:
        state["optimizer"] = {"w": torch.zeros(7)}
    try:
        gt.load(state, store, parts=BOTH)
    except StateMismatch as error:
        found = {"error": error.message}
    found["before"] = (float(state["model"]["w"].sum()), state["model"]["step"])
    state["optimizer"] = wiped()["optimizer"]
    if rank == 0:
        damage(store, "optimizer", 200)
    report = gt.load(state, store, parts=BOTH, fallback=True)
    found["after"] = (report.step, [one.epoch for one in report.skipped_epochs])
    found["values"] = [float(state[part]["w"][0, 0]) for part in BOTH]
    return found


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_part_that_does_not_fit_one_rank_leaves_all_ranks_as_they_were(tmp_path: Path) -> None:
    found = run_ranks(tmp_path, 2, unequal_parts)
    assert found[0]["error"].startswith("rank 1: ")
    for one in found.values():
        assert "w (" in one["error"]
        assert one["before"] == (0.0, 0)
        assert one["after"] == (100, [200])
        assert one["values"] == [100.0, 100.5]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_ranks_save_a_step_in_two_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for found in run_ranks(tmp_path, 2, two_calls).values():
        assert (found["model"], found["optimizer"]) == (200.0, 200.5)
        assert (found["step"], found["latest"]) == (100, 150)
        assert all("after epoch 100" in found[f"{part} line"][0] for part in BOTH)
    store = os.fspath(tmp_path / "store")
    for part in BOTH:
        plain = {"w": torch.zeros(50, 3)}
        dcp.load(plain, checkpoint_id=f"{store}/parts/{part}/dcp/200", no_dist=True)
        assert float(plain["w"][0, 0]) == (200.0 if part == "model" else 200.5)
    assert run(["ls", store, "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["epochs"]
    assert [(one["epoch"], one["part"]) for one in listed if not one["abandoned"]] == [
        *((100, part) for part in ("model",)),
        *((150, part) for part in ("model",)),
        *((100, part) for part in ("optimizer",)),
        *((150, part) for part in ("optimizer",)),
    ]
    assert run(["ls", store]) == 0
    assert "optimizer" in capsys.readouterr().out
    assert run(["show", store, "150", "--part", "optimizer"]) == 0
    target = os.fspath(tmp_path / "out")
    assert run(["export", store, "150", "--to", target, "--part", "optimizer"]) == 0
    assert run(["verify", store, "--read-data"]) == 0
    assert run(["verify", store, "150"]) == 0
    assert run(["show", store, "150"]) == 2
    assert run(["show", store, "150", "--part", "a/b"]) == 2
    damage(store, "optimizer", 100)
    capsys.readouterr()
    assert run(["verify", store, "--read-data", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["damage"]
    assert found
    assert all("/parts/optimizer/" in one["path"] for one in found)
