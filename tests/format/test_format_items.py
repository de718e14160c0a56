from __future__ import annotations

import struct
import zlib
from math import prod
from typing import Any

import numpy as np
import pytest
from format_help import plain, sample_items, tensor
from hypothesis import given
from hypothesis import strategies as st

from groupio.errors import FormatError, IntegrityError, InvalidInput
from groupio.format import items as items_module
from groupio.format.items import decode_items, decode_stored_items, encode_items, items_id
from groupio.format.limits import ITEM_BYTES_MAX, ITEMS_MAX
from groupio.model import ItemKind, ItemSpec

names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)


@st.composite
def specs(draw: st.DrawFn, name: str) -> ItemSpec:
    kind = draw(st.sampled_from(list(ItemKind)))
    if kind is not ItemKind.TENSOR:
        nbytes = draw(st.integers(0, ITEM_BYTES_MAX))
        shape = draw(st.sampled_from([(), (nbytes,)]))
        return ItemSpec(
            name, kind, "", shape, shape, (0,) * len(shape), nbytes, draw(st.booleans())
        )
    dtype = draw(st.sampled_from(["float32", "bfloat16", "bool", "<U5", ">i2"]))
    itemsize = {"float32": 4, "bfloat16": 2, "bool": 1, "<U5": 20, ">i2": 2}[dtype]
    whole = tuple(draw(st.lists(st.integers(0, 50), max_size=4)))
    corner = tuple(draw(st.integers(0, extent)) for extent in whole)
    shape = tuple(draw(st.integers(0, g - o)) for g, o in zip(whole, corner, strict=True))
    nbytes = prod(shape) * itemsize
    return ItemSpec(name, kind, dtype, shape, whole, corner, nbytes, draw(st.booleans()), "torch")


@st.composite
def tables(draw: st.DrawFn) -> list[ItemSpec]:
    result: list[ItemSpec] = []
    for name in draw(st.lists(names, unique=True, max_size=6)):
        item = draw(specs(name))
        twins = [i for i, other in enumerate(result) if other.nbytes == item.nbytes]
        if twins and draw(st.booleans()):
            fields = {f: getattr(item, f) for f in ItemSpec.__struct_fields__}
            item = ItemSpec(**{**fields, "alias": draw(st.sampled_from(twins))})
        result.append(item)
    return result


@given(tables())
def test_a_table_comes_back(table: list[ItemSpec]) -> None:
    encoded = encode_items(table)
    assert decode_items(encoded) == tuple(table)
    assert encode_items(decode_items(encoded)) == encoded
    assert len(items_id(encoded)) == 32


@given(tables(), st.data())
def test_damaged_tables_give_a_table_or_a_format_error(table: list[ItemSpec], data: Any) -> None:
    encoded = bytearray(encode_items(table))
    with pytest.raises(FormatError):
        decode_items(bytes(encoded[: data.draw(st.integers(0, len(encoded) - 1))]))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        decode_items(bytes(encoded))
    except FormatError:
        pass


def test_the_bytes_of_version_1_stay_as_they_are() -> None:
    table = encode_items(sample_items(1))
    assert items_id(table).hex() == (
        "d76510e61628c87bac17fb9fd560b2f950f98be2889131c1215d037c72ecd486"
    )
    assert table.startswith(b"GITB\x01\0\0\0\x03\0\0\0\x02\0\0\0")
    assert table.endswith(b"weightstepstep againfloat32\0torch\0\0plain")
    assert len(table) == 24 + 3 * (8 + 4 + 2 * 3 + 3) + 2 * 8 * 3 + 20 + 20


def test_twenty_thousand_small_tensors_compress_to_little() -> None:
    many = [tensor(f"model.layers.{i // 10}.block{i % 10}.weight", (16,)) for i in range(20_000)]
    table = encode_items(many)
    assert decode_items(table) == tuple(many)
    assert len(zlib.compress(table, 1)) < 200_000


def test_tables_without_items_or_with_only_scalars() -> None:
    assert decode_items(encode_items([])) == ()
    scalars = [tensor("loss", ()), tensor("é/../x", ())]
    assert decode_items(encode_items(scalars)) == tuple(scalars)


SQUARE = tensor("w", (4, 4))


def changed(**fields: Any) -> ItemSpec:
    """SQUARE with other fields."""
    return ItemSpec(**{**{f: getattr(SQUARE, f) for f in ItemSpec.__struct_fields__}, **fields})


BAD_ITEMS = [
    ([changed(name="")], "name of item 0 takes 0 bytes"),
    ([SQUARE, changed(name="é" * 2049)], "name of item 1 takes 4098 bytes"),
    ([changed(name="a\ud800")], "not valid Unicode"),
    ([changed(name="a\0b")], "NUL"),
    ([SQUARE, changed(alias=0)], "'w' is used twice"),
    ([changed(offsets=(0,))], "different lengths"),
    ([changed(global_shape=(4,))], "different lengths"),
    ([changed(shape=(1,) * 65, global_shape=(1,) * 65, offsets=(0,) * 65)], "65 dimensions"),
    ([changed(dtype="float33")], "'float33' is not known"),
    ([changed(dtype="flöat")], "neither a dtype nor an origin"),
    ([changed(origin="a\0b")], "neither a dtype nor an origin"),
    ([changed(origin="x" * 65)], "neither a dtype nor an origin"),
    ([changed(nbytes=-1)], "size outside"),
    ([changed(nbytes=ITEM_BYTES_MAX + 1)], "size outside"),
    ([changed(nbytes=1 << 64)], "number in nbytes that does not fit"),
    ([changed(shape=(4, 1 << 63))], "number in shape that does not fit"),
    ([changed(nbytes=60)], "of 60 bytes does not fit shape"),
    ([changed(offsets=(-1, 0))], "does not lie inside its global shape"),
    ([changed(offsets=(0, 1))], "does not lie inside its global shape"),
    ([tensor("v", ()), changed(shape=(4, -4))], "item 'w' does not lie inside"),
    ([changed(global_shape=(4, ITEM_BYTES_MAX + 1))], "does not lie inside its global shape"),
    ([changed(global_shape=(1 << 30, 1 << 30))], "larger than 2"),
    ([SQUARE, changed(name="v", alias=1)], "'v' must share"),
    ([SQUARE, changed(name="v", alias=-2)], "'v' must share"),
    ([plain("p", 10), changed(alias=0)], "'w' must share"),
    ([changed(kind=ItemKind.BYTES)], "no tensor but has a dtype"),
    ([changed(kind=ItemKind.PLAIN, dtype="")], "no tensor but has a dtype or a shape"),
]


@pytest.mark.parametrize(("table", "why"), BAD_ITEMS, ids=[why[:30] for _, why in BAD_ITEMS])
def test_items_that_cannot_be_stored_are_refused(table: list[ItemSpec], why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        encode_items(table)


def test_limits_of_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput, match="more than"):
        encode_items([SQUARE] * (ITEMS_MAX + 1))
    table = encode_items([SQUARE])
    monkeypatch.setattr(items_module, "ITEM_TABLE_BYTES_MAX", len(table) - 1)
    with pytest.raises(InvalidInput, match="table takes"):
        encode_items([SQUARE])
    with pytest.raises(FormatError, match="larger than"):
        decode_items(table)
    with pytest.raises(InvalidInput, match="names take"):
        encode_items([changed(name="x" * len(table))])
    monkeypatch.undo()
    monkeypatch.setattr(items_module, "_WORDS_MAX", 2)
    with pytest.raises(InvalidInput, match="different dtypes"):
        encode_items([SQUARE, plain("p", 3)])
    with pytest.raises(FormatError, match="too many"):
        decode_items(TABLE)


TABLE = encode_items([SQUARE, plain("pp", 10)])
# name of a column, its bytes in TABLE
COLUMNS = [
    ("nbytes", 16), ("shape", 16), ("global", 16), ("offsets", 16), ("alias", 8),
    ("name_length", 4), ("dtype", 4), ("origin", 4), ("kind", 2), ("flags", 2), ("ndim", 2),
    ("end", 0),
]  # fmt: skip
AT = {name: 24 + sum(size for _, size in COLUMNS[:k]) for k, (name, _) in enumerate(COLUMNS)}


def patched(at: int, data: bytes) -> bytes:
    """TABLE with other bytes at ``at``."""
    return TABLE[:at] + data + TABLE[at + len(data) :]


BAD_TABLES = [
    (b"", "shorter than its header"),
    (patched(0, b"X"), "does not start"),
    (patched(4, b"\x02"), "does not start"),
    (patched(6, b"\x01"), "does not start"),
    (patched(8, b"\xff\xff\xff\xff"), "does not fit 4294967295 items"),
    (patched(12, b"\xff\xff\xff\xff"), "does not fit"),
    (TABLE + b"\0", "does not fit"),
    (patched(AT["ndim"], b"\x01\x00"), "do not add up to 2"),
    (patched(AT["name_length"], b"\x02"), "lengths of its names"),
    (patched(AT["name_length"], b"\x00\x00\x03\x00"), "empty or longer"),
    (patched(AT["end"], b"\xff"), "not UTF-8"),
    (patched(AT["end"] + 3, b"\xff"), "not ASCII"),
    (patched(AT["end"] + 1, b"\0"), "NUL"),
    (patched(AT["kind"], b"\x03"), "kind that is not known"),
    (patched(AT["flags"], b"\x02"), "flags that are not known"),
    (patched(AT["dtype"], b"\x09"), "dtype out of range"),
    (patched(AT["origin"], b"\x09"), "origin out of range"),
]


@pytest.mark.parametrize(("table", "why"), BAD_TABLES, ids=[why for _, why in BAD_TABLES])
def test_tables_that_break_a_rule_are_refused(table: bytes, why: str) -> None:
    with pytest.raises(FormatError, match=why):
        decode_items(table)
    with pytest.raises(IntegrityError, match=why) as caught:
        decode_stored_items(table, "epochs/x")
    assert caught.value.path == "epochs/x"


def test_more_items_than_allowed_are_refused_before_any_memory_is_taken() -> None:
    count = ITEMS_MAX + 1
    header = struct.pack("<4sHHIIII", b"GITB", 1, 0, count, 0, 0, 0)
    with pytest.raises(FormatError, match=f"does not fit {count} items"):
        decode_items(header + bytes(count * 21))


def test_an_unknown_dtype_is_not_called_damage() -> None:
    at = TABLE.index(b"float32")
    table = patched(at, b"float99")
    with pytest.raises(FormatError, match="'float99' is not known here"):
        decode_items(table)
    with pytest.raises(FormatError, match="epochs/x cannot be read here: dtype 'float99'"):
        decode_stored_items(table, "epochs/x")


def test_reading_does_not_depend_on_the_class_of_the_numbers() -> None:
    shape = tuple(np.array([4, 4]))
    spec = changed(shape=shape, nbytes=np.int64(64))
    (back,) = decode_stored_items(encode_items([spec]), "x")
    assert back == SQUARE
    assert {type(n) for n in (*back.shape, back.nbytes)} == {int}
