"""Containers and keys come back as what they were, by every way of saving and of loading."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from typer.testing import CliRunner

import groupio
import groupio.torch as gt
from groupio.cli.main import app
from groupio.errors import InvalidInput

WAIT_S = 60.0

Pair = namedtuple("Pair", "left right")

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Settings(dict[str, Any]):
    """A class of the user's own."""


class Rows(list[Any]):
    """Another one."""


def scheduler() -> dict[str, Any]:
    """What schedulers and data loaders keep; no tensors."""
    return {
        "milestones": Counter({5: 2, 30: 1}),
        "counts": defaultdict(int, {1: 2, -3: 4}),
        "order": OrderedDict(z=1, a=2),
        "window": deque([0.5, 0.25], 7),
        "best": Pair(3, (0.1, 0.2)),
        "seen": {1, "1", (2, 3)},
        "span": range(0, 10, 2),
        "keys": {1: "int", -1: {True: "nested", None: 0}, 2.5: "float"},
        "users": [UserList([1]), frozenset({2})],
        "more": SimpleNamespace(a=1, b=[Pair(1, 2)]),
    }


def text(value: Any) -> str:
    """Types and values, whatever the order of sets."""
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__}{sorted(map(text, value))}"
    if isinstance(value, dict | UserDict):
        factory = getattr(value, "default_factory", "")
        inner = [(text(key), text(one)) for key, one in value.items()]
        return f"{type(value).__name__}{factory}{inner}"
    if isinstance(value, list | tuple | deque | UserList):
        return f"{type(value).__name__}{getattr(value, 'maxlen', '')}{list(map(text, value))}"
    if isinstance(value, SimpleNamespace):
        return text(vars(value))
    return f"{type(value).__name__}:{value!r}"


def state() -> dict[str, Any]:
    return {"w": torch.ones(3), "sched": scheduler(), "step": 3}


@pytest.fixture(params=["save", "dcp.save", "dcp.async_save"])
def saved(request: pytest.FixtureRequest, store: str) -> str:
    """The store, in which epoch 1 has the state, saved in one of the ways."""
    if request.param == "save":
        gt.save(state(), store, step=1).wait("durable", WAIT_S)
        return store
    writer = gt.GroupStorageWriter(store)
    if request.param == "dcp.save":
        planner = gt.GroupSavePlanner()
        dcp.save(state(), checkpoint_id="1", storage_writer=writer, planner=planner)
    else:
        dcp.async_save(state(), checkpoint_id="1", storage_writer=writer, no_dist=True).result()
    return store


def test_types_and_keys_come_back_without_a_template(saved: str) -> None:
    into: dict[str, Any] = {"w": None, "sched": None, "step": None}
    report = gt.load(into, saved)
    assert text(into["sched"]) == text(scheduler())
    assert report.notes == ()


def blank() -> dict[str, Any]:
    made = state()
    made["w"].zero_()
    made["sched"]["milestones"].update({5: 7})
    made["sched"]["counts"].update({1: 0})
    made["sched"]["best"] = Pair(0, (0.0, 0.0))
    made["sched"]["window"] = deque([1.0])
    return made


@pytest.mark.parametrize("way", ["load", "dcp.load"])
def test_a_template_keeps_its_keys_and_gets_the_saved_types(saved: str, way: str) -> None:
    into = blank()
    counts = into["sched"]["counts"]
    if way == "load":
        gt.load(into, saved)
    else:
        dcp.load(into, checkpoint_id="1", storage_reader=gt.GroupStorageReader(saved))
    assert text(into) == text(state())
    assert into["sched"]["counts"] is counts
    # torch's planner makes tuples of the named tuples of a template before anybody reads.
    assert (type(into["sched"]["best"]) is Pair) == (way == "load")


def test_stock_torch_reads_the_door_with_the_keys_of_the_saved(saved: str) -> None:
    into = blank()
    dcp.load(into, checkpoint_id=f"{saved}/dcp/1")
    assert text(into) == text(state())


def test_the_door_needs_no_class_that_torch_loads_with_weights_only(store: str) -> None:
    values = {"c": Counter({5: 2}), "o": OrderedDict({1: 2}), "s": {1, 2}}
    gt.save({"v": values}, store, step=1).wait("durable", WAIT_S)
    data = Path(store, "dcp/1/__values.bin").read_bytes()
    meta = dcp.FileSystemReader(f"{store}/dcp/1").read_metadata()
    info = next(one for index, one in meta.storage_data.items() if index.fqn == "v")
    archive = Path(store, "one.pt")
    archive.write_bytes(data[info.offset : info.offset + info.length])
    assert text(torch.load(archive, weights_only=True)) == text(values)


def test_a_planner_of_torch_keeps_no_types_and_says_so(
    store: str, caplog: pytest.LogCaptureFixture
) -> None:
    writer = gt.GroupStorageWriter(store)
    with caplog.at_level(logging.WARNING, "groupio.torch"):
        dcp.save({"a": {7: {"x": 1}}}, checkpoint_id="1", storage_writer=writer)
    assert "save with GroupSavePlanner" in caplog.text
    into: dict[str, Any] = {"a": None}
    (note,) = gt.load(into, store).notes
    assert "['a']" in note
    assert into == {"a": {"7": {"x": 1}}}
    own = {"a": {7: {"x": 0}}}
    dcp.load(own, checkpoint_id="1", storage_reader=gt.GroupStorageReader(store))
    assert own == {"a": {7: {"x": 1}}}


def test_keys_that_look_alike_stay_apart_or_are_refused_with_both_paths(store: str) -> None:
    alike = {"k": {1: "int", "1": "str", 1.5: "float", "1.5": "text", None: 0, "None": 1}}
    gt.save(alike, store, step=1).wait("durable", WAIT_S)
    into: dict[str, Any] = {"k": None}
    gt.load(into, store)
    assert text(into) == text(alike)
    writer, planner = gt.GroupStorageWriter(store), gt.GroupSavePlanner()
    with pytest.raises(BaseException, match=r"\['k'\]\[1\] and \['k'\]\['1'\]"):
        dcp.save(alike, checkpoint_id="2", storage_writer=writer, planner=planner)
    with pytest.raises(BaseException, match=r"\['k'\]\[1\] and \['k'\]\['1'\]"):
        dcp.async_save(alike, checkpoint_id="3", storage_writer=writer, no_dist=True).result()


def test_tensors_in_containers_of_any_kind(store: str) -> None:
    one = torch.arange(3.0)
    saved = {
        "p": Pair(one, {"x": 1}),
        "q": deque([one, 2], 3),
        "u": UserDict({4: one}),
        "l": UserList([one]),
        "own": Rows([one, 1]),
    }
    handle = gt.save(saved, store, step=1)
    handle.wait("durable", WAIT_S)
    assert any("['own'] is a test_torch_types.Rows" in note for note in handle.times.notes)
    into: dict[str, Any] = dict.fromkeys(saved)
    report = gt.load(into, store)
    assert [type(value).__name__ for value in into.values()] == [
        "Pair", "deque", "UserDict", "UserList", "list"
    ]  # fmt: skip
    assert torch.equal(into["p"].left, one)
    assert into["q"].maxlen == 3
    assert report.notes == ("['own'] was saved as a test_torch_types.Rows and is loaded as a list",)
    rows = Rows([torch.zeros(3), 0])
    template = {
        "p": Pair(torch.zeros(3), {"x": 0}),
        "q": deque([torch.zeros(3), 0]),
        "u": UserDict({4: torch.zeros(3)}),
        "l": UserList([torch.zeros(3)]),
        "own": rows,
    }
    assert gt.load(template, store).notes == ()
    assert type(template["p"]) is Pair
    assert template["p"].right == {"x": 1}
    assert template["own"] is rows
    assert rows[1] == 1
    assert torch.equal(rows[0], one)


def test_classes_that_are_not_known_are_noted_by_save_and_load(store: str) -> None:
    saved = {"a": Settings(x=1), "b": {"c": [1, Rows([2])]}, "d": torch.Size([2, 3])}
    for _ in range(2):
        handle = gt.save(saved, store, step=1)
        handle.wait("durable", WAIT_S)
        notes = [note for note in handle.times.notes if "is saved as" in note]
        assert notes == [
            "['b']['c'][1] is a test_torch_types.Rows, which is saved as a list",
            "['d'] is a torch.Size, which is saved as a tuple",
            "['a'] is a test_torch_types.Settings, which is saved as a dict",
        ]
    into: dict[str, Any] = {"a": None, "b": None, "d": None}
    assert sorted(gt.load(into, store).notes) == [
        "['a'] was saved as a test_torch_types.Settings and is loaded as a dict",
        "b.c[1] was saved as a test_torch_types.Rows and is loaded as a list",
        "d was saved as a torch.Size and is loaded as a tuple",
    ]
    assert into == {"a": {"x": 1}, "b": {"c": [1, [2]]}, "d": (2, 3)}


def test_a_module_with_versions_loads_what_came_without_a_template(store: str) -> None:
    def build() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2))

    module = build()
    gt.save({"m": module.state_dict()}, store, step=1).wait("durable", WAIT_S)
    into: dict[str, Any] = {"m": None}
    gt.load(into, store)
    assert into["m"]._metadata == module.state_dict()._metadata
    build().load_state_dict(into["m"])
    own = {"m": build().state_dict()}
    own["m"]._metadata["0"]["version"] = 77
    gt.load(own, store)
    assert own["m"]._metadata["0"]["version"] == 2


def test_the_client_and_its_export_keep_the_types(store: str, tmp_path: Path) -> None:
    with groupio.connect(store, rank=0, world_size=1) as client:
        client.save(scheduler(), epoch=1).wait("durable", WAIT_S)
        assert text(client.load()) == text(scheduler())
        with pytest.raises(InvalidInput, match=r"'x'.*Settings"):
            client.save({"x": Settings()}, epoch=2)
        loop: list[Any] = []
        loop.append({"again": loop})
        with pytest.raises(InvalidInput, match=r"\[0\]\['again'\].*contains itself"):
            client.save({"x": loop}, epoch=2)
    target = tmp_path / "out"
    result = CliRunner().invoke(app, ["export", store, "--epoch", "1", "--to", os.fspath(target)])
    assert result.exit_code == 0, result.output
    found = [json.loads(path.read_text()) for path in sorted(target.rglob("item-*.json"))]
    assert {"$container": {"kind": "Counter", "content": {"$dict": [[5, 2], [30, 1]]}}} in found


@pytest.mark.parametrize("way", ["save", "dcp.save", "dcp.async_save"])
def test_a_state_dict_that_contains_itself_is_refused_with_the_path(store: str, way: str) -> None:
    loop: dict[str, Any] = {"w": torch.ones(1), "a": {"b": []}}
    loop["a"]["b"].append(loop["a"])
    with pytest.raises(BaseException, match="contains itself") as caught:
        _save_by(way, loop, store)
    assert "InvalidInput" in f"{caught.value!r} {caught.value}"


def _save_by(way: str, state_dict: dict[str, Any], store: str) -> None:
    writer = gt.GroupStorageWriter(store)
    if way == "save":
        gt.save(state_dict, store, step=1)
    elif way == "dcp.save":
        planner = gt.GroupSavePlanner()
        dcp.save(state_dict, checkpoint_id="1", storage_writer=writer, planner=planner)
    else:
        dcp.async_save(state_dict, checkpoint_id="1", storage_writer=writer, no_dist=True).result()
