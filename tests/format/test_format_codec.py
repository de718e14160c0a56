from __future__ import annotations

import struct
from collections import OrderedDict, namedtuple
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from groupio.errors import FormatError, InvalidInput
from groupio.format import codec
from groupio.format.codec import decode_plain, encode_plain
from groupio.format.limits import DTYPE_FIELDS_MAX, PLAIN_DEPTH_MAX


def same(a: Any, b: Any) -> bool:
    """Equal to the bit, and of the very same types."""
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
keys = st.recursive(atoms, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)
values = st.recursive(
    atoms | arrays | st.just(np.void(b"abc")),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
    ),
    max_leaves=12,
)


@given(values)
@example({1: "int", "1": "str", 1.5: b"", None: None, True is False: 0, (1, (2,)): []})
@example([2**70, -(2**70), -1, 127, 128, -128, -129, 0])
def test_a_plain_value_comes_back_bit_for_bit_with_its_types(value: Any) -> None:
    assert same(value, decode_plain(encode_plain(value)))
    assert encode_plain(value) == encode_plain(value)


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


class Odd(np.float64):
    pass


Point = namedtuple("Point", "x")
loop: list[Any] = []
loop.append(loop)


@pytest.mark.parametrize(
    ("value", "where", "kind"),
    [
        (object(), "opt is of type object", "convert it"),
        ({"a": [1, {2: set()}]}, "opt['a'][1][2] is of type set", "convert it"),
        ({frozenset(): 1}, "opt[<class 'frozenset'>] (the key) is of type frozenset", "convert"),
        (OrderedDict(), "opt is of type collections.OrderedDict", "convert it"),
        ([Point(1)], "Point", "convert it"),
        (bytearray(b"x"), "opt is of type bytearray", "convert it"),
        (Odd(1), "Odd", "convert it"),
        (np.zeros(2, object), "opt is of type numpy.ndarray with dtype object", "convert it"),
        (np.zeros(1, [("a", "O")]), "dtype [('a', 'O')]", "convert it"),
        (np.zeros(2, np.dtype(ml_dtypes.bfloat16).newbyteorder(">")), "dtype >V2", "convert it"),
        (np.rec.array([(1,)], dtype=[("a", "i4")])[0], "numpy.record", "convert it"),
        (loop, "opt[0][0]", "break the cycle"),
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
    with pytest.raises(InvalidInput, match="the value is of type set"):
        encode_plain(set())
    with pytest.raises(InvalidInput, match=r"^\[3\] is of type set"):
        encode_plain([0, 1, 2, set()])


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


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "size"),
        (b"\x01", "size"),
        (b"\x02N", "version 2"),
        (b"\x01NN", "follow its end"),
        (b"\x01?", "tag"),
        (b"\x01s\x05abc", "too early"),
        (b"\x01s\x02\xff\xff", "UTF-8"),
        (b"\x01b" + HUGE, "too early"),
        (b"\x01b" + b"\xff" * 9, "too large"),
        (b"\x01l" + HUGE, "cannot follow"),
        (b"\x01m\x01l\x00N", "cannot be a key"),
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
            b"\x01a" + encode_plain(("struct", 1, False, (0,) * (DTYPE_FIELDS_MAX + 1)))[1:],
            "not a dtype",
        ),
        (b"\x01a" + NAME + b"\x41", "65 dimensions"),
        (b"\x01a" + NAME + b"\x01" + HUGE + b"\x01x", "do not fill"),
        (b"\x01a" + NAME + b"\x02\x00" + HUGE + b"\x00", "do not fill"),
        (b"\x01a" + NAME + b"\x01\x04\x04abc", "too early"),
        (b"\x01a" + NAME + b"\x03\x00" + (b"\x80" * 6 + b"\x20") * 2 + b"\x00", "no array"),
        (b"\x01g" + NAME + b"\x02ab", "do not fill"),
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


@given(st.binary(max_size=60))
def test_random_bytes_give_a_value_or_a_format_error(data: bytes) -> None:
    try:
        decode_plain(b"\x01" + data)
    except FormatError:
        pass


@given(values, st.data())
def test_truncated_or_flipped_bytes_never_raise_anything_else(value: Any, data: Any) -> None:
    encoded = encode_plain(value)
    with pytest.raises(FormatError):
        decode_plain(encoded[: data.draw(st.integers(0, len(encoded) - 1))])
    changed = bytearray(encoded)
    changed[data.draw(st.integers(0, len(encoded) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        decode_plain(changed)
    except FormatError:
        pass
