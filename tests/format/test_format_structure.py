"""The structure record: nested state dicts are named, flattened and rebuilt without torch."""

from __future__ import annotations

from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupio.errors import FormatError, InvalidInput
from groupio.format import structure
from groupio.format.structure import (
    PATHS,
    RESERVED,
    STRUCTURE,
    Branch,
    Leaf,
    Step,
    decode_structure,
    encode_structure,
    make_branch,
    name_leaves,
    owner_of,
    part_name,
    path_text,
    rebuild,
)

Pair = namedtuple("Pair", "a b")

KINDS = {dict: "dict", OrderedDict: "odict", list: "list", tuple: "tuple", Counter: "Counter",
         defaultdict: "defaultdict", UserDict: "UserDict", UserList: "UserList", deque: "deque",
         Pair: "namedtuple"}  # fmt: skip


def tree_of(value: Any, path: tuple[Step, ...] = ()) -> Branch | Leaf:
    """Every container is taken apart; everything else is a leaf."""
    if type(value) not in KINDS:
        return Leaf(path, value)
    branch = Branch(path, KINDS[type(value)])
    if isinstance(value, Pair):
        branch.detail = ("Pair", Pair._fields)
    elif isinstance(value, deque):
        branch.detail = value.maxlen
    elif isinstance(value, defaultdict):
        branch.detail = "int"
    indexed = not branch.keyed
    for key, child in enumerate(value) if indexed else value.items():
        branch.children[key] = tree_of(child, (*path, Step(key, indexed)))
    return branch


def tree(value: Any) -> Branch:
    """The named tree of a container."""
    root = tree_of(value)
    assert isinstance(root, Branch)
    name_leaves(list(root.leaves()))
    return root


def names(value: Any) -> list[str]:
    return [leaf.name for leaf in tree(value).leaves()]


def round_trip(value: Any) -> Any:
    root = tree(value)
    values = {leaf.name: leaf.value for leaf in root.leaves()}
    back = decode_structure(encode_structure(root))
    assert [leaf.path for leaf in back.leaves()] == [leaf.path for leaf in root.leaves()]
    return rebuild(back, lambda leaf: values[leaf.name])


def test_names_are_keys_and_indexes_joined_by_dots() -> None:
    state = {"model": {"a.weight": 1}, "groups": [{"lr": 2}, (3, {4: 5})], "top": 6}
    assert names(state) == ["model.a.weight", "groups.0.lr", "groups.1.0", "groups.1.1.4", "top"]


def test_structure_and_types_come_back() -> None:
    state = {
        "int": {0: 1, 1: 2, -3: 0},
        "other": {None: 1, True: 2, 2.5: 3, b"b": 4, (1, "x"): 5},
        "empty": {"d": {}, "l": [], "t": (), "o": OrderedDict()},
        "mixed": [{"x": 1}, (1, [2, {"y": None}])],
        "ordered": OrderedDict(z=1, a=2),
    }
    back = round_trip(state)
    assert repr(back) == repr(state)
    assert type(back["ordered"]) is OrderedDict
    assert [type(key) for key in back["other"]] == [type(key) for key in state["other"]]


def test_notes_come_back() -> None:
    root = tree({"a": 1, "b": [2]})
    next(root.leaves()).note = "float4_e2m1fn_x2"
    back = decode_structure(encode_structure(root))
    assert [leaf.note for leaf in back.leaves()] == ["float4_e2m1fn_x2", ""]


def test_leaves_that_are_whole_come_back() -> None:
    root = Branch((), "dict")
    root.children["a"] = Leaf((Step("a", False),), whole=True)
    root.children["b"] = Leaf((Step("b", False),))
    tokens = encode_structure(root)
    assert tokens == [2, "{", 2, "a", "#", "b", "="]
    back = decode_structure(tokens)
    assert [(leaf.name, leaf.whole) for leaf in back.leaves()] == [("a", True), ("b", False)]


def test_the_record_stays_as_it_is() -> None:
    tokens = encode_structure(tree({"a": [1, (2,)], "o": OrderedDict({3: 4})}))
    assert tokens == [1, "{", 2, "a", "[", 2, "=", "(", 1, "=", "o", "{o", 1, 3, "="]


def test_the_record_of_newer_containers_stays_as_it_is() -> None:
    root = tree({"c": Counter({5: 2}), "p": Pair(1, 2), "q": deque([3], 4)})
    branch = root.children["c"]
    assert isinstance(branch, Branch)
    branch.was = "own.Tally"
    tokens = encode_structure(root)
    assert tokens == [
        2, "{", 3, "c", "+", (None, "own.Tally"), "{Counter", 1, 5, "=",
        "p", "+", (("Pair", ("a", "b")), ""), "(namedtuple", 2, "=", "=",
        "q", "+", (4, ""), "[deque", 1, "=",
    ]  # fmt: skip
    back = decode_structure(tokens)
    assert encode_structure(back) == tokens
    assert [one.was for one in back.branches()] == ["", "own.Tally", "", ""]


def test_the_versions_of_a_module_come_back() -> None:
    root = Branch((), "odict", {"w": Leaf((Step("w", False),))}, detail={"": {"version": 2}})
    name_leaves(list(root.leaves()))
    made = rebuild(decode_structure(encode_structure(root)), lambda leaf: 1)
    assert type(made) is OrderedDict
    assert made._metadata == {"": {"version": 2}}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "tokens",
    [
        ["{", 1, "a", "+"],
        ["{", 1, "a", "+", None, "{", 0],
        ["{", 1, "a", "+", (None, 1), "{", 0],
        ["{", 1, "a", "+", (1, ""), "{", 0],
        ["{", 1, "a", "+", (1, ""), "{o", 0],
        ["{", 1, "a", "+", (None, ""), "="],
        ["{", 1, "a", "(namedtuple", 0],
        ["{", 1, "a", "+", (("A", ("x",)), ""), "(namedtuple", 0],
        ["{", 1, "a", "+", (("A", "x"), ""), "(namedtuple", 1, "="],
        ["{", 1, "a", "+", ("eval", ""), "{defaultdict", 0],
        ["{", 1, "a", "+", (0, ""), "[deque", 1, "="],
    ],
)
def test_malformed_details(tokens: list[Any]) -> None:
    with pytest.raises(FormatError, match="malformed"):
        decode_structure([2, *tokens])


def test_names_that_would_be_two_values_are_escaped() -> None:
    state = {"a.b": 1, "a": {"b": 2, 1: 3, "1": 4}, "c": [5], "c.0": 6, "free": 7}
    found = names(state)
    assert found[-1] == "free"
    assert found[:2] == ["groupio:path:['a.b']", "groupio:path:['a']['b']"]
    assert all(name.startswith(RESERVED) for name in found[:-1])
    assert len(set(found)) == len(found)
    assert round_trip(state) == state


@pytest.mark.parametrize("key", ["", "nul\0", "\ud800", STRUCTURE, PATHS, "groupio:path:['a']",
                                 "x" * 4097])  # fmt: skip
def test_names_that_no_item_may_have_are_escaped(key: str) -> None:
    if len(key) > 4096:
        with pytest.raises(InvalidInput, match="the limit is 4096"):
            tree({key: 1})
        return
    (name,) = names({key: 1})
    assert name == f"groupio:path:[{key!r}]"
    assert "\0" not in name
    name.encode()
    assert round_trip({key: 1, "a": 2}) == {key: 1, "a": 2}


def test_a_name_of_just_the_limit_is_kept() -> None:
    assert names({"x" * 4096: 1}) == ["x" * 4096]


class Twin:
    """Keys that are told apart, but not by what is shown of them."""

    def __repr__(self) -> str:
        return "twin"


def test_paths_that_read_the_same_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"two values .* \[twin\]"):
        tree({Twin(): 1, Twin(): 2})


def test_paths_are_told_as_in_python() -> None:
    path = (Step("optim", False), Step("state", False), Step(0, True))
    assert path_text(path) == "['optim']['state'][0]"


@pytest.mark.parametrize(
    ("kind", "made"),
    [("dict", {"a": 1}), ("odict", OrderedDict(a=1)), ("list", [1]), ("tuple", (1,))],
)
def test_containers_are_made_of_their_kind(kind: str, made: Any) -> None:
    found = make_branch(Branch((), kind), {"a": 1})
    assert found == made
    assert type(found) is type(made)


@pytest.mark.parametrize(
    ("tokens", "version"),
    [(None, "NoneType"), ({}, "dict"), ([], "list"), ([3, "{", 0], "3"), (["1"], "'1'")],
)
def test_records_of_another_version(tokens: Any, version: str) -> None:
    with pytest.raises(FormatError, match=f"of version '?{version}"):
        decode_structure(tokens)


@pytest.mark.parametrize(
    "tokens",
    [
        [],
        ["="],
        ["x"],
        [7],
        ["{"],
        ["{", "1", "a", "="],
        ["{", True, "a", "="],
        ["{", 2, "a", "="],
        ["{", 1, "a"],
        ["{", 2, "a", "=", "a", "="],
        ["{", 1, [], "="],
        ["{", 0, "="],
        ["[", 1, "?"],
        ["[", 1 << 62, "="],
        ["{", 1, "a"] * 102 + ["="],
    ],
)
def test_malformed_records(tokens: list[Any]) -> None:
    decode_structure([1, "{", 1, "a", "="])
    with pytest.raises(FormatError, match="malformed"):
        decode_structure([1, *tokens])


def test_depth_up_to_the_limit_is_read() -> None:
    deep: Any = 1
    for _ in range(structure.DEPTH_MAX + 1):
        deep = [deep]
    assert round_trip(deep) == deep


keys = st.text("ab.01", max_size=3) | st.integers(-1, 2) | st.booleans() | st.none()
nested = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(keys, inner, max_size=3).map(UserDict)
        | st.dictionaries(keys, st.integers(), max_size=3).map(Counter)
        | st.dictionaries(keys, inner, max_size=3).map(lambda made: defaultdict(int, made))
        | st.lists(inner, max_size=3).map(UserList)
        | st.builds(deque, st.lists(inner, max_size=3), st.none() | st.integers(0, 4))
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=12,
)


@given(st.dictionaries(keys, nested, max_size=4))
def test_any_nesting_comes_back(state: dict[Any, Any]) -> None:
    found = names(state)
    assert len(set(found)) == len(found)
    assert repr(round_trip(state)) == repr(state)


tokens_of = st.lists(
    st.sampled_from(["{", "[", "(", "{o", "{Counter", "=", "=n", "a", "b", 0, 1, 2, None, True]),
    max_size=12,
)


@given(tokens_of)
def test_any_record_is_read_or_refused(tokens: list[Any]) -> None:
    try:
        root = decode_structure([1, *tokens])
    except FormatError:
        return
    assert encode_structure(root)[1:] == tokens


@pytest.mark.parametrize("name", ["w", "groupio:path:['a']", "a:b", ""])
def test_parts_belong_to_their_tensor(name: str) -> None:
    assert part_name(name, 0) == name
    for number in (1, 2, 30):
        part = part_name(name, number)
        assert part == f"groupio:part:{number}:{name}"
        assert owner_of(part) == name
    assert owner_of(name) == name


@pytest.mark.parametrize(
    "name", [STRUCTURE, PATHS, "groupio:sample:w", "groupio:part:x:w", "groupio:part:", "groupio:"]
)
def test_records_and_samples_belong_to_nobody(name: str) -> None:
    assert owner_of(name) == ""
