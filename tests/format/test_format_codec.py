from __future__ import annotations

import copy
import pickle
import struct
from collections import (
    Counter,
    OrderedDict,
    UserDict,
    UserList,
    UserString,
    defaultdict,
    deque,
    namedtuple,
)
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from groupio.errors import FormatError, InvalidInput
from groupio.format import codec
from groupio.format.codec import Converted, decode_plain, encode_plain
from groupio.format.containers import kind_of
from groupio.format.limits import DTYPE_FIELDS_MAX, PLAIN_DEPTH_MAX


def same(a: Any, b: Any) -> bool:
    """Equal to the bit, and of the very same types."""
    kind = kind_of(a)
    if kind is not None:
        alike = kind_of(b) is kind
        if isinstance(a, set | frozenset):
            return alike and sorted(map(encode_plain, a)) == sorted(map(encode_plain, b))
        return alike and same(kind.take(a), kind.take(b))
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray | np.generic) and not isinstance(a, np.str_ | np.bytes_):
        shapes = a.dtype == b.dtype and a.shape == b.shape
        return (
            shapes
            and a.dtype.isalignedstruct == b.dtype.isalignedstruct
            and (a.tobytes() == b.tobytes())
        )
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    return bool(a == b)


floats = st.integers(0, 2**64 - 1).map(lambda n: struct.unpack("<d", struct.pack("<Q", n))[0])
numpy_dtypes = st.one_of(
    hnp.scalar_dtypes(),
    hnp.byte_string_dtypes(),
    hnp.unicode_string_dtypes(),
    st.sampled_from([np.dtype(t) for t in (ml_dtypes.bfloat16, ml_dtypes.int4, np.longlong)]),
    hnp.nested_dtypes(),
).filter(lambda dtype: not dtype.hasobject)
arrays = st.builds(
    lambda dtype, shape, seed: (
        np.frombuffer(
            np.random.default_rng(seed).bytes(max(1, int(np.prod(shape)) * dtype.itemsize)), "u1"
        )[: int(np.prod(shape)) * dtype.itemsize]
        .copy()
        .view(dtype)
        .reshape(shape)
        if dtype.itemsize and dtype.subdtype is None
        else np.zeros(shape, dtype)
    ),
    numpy_dtypes,
    hnp.array_shapes(min_dims=0, min_side=0, max_side=4),
    st.integers(0, 2**32),
)
surrogates = st.text(st.characters(categories=["Cs", "Ll", "So"]))
atoms = st.one_of(
    st.none(), st.booleans(), st.integers(), floats, st.builds(complex, floats, floats),
    surrogates, st.text(), st.binary(), st.text().map(np.str_), st.binary().map(np.bytes_),
    floats.map(np.float64), st.integers(-128, 127).map(np.int8),
    st.integers(-(2**63) + 1, 2**63 - 1).map(lambda n: np.datetime64(n, "ns")),
    st.just(ml_dtypes.bfloat16(1.5)), st.just(np.longlong(-3)),
)  # fmt: skip
Pair = namedtuple("Pair", "left right")
keys = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=3).map(frozenset),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=4,
)
values = st.recursive(
    atoms | arrays | st.just(np.void(b"abc")),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        st.dictionaries(keys, inner, max_size=3).map(lambda made: Counter() | made),
        st.dictionaries(keys, inner, max_size=3).map(UserDict),
        st.builds(
            defaultdict,
            st.sampled_from([None, int, list, set, OrderedDict]),
            st.dictionaries(keys, inner, max_size=3),
        ),
        st.dictionaries(st.sampled_from(["a", "_b", "class"]), inner).map(
            lambda made: SimpleNamespace(**made)
        ),
        st.lists(inner, max_size=3).map(UserList),
        st.builds(lambda made, n: deque(made, n), st.lists(inner), st.none() | st.integers(0, 5)),
        st.sets(keys, max_size=3),
        st.builds(Pair, inner, inner),
        st.text().map(UserString),
        st.builds(range, st.integers(), st.integers(), st.integers(1)),
        st.builds(slice, inner, inner, inner),
    ),
    max_leaves=12,
)


@given(values)
@example({1: "int", "1": "str", 1.5: b"", None: None, True is False: 0, (1, (2,)): []})
@example([2**70, -(2**70), -1, 127, 128, -128, -129, 0])
def test_a_plain_value_comes_back_bit_for_bit_with_its_types(value: Any) -> None:
    assert same(value, decode_plain(encode_plain(value)))
    assert encode_plain(value) == encode_plain(value)


@given(values)
@example([[1, 2], [], [3], (4, "x"), {"a": [5]}, {}, None, True, 1j, b"", 2**80])
@example({1: [[[]]], "1": ((), ()), (): 0})
def test_columns_come_back_bit_for_bit_with_their_types(value: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "COLUMNS_FROM", 0)
        data = encode_plain(value)
        assert encode_plain(value) == data
    assert same(value, decode_plain(data))


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((2, 3), ">f4"),
        np.asfortranarray(np.arange(6).reshape(2, 3))[::-1],
        np.zeros((), "U0"),
        np.zeros((0, 5), ml_dtypes.bfloat16),
        np.array(["a", "bcd"]),
        np.arange(5).astype("M8[25us]"),
        np.zeros(2, np.dtype([("a", "u1"), ("b", "<i8", (2, 3))], align=True)),
        np.zeros(2, np.dtype({"names": ["a"], "formats": ["u1"], "titles": ["T"], "itemsize": 9})),
        np.zeros(3, np.dtype([])),
        np.ones(2, np.longdouble).astype("G"),
    ],
    ids=str,
)
def test_arrays_of_every_kind_come_back_writable(array: np.ndarray) -> None:
    back = decode_plain(encode_plain(array))
    assert same(array, back)
    assert back.flags.writeable
    assert back.flags.c_contiguous


def test_keys_that_are_equal_but_of_other_types_stay_apart() -> None:
    for key in (1, True, 1.0, "1", b"1", np.int64(1), (1,), (True,)):
        (back,) = decode_plain(encode_plain({key: None}))
        assert same(key, back)


def test_a_structured_scalar_can_be_a_key_and_can_change_elsewhere() -> None:
    row = np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")])
    (element,) = decode_plain(encode_plain([row[0]]))
    element["a"] = 7
    row.flags.writeable = False
    (back,) = decode_plain(encode_plain({(row[0], 1): 1}))
    assert same(back, (row[0], 1))
    assert hash(back) == hash((row[0], 1))


def test_the_bytes_of_version_1_stay_as_they_are() -> None:
    value = {"a": [None, True, False, -129, 1.5, 2j], (): ("é\ud800", b"\0"), 3: np.str_("s")}
    assert encode_plain(value).hex() == (
        "016d037301616c064e54466902"
        "7fff64000000000000f83f6300000000000000000000000000000040"
        "74007402"
        "7305c3a9eda080620100"
        "690103750173"
    )
    array = np.array([[1, 2]], "<u2")
    assert same(decode_plain(encode_plain(value)), value)
    assert encode_plain([array, np.float32(1)]).hex() == (
        "016c02"
        "617306" + b"uint16".hex() + "02010204"
        "01000200"
        "677307" + b"float32".hex() + "040000803f"
    )


def test_the_bytes_of_version_2_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    value = [OrderedDict(z=1), Counter({5: 2}), Pair(1, None), deque([3], 4), {"b", "a"}]
    assert encode_plain(value).hex() == (
        "026c05"
        "780b4f726465726564446963746d0173017a690101"
        "7807436f756e7465726d01690105690102"
        "780a6e616d65647475706c65740373045061697274027304" + b"left".hex() + "7305"
        + b"right".hex() + "74026901014e"
        "780564657175657402690104" "6c01690103"
        "78037365746c02730161730162"
    )  # fmt: skip
    monkeypatch.setattr(codec, "COLUMNS_FROM", 4)
    value = {1: [], "1": [0, 300], None: [1.5], 2**70: ["x", True], 2.5: (b"y",)}
    assert encode_plain(value).hex() == (
        "024d05" "5504" "0001020003" "6931" "0109" "01000000000000000040" "7331010131" "4e00"
        "640000000000000440" "5502" "0000000001" "6c31" "00020102"
        "550400000102033200002c0164000000000000f83f7331010178540174310162310179"
    )  # fmt: skip
    assert same(decode_plain(encode_plain(value)), value)


def test_only_what_needs_it_is_of_version_2() -> None:
    assert encode_plain({"a": [1] * 100})[0] == 1
    assert encode_plain({"a": {1}})[0] == 2
    assert encode_plain([1] * 1000)[0] == 2
    assert encode_plain([1] * 1000, columns=False)[0] == 1
    with pytest.raises(FormatError, match="tag"):
        decode_plain(b"\x01" + encode_plain({1})[1:])


def test_sets_that_are_equal_are_equal_bytes() -> None:
    one, other = {"a", "b", 1, (2, "c"), None}, {None, (2, "c"), 1, "b", "a"}
    assert encode_plain(one) == encode_plain(other)
    assert encode_plain({3, 1, 2}) == encode_plain({2, 3, 1})


def test_a_million_numbers_take_columns() -> None:
    losses = {step: 1 / step for step in range(1, 100_001)}
    data = encode_plain(losses)
    assert len(data) < 12.1 * len(losses)
    assert same(decode_plain(data), losses)
    nested = [[step, float(step)] for step in range(100_000)]
    assert len(encode_plain(nested)) < 20 * len(nested)
    assert same(decode_plain(encode_plain(nested)), nested)
    scalars = [np.float32(step) for step in range(1000)]
    assert same(decode_plain(encode_plain(scalars)), scalars)


@pytest.mark.parametrize(
    "value",
    [
        [[i, str(i)] for i in range(300)],
        [(i, None, i / 2) for i in range(300)],
        [[i] * (1 + i % 2) for i in range(300)],
        [[i] * 70 for i in range(300)],
        [[] for _ in range(300)],
        [[[i]] for i in range(300)],
        [{"a": i, "b": (i,)} for i in range(300)],
        [{"a": i, "b": i} if i % 2 else {"b": i, "a": i} for i in range(300)],
        [{"a": i} if i % 2 else {"c": i} for i in range(300)],
        [{i: i, "1": i} for i in range(300)],
        [{} for _ in range(300)],
        [i if i % 3 else str(i) for i in range(300)],
    ],
    ids=str,
)
def test_rows_come_back_whether_they_are_alike_or_not(
    value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = encode_plain(value)
    assert same(decode_plain(data), value)
    monkeypatch.setattr(codec, "_LOOKED_AT_MAX", 10)
    assert encode_plain(value) == data


def test_a_value_that_stands_in_many_places_is_no_cycle() -> None:
    shared = [1, 2]
    value = [shared, [shared], (shared, [[shared]])] * 300
    assert decode_plain(encode_plain(value)) == value
    assert encode_plain(value) == encode_plain(decode_plain(encode_plain(value)))


def test_containers_of_unknown_classes_are_listed_where_that_is_asked_for() -> None:
    value = {"a": [1, Rows([2])], "d": defaultdict(lambda: 0, x=1), "many": [Rows()] * 300}
    made: list[Converted] = []
    data = encode_plain(value, converted=made)
    assert made[:2] == [
        ("['a'][1]", "test_format_codec.Rows", "list"),
        ("['d']", "collections.defaultdict", "dict"),
    ]
    assert made[-1][0] == "['many'][299]"
    read: list[Converted] = []
    back = decode_plain(data, read)
    assert read == made
    assert same(back, {"a": [1, [2]], "d": {"x": 1}, "many": [[]] * 300})
    assert same(decode_plain(data), back)


class Tally(Counter):
    pass


class Window(deque):
    pass


class Space(SimpleNamespace):
    pass


class Wrapped(Mapping):
    def __getitem__(self, key: Any) -> Any:
        return {"x": 1}[key]

    def __iter__(self) -> Iterator[str]:
        return iter("x")

    def __len__(self) -> int:
        return 1


def test_a_class_of_the_users_own_comes_back_as_its_base() -> None:
    value = [Tally(a=2), Window([1], 3), Space(a=1), Wrapped(), Rows([1])]
    made: list[Converted] = []
    back = decode_plain(encode_plain(value, converted=made))
    assert same(back, [Counter(a=2), deque([1], 3), SimpleNamespace(a=1), {"x": 1}, [1]])
    assert [one[2] for one in made] == ["Counter", "deque", "SimpleNamespace", "dict", "list"]


def test_a_named_tuple_that_came_back_can_be_copied_and_pickled() -> None:
    back = decode_plain(encode_plain(Pair(1, [2])))
    for again in (copy.deepcopy(back), pickle.loads(pickle.dumps(back))):  # noqa: S301
        assert same(again, back)
        assert again == Pair(1, [2])
        assert again.right == [2]


Hidden = namedtuple("Hidden", "a b")
Hidden.__name__ = "no name"


def test_a_named_tuple_that_cannot_be_made_again_is_refused() -> None:
    with pytest.raises(InvalidInput, match="Hidden, which cannot be stored"):
        encode_plain(Hidden(1, 2))


def test_what_is_wrong_inside_of_columns_is_told_with_its_path() -> None:
    with pytest.raises(InvalidInput, match=r"^v\[7\]\[300\] is of type object"):
        encode_plain([0] * 7 + [deque([*range(300), object()])] + [0] * 300, name="v")
    deep: Any = [1]
    for _ in range(PLAIN_DEPTH_MAX):
        deep = [deep]
    with pytest.raises(InvalidInput, match="deeper"):
        encode_plain([deep] * 300)


class Odd(np.float64):
    pass


Point = namedtuple("Point", "x")


class Rows(list):
    pass


loop: list[Any] = []
loop.append(loop)
ring: Any = {"x": deque()}
ring["x"].append(ring)


@pytest.mark.parametrize(
    ("value", "where", "kind"),
    [
        (object(), "opt is of type object", "convert it"),
        ({"a": [1, {2: object()}]}, "opt['a'][1][2] is of type object", "convert it"),
        ({Odd(1): 1}, "(the key) is of type test_format_codec.Odd", "convert"),
        ({"a": [Rows()]}, "opt['a'][0] is of type test_format_codec.Rows", "convert it"),
        (defaultdict(lambda: 0), "opt is of type collections.defaultdict", "convert it"),
        ({1, object()}, "opt{...} is of type object", "convert it"),
        (deque([0, {"x": print}]), "opt[1]['x'] is of type builtin_function", "convert it"),
        (bytearray(b"x"), "opt is of type bytearray", "convert it"),
        (Odd(1), "Odd", "convert it"),
        (np.zeros(2, object), "opt is of type numpy.ndarray with dtype object", "convert it"),
        (np.zeros(1, [("a", "O")]), "dtype [('a', 'O')]", "convert it"),
        (np.zeros(2, np.dtype(ml_dtypes.bfloat16).newbyteorder(">")), "dtype >V2", "convert it"),
        (np.rec.array([(1,)], dtype=[("a", "i4")])[0], "numpy.record", "convert it"),
        (loop, "opt[0]", "contains itself"),
        ([loop] * 500, "opt[0][0]", "contains itself"),
        ({**dict.fromkeys(range(500)), 500: ring}, "opt[500]['x'][0]", "contains itself"),
    ],
    ids=lambda v: str(v)[:20],
)
def test_what_is_not_plain_is_refused_with_its_path(value: Any, where: str, kind: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        encode_plain(value, name="opt")
    assert where in caught.value.message
    assert kind in caught.value.message
    assert len(caught.value.message) < 1000


def test_without_a_name_the_message_still_says_what_is_meant() -> None:
    with pytest.raises(InvalidInput, match="the value is of type object"):
        encode_plain(object())
    with pytest.raises(InvalidInput, match=r"^\[3\] is of type object"):
        encode_plain([0, 1, 2, object()])


def test_a_value_over_the_size_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "PLAIN_BYTES_MAX", 100)
    with pytest.raises(InvalidInput, match="larger than 100 bytes"):
        encode_plain([b"x" * 60, b"x" * 60])


def test_depth_is_limited_on_both_sides() -> None:
    deep: Any = 1
    for _ in range(PLAIN_DEPTH_MAX):
        deep = [deep]
    assert decode_plain(encode_plain(deep)) == deep
    with pytest.raises(InvalidInput, match="deeper"):
        encode_plain([deep])
    with pytest.raises(FormatError, match="nested deeper"):
        decode_plain(b"\x01" + b"l\x01" * (PLAIN_DEPTH_MAX + 1) + b"N")


HUGE = b"\xff" * 8 + b"\x7f"  # the largest number there is: 63 bits
NAME = b"s\x04int8"


BROKEN: list[tuple[str, Any]] = [
    ("OrderedDict", [1]), ("Counter", []), ("deque", (1, [1, 2])), ("deque", (-1, [])),
    ("deque", (2**70, [])), ("deque", (None, (1,))), ("defaultdict", ("eval", {})),
    ("defaultdict", (None, {})), ("UserString", b""), ("UserList", ()), ("UserDict", []),
    ("SimpleNamespace", {1: 2}), ("SimpleNamespace", []), ("range", (1, 2, 0)),
    ("range", ("", 1, 1)),
    ("slice", (1,)), ("namedtuple", ("a b", ("x",), (1,))), ("namedtuple", ("A", ("x",), (1, 2))),
    ("namedtuple", ("A", ["x"], (1,))), ("namedtuple", ("A", ("x", "x"), (1, 2))),
    ("namedtuple", ("A", (1,), (1,))), ("namedtuple", ("A", ("x",) * 300, (1,) * 300)),
    ("namedtuple", ("class", (), ())), ("namedtuple", 1), ("set", [(1, [])]), ("frozenset", [1, 1]),
    ("frozenset", [1, True]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "size"),
        (b"\x01", "size"),
        (b"\x03N", "version 3"),
        (b"\x00N", "version 0"),
        (b"\x01NN", "follow its end"),
        (b"\x01?", "tag"),
        (b"\x01s\x05abc", "too early"),
        (b"\x01s\x02\xff\xff", "UTF-8"),
        (b"\x01b" + HUGE, "too early"),
        (b"\x01b" + b"\xff" * 9, "too large"),
        (b"\x01l" + HUGE, "cannot follow"),
        (b"\x01m\x01l\x00N", "cannot be one"),
        (b"\x01m\x02NNNN", "twice"),
        (b"\x01m\x02i\x01\x01NTN", "twice"),
        (b"\x01aNN", "not a dtype"),
        (b"\x01at\x00", "not a dtype"),
        (b"\x01a" + b"s\x06object", "not a dtype"),
        (b"\x01a" + encode_plain(("array", "int8", (1.5,)))[1:], "not a dtype"),
        (b"\x01a" + encode_plain(("array", "int8", (2**70,)))[1:], "not a dtype"),
        (b"\x01a" + encode_plain(("array", "int8", 3))[1:], "not a dtype"),
        (b"\x01a" + encode_plain(("struct", 2**70, False, ()))[1:], "not a dtype"),
        (b"\x01a" + encode_plain(("struct", 1, False, (1,)))[1:], "not a dtype"),
        (b"\x01a" + encode_plain(("struct", 1, False, ((1, 2, 3),)))[1:], "not a dtype"),
        (b"\x01a" + encode_plain((np.zeros(0),))[1:], "not a dtype"),
        (
            b"\x01a"
            + encode_plain(("struct", 1, False, (0,) * (DTYPE_FIELDS_MAX + 1)), columns=False)[1:],
            "not a dtype",
        ),
        (b"\x01a" + NAME + b"\x41", "65 dimensions"),
        (b"\x01a" + NAME + b"\x01" + HUGE + b"\x01x", "do not fill"),
        (b"\x01a" + NAME + b"\x02\x00" + HUGE + b"\x00", "do not fill"),
        (b"\x01a" + NAME + b"\x01\x04\x04abc", "too early"),
        (b"\x01a" + NAME + b"\x03\x00" + (b"\x80" * 6 + b"\x20") * 2 + b"\x00", "no array"),
        (b"\x01g" + NAME + b"\x02ab", "do not fill"),
        (b"\x02x\x03abcN", "no container"),
        (b"\x02x\x03setl\x02NN", "no container"),
        (b"\x02x\x03setl\x01l\x00", "no container"),
        (b"\x02x\x03setm\x00", "no container"),
        (b"\x02x\x01?N", "another form"),
        *(
            (
                b"\x02x" + bytes([len(kind)]) + kind.encode() + encode_plain(content)[1:],
                "no container",
            )
            for kind, content in BROKEN
        ),
        (b"\x02L" + HUGE + b"N", "cannot follow"),
        (b"\x02L\x02N\x00", "cannot follow"),
        (b"\x02L\x02N\x00\x01", "stands for no value"),
        (b"\x02L\x02T\x01\x02", "stands for no value"),
        (b"\x02L\x01?\x00", "code"),
        (b"\x02L\x01U\x01\x00U\x01\x00N\x00", "code"),
        (b"\x02L\x01U\x01\x01N\x00", "no column"),
        (b"\x02L\x01U\x02\x00N\x00N\x00", "no column"),
        (b"\x02L\x01i\x03\x01\x00", "no column of ints"),
        (b"\x02L\x01b1\xff", "longer"),
        (b"\x02L\x01b1\x05abc", "longer"),
        (b"\x02L\x02b8" + (b"\xff" * 7 + b"\x7f") * 2, "longer"),
        (b"\x02L\x01s1\x01\x02ab", "as long"),
        (b"\x02M\x01l1\x00NN\x00", "cannot be one"),
        (b"\x02M\x021\x01\x011\x01\x01", "twice"),
        (b"\x02L\x01g" + b"s\x03str" + b"\x00", "dtype|column of"),
        (b"\x02L\x01g" + b"s\x03<U1" + b"\x04abcd", "a column of"),
        (b"\x02L\x01g" + NAME + b"\x02ab", "do not fill"),
        (b"\x02L\x01" + b"l1\x01" * 101 + b"N\x00", "nested deeper"),
    ],
)
def test_bytes_that_are_no_value_are_refused(data: bytes, why: str) -> None:
    with pytest.raises(FormatError, match=why):
        decode_plain(data)


def test_a_size_over_the_limit_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode_plain("x" * 100)
    monkeypatch.setattr(codec, "PLAIN_BYTES_MAX", 50)
    with pytest.raises(FormatError, match="size is not"):
        decode_plain(data)


@given(st.sampled_from([b"\x01", b"\x02", b"\x02L", b"\x02M", b"\x02x"]), st.binary(max_size=60))
def test_random_bytes_give_a_value_or_a_format_error(start: bytes, data: bytes) -> None:
    try:
        decode_plain(start + data)
    except FormatError:
        pass


@given(values, st.sampled_from([0, 256]), st.data())
def test_truncated_or_flipped_bytes_never_raise_anything_else(
    value: Any, columns_from: int, data: Any
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "COLUMNS_FROM", columns_from)
        encoded = encode_plain(value)
    with pytest.raises(FormatError):
        decode_plain(encoded[: data.draw(st.integers(0, len(encoded) - 1))])
    changed = bytearray(encoded)
    changed[data.draw(st.integers(0, len(encoded) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        decode_plain(changed)
    except FormatError:
        pass
