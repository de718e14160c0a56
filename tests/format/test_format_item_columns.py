"""Item tables as columns say the same as the items, and are checked by the same rules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from format_help import sample_manifest
from hypothesis import given
from hypothesis import strategies as st

from groupio.errors import FormatError, IntegrityError, NotFound
from groupio.format.items import decode_items, decode_stored_columns, encode_items, items_id
from groupio.format.manifest import ManifestReader, encode_manifest
from groupio.model import ItemKind, ItemSpec

NAMES = st.lists(st.text("abcé.", min_size=1, max_size=5), unique=True, max_size=8)


@st.composite
def tables(draw: Any) -> list[ItemSpec]:
    items: list[ItemSpec] = []
    for name in draw(NAMES):
        kind = draw(st.sampled_from(ItemKind))
        if kind is ItemKind.TENSOR:
            extent = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
            offsets = tuple(draw(st.integers(0, size)) for size in extent)
            shape = tuple(
                draw(st.integers(0, size - lo)) for size, lo in zip(extent, offsets, strict=True)
            )
            count = 2
            for size in shape:
                count *= size
            spec = ItemSpec(name, kind, "int16", shape, extent, offsets, count, draw(st.booleans()))
        else:
            size = draw(st.integers(0, 9))
            shape = draw(st.sampled_from([(), (size,)]))
            zeros = (0,) * len(shape)
            spec = ItemSpec(name, kind, "", shape, shape, zeros, size, origin="plain")
        items.append(spec)
    return items


@given(tables())
def test_columns_give_the_items(items: list[ItemSpec]) -> None:
    table = encode_items(items)
    columns = decode_stored_columns(table, "a file", {})
    assert columns.names == tuple(item.name for item in items)
    first = 0
    for row, item in enumerate(items):
        assert columns.spec(row, first) == item
        first += len(item.shape)
    assert decode_items(table) == tuple(items)


def test_names_are_kept_once_for_equal_tables() -> None:
    known: dict[Any, Any] = {}
    one, other, third = (
        encode_items([ItemSpec(name, ItemKind.BYTES, "", (), (), (), size)])
        for name, size in (("a", 1), ("a", 2), ("b", 1))
    )
    first = decode_stored_columns(one, "f", known)
    assert decode_stored_columns(other, "f", known).names is first.names
    assert decode_stored_columns(third, "f", known).names == ("b",)
    assert len(known) == 2


def test_damaged_columns_are_refused() -> None:
    table = encode_items([ItemSpec("w", ItemKind.TENSOR, "float32", (2,), (2,), (0,), 8)])
    with pytest.raises(IntegrityError, match="a file"):
        decode_stored_columns(table[:-1], "a file", {})
    with pytest.raises(FormatError, match="not known here"):
        decode_stored_columns(table.replace(b"float32", b"float99"), "a file", {})
    wrong = bytearray(table)
    wrong[24] = 9  # the size
    with pytest.raises(IntegrityError, match="does not fit shape"):
        decode_stored_columns(bytes(wrong), "a file", {})


def test_a_manifest_gives_the_columns_of_its_members() -> None:
    manifest = sample_manifest(3)
    data = encode_manifest(manifest)
    reader = ManifestReader(lambda at, n: data[at : at + n], len(data), "x")
    for member in manifest.members:
        columns = reader.columns(member.rank)
        assert columns is reader.columns(member.rank)
        assert columns.names == tuple(item.name for item in member.items)
        assert items_id(encode_items(reader.member(member.rank).items)) == member.items_id
    with pytest.raises(NotFound, match="no member 77"):
        reader.columns(77)


def test_a_manifest_gives_each_table_once_with_the_ranks_that_have_it() -> None:
    manifest = sample_manifest(3)
    first, second, third = manifest.members
    third = replace(third, items=first.items, items_id=first.items_id)
    data = encode_manifest(replace(manifest, members=(first, second, third)))
    reader = ManifestReader(lambda at, n: data[at : at + n], len(data), "x")
    found = [(ranks, columns.shape.tolist()) for ranks, columns in reader.tables()]
    shapes = [[size for item in member.items for size in item.shape] for member in (first, second)]
    assert found == [([0, 2], shapes[0]), ([1], shapes[1])]
    assert reader._columns == {}, "the tables of a large job are not kept"


def test_items_of_equal_shape_share_it() -> None:
    table = encode_items(
        [ItemSpec(str(i), ItemKind.TENSOR, "int16", (2, 3), (2, 3), (0, 0), 12) for i in (1, 2)]
        + [ItemSpec("shard", ItemKind.TENSOR, "int16", (2, 3), (4, 3), (2, 0), 12)]
    )
    one, other, shard = decode_items(table)
    assert one.shape is other.shape
    assert one.shape is one.global_shape
    assert shard.shape is one.shape
    assert (shard.global_shape, shard.offsets) == ((4, 3), (2, 0))
