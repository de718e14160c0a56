"""Names equal those of torch.distributed.checkpoint, and the structure comes back exactly."""

from __future__ import annotations

from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from groupio.errors import FormatError, InvalidInput
from groupio.format.structure import (
    RESERVED,
    Leaf,
    decode_structure,
    encode_structure,
    path_text,
    rebuild,
)
from groupio.torch.flatten import dcp_tree, flatten

T = torch.tensor


def names(state: dict[Any, Any]) -> list[str]:
    return [leaf.name for leaf in flatten(state).leaves()]


def round_trip(state: dict[Any, Any]) -> Any:
    root = flatten(state)
    values = {leaf.name: leaf.value for leaf in root.leaves()}
    return rebuild(decode_structure(encode_structure(root)), lambda leaf: values[leaf.name])


def optimizer_state() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 3}


@pytest.mark.parametrize(
    "state",
    [
        optimizer_state(),
        {"a": {"b": {"c": T(1)}}, "x": [1, 2, [3, 4]], "y": [T(1), 2, [T(3)]], "e": []},
        {"groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]}, {"lr": 0.2}]},
        {2: T(1), 1: {2: {3: "x"}}, None: 1, False: 2},
        {"deep": [[[{"t": T(1)}]], [[1]]], "m": [[1, [2]], {"k": []}]},
        {"rng": torch.get_rng_state(), "np": np.arange(3), "s": "text", "b": b"raw", "n": None},
    ],
)
def test_names_are_those_of_dcp(state: dict[Any, Any]) -> None:
    flat, _ = flatten_state_dict(state)
    assert names(state) == list(flat)
    assert next(leaf.value for leaf in flatten(state).leaves()) is next(iter(flat.values()))


def test_structure_and_key_types_come_back() -> None:
    state = {
        "int": {0: 1.0, 1: 2.0, -3: 0.0},
        "other": {None: 1, True: 2, 2.5: 3, b"b": 4, (1, "x"): 5},
        "empty": {"d": {}, "l": [], "t": (), "o": OrderedDict()},
        "mixed": [{"x": 1}, (T(1), [T(2), {"y": None}])],
        "ordered": OrderedDict(z=1, a=2),
    }
    back = round_trip(state)
    assert repr(back) == repr(state)
    assert type(back["ordered"]) is OrderedDict
    assert [type(k) for k in back["other"]] == [type(k) for k in state["other"]]


def test_colliding_names_stay_apart() -> None:
    state = {"a.b": 1, "a": {"b": 2, 1: 3, "1": 4}, "c": [{"x": 5}], "c.0.x": 6, "c.0": {"x": 7}}
    found = names(state)
    assert len(set(found)) == len(found) == 7
    assert all(name.startswith(RESERVED) for name in found)
    assert round_trip(state) == state
    assert repr(round_trip(state)) == repr(state)


def test_names_do_not_depend_on_the_order_of_keys() -> None:
    one = {"a.b": 1, "a": {"b": 2}}
    other = {"a": {"b": 2}, "a.b": 1}
    assert sorted(names(one)) == sorted(names(other))


@pytest.mark.parametrize("key", ["", "nul\0", "\ud800", "groupio:structure", "groupio:path:['a']"])
def test_awkward_names_are_escaped_and_come_back(key: str) -> None:
    state = {key: 1, "a": 2}
    assert all(name and "\0" not in name for name in names(state))
    assert "groupio:structure" not in names(state)
    assert round_trip(state) == state


plain = st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.binary(max_size=4)
keys = st.text("ab.01", max_size=3) | st.integers(-1, 2) | st.booleans() | st.none()
nested = st.recursive(
    plain | st.just(torch.zeros(1)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
    ),
    max_leaves=12,
)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.dictionaries(keys, nested, max_size=4))
def test_any_nesting_round_trips(state: dict[Any, Any]) -> None:
    found = names(state)
    assert len(set(found)) == len(found)
    assert repr(round_trip(state)) == repr(state)


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (print, "functions are code"),
        (torch.nn.Linear(1, 1), "state_dict()"),
        (torch.tensor, "functions are code"),
        (bytearray(b"x"), "bytes(...)"),
        (torch.float32, "str(...)"),
        (torch.Generator(), "get_state()"),
        (object(), "plain values"),
    ],
)
def test_objects_are_refused_with_path_type_and_advice(value: Any, words: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        flatten({"a": [{"b": T(1)}, {"fn": value}]})
    message = str(caught.value)
    assert "['a'][1]['fn']" in message
    assert words in message
    assert type(value).__name__ in message


def test_bad_keys_roots_and_cycles_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"a key of \['a'\]"):
        flatten({"a": {object(): 1}})
    with pytest.raises(InvalidInput, match="a key of the state dict"):
        flatten({float("nan"): 1})
    with pytest.raises(InvalidInput, match="state dict is a list"):
        flatten([1])  # type: ignore[arg-type]
    loop: dict[str, Any] = {}
    loop["self"] = loop
    with pytest.raises(InvalidInput, match="contains itself"):
        flatten(loop)
    ring: list[Any] = []
    ring.append(ring)
    with pytest.raises(InvalidInput, match="contains itself"):
        flatten({"ring": ring})
    with pytest.raises(InvalidInput, match="limit is 4096"):
        flatten({"x" * 5000: 1})


class Settings(dict[str, Any]):
    pass


def test_containers_of_the_standard_library_stay_what_they_are() -> None:
    state = {
        "d": defaultdict(list, {"k": [1]}), "c": Counter({5: 2, "5": 1}), "u": UserDict({1: T(1)}),
        "q": deque([T(1), 2], 3), "p": Pair(T(1), {"x": 1}), "l": UserList([T(2)]),
        "o": OrderedDict({2: T(1)}), "odd": defaultdict(lambda: 1, x=1), "own": Settings(x=1),
    }  # fmt: skip
    back = round_trip(state)
    assert back["p"]._fields == ("a", "b")
    assert type(back["p"]).__name__ == "Pair"
    assert back["d"].default_factory is list
    assert back["q"].maxlen == 3
    for key in "dcuqlo":
        assert type(back[key]) is type(state[key])
        assert repr(back[key]) == repr(state[key])
    assert type(back["odd"]) is type(back["own"]) is dict
    was = {branch.path[0].key: branch.was for branch in flatten(state).branches() if branch.was}
    assert was == {"odd": "collections.defaultdict", "own": "test_torch_flatten.Settings"}


def test_versions_of_modules_stay_in_their_state_dict() -> None:
    state = torch.nn.Sequential(torch.nn.BatchNorm1d(2)).state_dict()
    back = round_trip({"m": state})["m"]
    assert back._metadata == state._metadata
    assert back._metadata["0"]["version"] == 2


@pytest.mark.parametrize("state", [{"a": {"x": 1}, "a.x": 2}, {"a": {1: 1, "1": 2}}])
def test_names_that_dcp_cannot_tell_apart_are_refused_with_both_paths(state: Any) -> None:
    with pytest.raises(InvalidInput) as caught:
        dcp_tree(state)
    paths = [path_text(leaf.path) for leaf in flatten(state).leaves()]
    assert all(path in caught.value.message for path in paths)
    assert round_trip(state) == state


def test_the_tree_of_dcp_has_its_names() -> None:
    state = {"t": (1, {"x": 2}), "l": [1, [T(1)]], "p": [1, 2], "c": Counter({5: 2}), "q": deque()}
    flat, _ = flatten_state_dict(state)
    assert [leaf.name for leaf in dcp_tree(state).leaves()] == list(flat)
    loop: dict[str, Any] = {"a": [{}]}
    loop["a"][0]["b"] = loop
    with pytest.raises(InvalidInput, match=r"contains itself at \['a'\]\[0\]\['b'\]"):
        dcp_tree(loop)


@pytest.mark.parametrize(
    "tokens",
    [
        None,
        [],
        [3, "{", 0],
        [1],
        [1, "="],
        [1, "{", 1],
        [1, "{", 1, "a"],
        [1, "{", "x"],
        [1, "?", 0],
        [1, 5, 0],
        [1, "{", 0, "="],
        [1, "{", 2, "a", "=", "a", "="],
        [1, "{", 1, ["a"], "="],
        [1, *["{", 1, "a"] * 200, "="],
    ],
)
def test_malformed_structure_records_are_refused(tokens: Any) -> None:
    with pytest.raises(FormatError):
        decode_structure(tokens)


def test_paths_are_written_as_in_python() -> None:
    leaf = next(iter(flatten({"a": [{1: T(0)}]}).leaves()))
    assert isinstance(leaf, Leaf)
    assert path_text(leaf.path) == "['a'][0][1]"
