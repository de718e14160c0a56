"""Large containers without tensors are one item, and load by the same rules as small ones."""

from __future__ import annotations

from collections import Counter, OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import groupio.torch as gt
from groupio.errors import InvalidInput, StateMismatch
from groupio.format.structure import STRUCTURE, decode_structure, encode_structure
from groupio.torch import flatten, saving
from groupio.torch.flatten import is_whole
from groupio.torch.remembered import Remembered
from groupio.torch.saving import items_of

WAIT_S = 60.0
N = 256

Pair = namedtuple("Pair", "left right")

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(autouse=True)
def lower_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flatten, "WHOLE_FROM", N)


def large(value: Callable[[int], Any] = lambda i: i * i) -> dict[int, Any]:
    return {i: value(i) for i in range(N)}


def state() -> dict[str, Any]:
    return {
        "w": torch.ones(3),
        "flat": large(),
        "rows": [{"id": i, "best": Pair(i, 0.5)} for i in range(N // 2)],
        "in": {
            "deep": OrderedDict(large(lambda i: {"x": str(i), 7: [i, {"y": None}]})),
            "lr": torch.ones(1),
        },
        "small": {1: "one", "two": {2: 2}},
    }


def blank() -> dict[str, Any]:
    return {
        "w": torch.zeros(3),
        "flat": large(lambda _: 0),
        "rows": [{"id": 0, "best": Pair(0, 0.0)} for _ in range(N // 2)],
        "in": {
            "deep": OrderedDict(large(lambda _: {"x": "", 7: [0, {"y": 1}]})),
            "lr": torch.zeros(1),
        },
        "small": {1: "", "two": {2: 0}},
    }


@pytest.fixture
def saved(store: str) -> str:
    gt.save(state(), store, step=1).wait("durable", WAIT_S)
    return store


@pytest.fixture
def item_per_leaf(store: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The same state in a store as older releases wrote it."""
    with monkeypatch.context() as patch:
        patch.setattr(flatten, "WHOLE_FROM", 1 << 40)
        patch.setattr(saving, "_remembered", Remembered())
        gt.save(state(), store, step=1, dcp_door=False).wait("durable", WAIT_S)
    return store


def test_a_large_container_is_one_item_and_a_smaller_one_is_not() -> None:
    items = items_of(state() | {"under": dict.fromkeys(range(N - 1))})
    names = [name for name in items if not name.startswith("under.")]
    assert names == ["w", "flat", "rows", "in.deep", "in.lr", "small.1", "small.two.2", STRUCTURE]
    assert len(items) == len(names) + N - 1


@pytest.mark.parametrize(
    "last",
    [torch.zeros(1), np.zeros(1), {"t": [torch.zeros(1)]}, "x" * 100, {(1, float("nan")): 1}],
    ids=["tensor", "array", "tensor deep inside", "long texts", "no key"],
)
def test_what_no_column_should_hold_is_taken_apart(
    last: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flatten, "WHOLE_BYTES_MAX", 99)
    assert is_whole(large())
    assert not is_whole({**large(), "last": last})


def test_a_module_s_versions_stay_with_its_container() -> None:
    given = OrderedDict(large())
    assert is_whole(given)
    given._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    assert not is_whole(given)


@pytest.mark.parametrize("bad", [object(), {1.5: object()}, [{"f": len}]])
def test_what_cannot_be_stored_is_named(bad: Any) -> None:
    with pytest.raises(InvalidInput, match=r"\['v'\]\['bad'\]"):
        items_of({"v": {**large(), "bad": bad}})


def test_a_container_in_itself_is_refused() -> None:
    around: dict[Any, Any] = large()
    around["me"] = {"again": around}
    with pytest.raises(InvalidInput, match="contains itself"):
        items_of({"v": around})


def test_a_record_says_which_leaves_are_whole() -> None:
    root = flatten.flatten(state())
    tokens = encode_structure(root)
    assert tokens[0] == 2
    back = decode_structure(tokens)
    wholes = [leaf.name for leaf in back.leaves() if leaf.whole]
    assert wholes == ["flat", "rows", "in.deep"]
    assert encode_structure(back) == tokens


def test_a_tree_is_used_again_only_while_the_same_is_whole() -> None:
    def names(value: Any) -> list[str]:
        return [name for name in items_of({"w": torch.ones(1), "v": value}) if name != STRUCTURE]

    assert names(large()) == ["w", "v"]
    assert names({**large(), "more": 1}) == ["w", "v"]
    assert len(names({**large(), "more": torch.ones(1)})) == N + 2
    assert names({1: 1}) == ["w", "v.1"]
    assert names(3) == ["w", "v"]


def test_a_template_is_filled_in_place(saved: str) -> None:
    into = blank()
    flat, first, deep = into["flat"], into["rows"][0], into["in"]["deep"]
    gt.load(into, saved)
    assert into["flat"] is flat
    assert into["rows"][0] is first
    assert into["in"]["deep"] is deep
    assert repr(into) == repr(state())
    assert type(first["best"]) is Pair


def test_without_a_template_all_comes_back(saved: str) -> None:
    into: dict[str, Any] = dict.fromkeys(state())
    gt.load(into, saved)
    assert str(into) == str(state())
    assert list(map(type, into["in"]["deep"])) == [int] * N
    assert type(into["in"]["deep"]) is OrderedDict


def test_a_store_with_an_item_for_each_leaf_fills_the_same_templates(item_per_leaf: str) -> None:
    into = blank()
    flat = into["flat"]
    gt.load(into, item_per_leaf)
    assert into["flat"] is flat
    assert repr(into) == repr(state())
    into = blank()
    del into["flat"][5]
    into["flat"]["new"] = 1
    with pytest.raises(StateMismatch) as found:
        gt.load(into, item_per_leaf)
    assert (found.value.missing, found.value.unexpected) == (("flat.new",), ("flat.5",))


def test_every_difference_is_listed_and_nothing_changed(saved: str) -> None:
    into = blank()
    del into["flat"][5]
    into["flat"]["new"] = 1
    into["rows"][3]["id"] = {"a": 1}
    into["rows"].pop()
    into["in"]["deep"][8]["x"] = torch.zeros(1)
    before = repr(into)
    with pytest.raises(StateMismatch) as found:
        gt.load(into, saved)
    assert found.value.missing == ("flat.new", "rows.3.id")
    assert found.value.unexpected == ("flat.5", f"rows.{N // 2 - 1}", "rows.3.id")
    assert found.value.different == ("in.deep.8.x",)
    assert repr(into) == before


def test_a_small_template_takes_its_keys_only(saved: str) -> None:
    def partial() -> dict[str, Any]:
        return blank() | {"flat": {7: 0, 9: 0}, "in": {"deep": {3: {"x": ""}}}}

    with pytest.raises(StateMismatch) as found:
        gt.load(partial(), saved)
    assert not found.value.missing
    assert len(found.value.unexpected) == N - 2 + N - 1 + 2  # "in.deep.3.7" and "in.lr" are two
    into = partial()
    report = gt.load(into, saved, strict=False)
    assert into["flat"] == {7: 49, 9: 81}
    assert into["in"] == {"deep": {3: {"x": "3"}}}
    assert "in.deep.3.7" in report.unexpected


def test_a_container_that_only_one_side_has_is_named_once(saved: str) -> None:
    into = blank() | {"other": large()}
    del into["flat"]
    into["rows"] = {"a": 1}
    with pytest.raises(StateMismatch) as found:
        gt.load(into, saved)
    assert found.value.missing == ("rows.a", "other")
    assert found.value.unexpected == ("rows", "flat")
    into = blank() | {"flat": {}}
    with pytest.raises(StateMismatch, match="is empty here"):
        gt.load(into, saved)


def test_other_classes_of_containers_are_filled_too(store: str) -> None:
    gt.save({"c": Counter(large()), "u": UserDict(large()), "p": large()}, store, step=1).wait(
        "durable", WAIT_S
    )
    into: dict[str, Any] = {
        "c": Counter(large(lambda _: 1)),
        "u": UserDict(large(lambda _: 1)),
        "p": MappingProxyType(large(lambda _: 1)),
    }
    counter = into["c"]
    gt.load(into, store)
    assert into["c"] is counter
    assert into["c"] == Counter(large())
    assert into["u"] == UserDict(large())
    assert into["p"] == large()


ROWS: dict[str, Callable[[int], Any]] = {
    "alike": lambda i: {"id": i, "loss": i / 2},
    "other order": lambda i: {"id": i, "x": 1} if i % 2 else {"x": 1, "id": i},
    "nested": lambda i: {"id": i, "best": [i, {"y": i}]},
    "no dict": lambda i: {"id": i} if i else [0],
}


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("sequence", [list, tuple])
def test_rows_are_filled_where_they_stand(store: str, kind: str, sequence: type) -> None:
    def rows() -> dict[str, Any]:
        return {
            "rows": sequence(map(ROWS[kind], range(N))),
            "by": {i: ROWS[kind](i) for i in range(N)},
        }

    gt.save(rows(), store, step=1).wait("durable", WAIT_S)
    into = rows()
    for one in (*into["rows"], *into["by"].values()):
        if isinstance(one, dict):
            one["id"] = -1
    last = into["rows"][-1], into["by"][N - 1]
    gt.load(into, store)
    assert into == rows()
    assert into["rows"][-1] is last[0]
    assert into["by"][N - 1] is last[1]


def test_rows_that_differ_are_named_and_nothing_changed(store: str) -> None:
    gt.save({"rows": [{"id": i, "x": 1} for i in range(N)]}, store, step=1).wait("durable", WAIT_S)
    into: dict[str, Any] = {"rows": [{"id": -1, "x": 0} for _ in range(N)]}
    into["rows"][5] = {"id": -1, "y": 0}
    with pytest.raises(StateMismatch) as found:
        gt.load(into, store)
    assert (found.value.missing, found.value.unexpected) == (("rows.5.y",), ("rows.5.x",))
    assert all(row["id"] == -1 for row in into["rows"])


def test_a_class_of_the_user_s_is_noted(store: str) -> None:
    class Own(dict[Any, Any]):
        pass

    handle = gt.save({"a": Own(large()), "b": {**large(), "own": Own(x=1)}}, store, step=1)
    handle.wait("durable", WAIT_S)
    assert sum("Own" in note for note in handle.times.notes) == 2
    into: dict[str, Any] = {"a": None, "b": large(lambda _: 0) | {"own": {"x": 0}}}
    notes = gt.load(into, store).notes
    assert sum("Own" in note for note in notes) == 2
    assert into["b"]["own"] == {"x": 1}


def test_equal_containers_are_loaded_as_two(store: str) -> None:
    gt.save({"a": large(), "b": large()}, store, step=1).wait("durable", WAIT_S)
    for into in ({"a": None, "b": None}, {"a": large(str), "b": large(str)}):
        gt.load(into, store)
        assert into["a"] == into["b"] == large()
        assert into["a"] is not into["b"]


def test_stock_torch_reads_the_door(saved: str) -> None:
    into = blank()
    dcp.load(into, checkpoint_id=f"{saved}/dcp/1")
    assert str(into) == str(state())
    assert Path(saved, "dcp/1/.metadata").stat().st_size < 1 << 14


def test_the_dcp_reader_gives_each_value_by_its_name(saved: str) -> None:
    into = blank()
    reader = gt.GroupStorageReader(saved)
    dcp.load(into, checkpoint_id="1", storage_reader=reader)
    assert str(into) == str(state())


def test_a_store_of_the_dcp_classes_fills_a_large_template(store: str) -> None:
    own = {"w": torch.ones(3), "flat": large()}
    dcp.save(
        own,
        checkpoint_id="1",
        storage_writer=gt.GroupStorageWriter(store),
        planner=gt.GroupSavePlanner(),
    )
    into: dict[str, Any] = {"w": torch.zeros(3), "flat": large(lambda _: 0)}
    flat = into["flat"]
    gt.load(into, store)
    assert into["flat"] is flat
    assert flat == large()
