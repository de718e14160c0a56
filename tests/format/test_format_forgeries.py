"""Manifests whose digests are all right and whose content is nonsense."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from blake3 import blake3
from format_help import (
    KEY,
    SECTIONS,
    Forgery,
    error_of,
    flips,
    is_damage,
    reads,
    sample_items,
    sample_manifest,
    tensor,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from groupio.errors import FormatError, IntegrityError
from groupio.format.codec import encode_plain
from groupio.format.columns import ZLIB, Section, pack_array, pack_bytes
from groupio.format.items import encode_items
from groupio.format.manifest import ManifestReader, encode_manifest
from groupio.format.records import segment_name
from groupio.model import CHUNK_BYTES, DecisionKey

PATH = f"store/epochs/{KEY}"


def reader_of(data: bytes) -> ManifestReader:
    return ManifestReader(reads(data), len(data), PATH)


def forged(change: Any) -> bytes:
    forgery = Forgery(sample_manifest())
    change(forgery)
    return forgery.build()


def root(index: int, value: Any) -> Any:
    """Changes one field of the root."""
    return lambda f: f.root.__setitem__(index, value)


def array(name: str, values: Any, form: str = "<i8") -> Any:
    """Changes one array."""
    return lambda f: f.array(name, values, form)


def table(name: str, value: Any) -> Any:
    """Changes one table."""
    return lambda f: f.table(name, value)


def section(name: str, **fields: Any) -> Any:
    """Changes how a section is described."""

    def change(forgery: Forgery) -> None:
        row, stored = forgery.sections[name]
        forgery.sections[name] = (msgspec.structs.replace(row, **fields), stored)

    return change


def both(*changes: Any) -> Any:
    return lambda forgery: [change(forgery) for change in changes]


OWN = [segment_name(KEY, "node0", 0), 20480, True, 0]
OLD = [segment_name(DecisionKey(1, 4, 0), "node0", 0), 8192, False, 3]
TABLES = [pack_bytes(encode_items(sample_items(rank))) for rank in range(2)]
REFS = [pack_array(np.array([0, rank + 1], "<i4")) for rank in range(2)]
ROWS = [[0, 1], [0, 2], [1, 3], [34, 34]]


def with_blocks(*blocks: tuple[Section, bytes], rows: Any = ROWS) -> Any:
    def change(forgery: Forgery) -> None:
        forgery.blocks(*blocks)
        forgery.array("members", rows, "<i8")

    return change


def items_block(*items: Any) -> tuple[Section, bytes]:
    return pack_bytes(encode_items(items))


FORGERIES: list[tuple[str, Any, str]] = [
    ("lineage", root(2, 0), "it is the record of L0"),
    ("attempt", root(4, 10**6), "it is the record of"),
    ("world size", root(6, 0), "root cannot be read"),
    ("no world", root(6, "two"), "root cannot be read"),
    ("fingerprint", root(7, b"x" * 33), "root cannot be read"),
    ("time", root(10, float("nan")), "root cannot be read"),
    ("metadata", root(14, b"\x01?"), "its metadata"),
    ("metadata list", root(14, encode_plain([])), "not a dict"),
    ("chunk count", root(16, 2), "not listed"),
    ("huge chunk count", root(16, 1 << 60), "root cannot be read"),
    ("chunks over the digests", root(16, 1 << 26), "numbers"),
    ("member count", root(17, 3), "for 12 numbers"),
    ("root is a map", lambda f: f.root.clear(), "root cannot be read"),
    ("section too long", section("digests", stored=1 << 62), "do not fit"),
    ("section over its numbers", section("members", stored=100), "more than 64"),
    ("section digest", section("offsets", digest=bytes(32)), "digest of section offsets"),
    ("section raw", section("lengths", raw=1 << 50), "numbers"),
    ("bomb", section("segments", raw=1 << 28), "claims to unpack"),
    ("raw too small", section("segments", raw=5), "does not unpack"),
    ("encoding", section("segments", encoding=0), "two sizes"),
    ("not zlib", section("digests", encoding=ZLIB), "cannot be unpacked"),
    ("segments are no table", table("segments", 5), "section segments cannot be read"),
    ("path as a name", table("segments", [OWN, ["../x", 8192, False, 0]]), "not the name"),
    ("long name", table("segments", [OWN, ["x" * 70_000, 8192, False, 0]]), "cannot be read"),
    ("twice", table("segments", [OWN, OWN]), "a segment twice"),
    ("own of another", table("segments", [OWN, [OLD[0], 8192, True, 0]]), "not of this epoch"),
    ("small segment", table("segments", [OWN, [OLD[0], 4095, False, 0]]), "cannot be read"),
    ("negative age", table("segments", [OWN, [OLD[0], 8192, False, -1]]), "cannot be read"),
    ("segment missing", table("segments", [OWN]), "segment that is not listed"),
    ("home negative", array("homes", [1, 0, -1], "<i4"), "segment that is not listed"),
    ("empty chunk", array("lengths", [10, 24, 0]), "not 1 to"),
    ("long chunk", array("lengths", [10, 24, CHUNK_BYTES + 1]), "not 1 to"),
    ("chunk in the header", array("offsets", [4095, 4096, 4160]), "not lie inside"),
    ("chunk beyond the end", array("offsets", [8183, 4096, 4160]), "not lie inside"),
    ("far chunk", array("offsets", [4096, 4096, (1 << 63) - 1]), "not lie inside"),
    ("ranks", array("members", [[1, 0], *ROWS[1:]]), "not in order"),
    ("rank twice", array("members", [[1, 1], *ROWS[1:]]), "not in order"),
    ("negative rank", array("members", [[-1, 0], *ROWS[1:]]), "not in order"),
    ("high rank", array("members", [[0, 2], *ROWS[1:]]), "member is out of range"),
    ("negative size", array("members", [*ROWS[:3], [68, -1]]), "member is out of range"),
    ("unused block", array("members", [[0, 1], [0, 0], [1, 1], [34, 34]]), "do not fit"),
    ("no block", array("members", [[0, 1], [0, 4], [1, 3], [34, 34]]), "do not fit"),
    ("blocks are no table", table("blocks", "x"), "section blocks cannot be read"),
    ("blocks too short", lambda f: f.table("blocks", []), "do not end where it ends"),
    ("far block", table("blocks", [[1 << 60, 0, 0, bytes(32)]] * 4), "do not end"),
    ("items", with_blocks(pack_bytes(b"x"), REFS[0], TABLES[1], REFS[1]), "item table"),
    ("refs as items", with_blocks(REFS[0], REFS[1], rows=[[0, 1], [0, 0], [1, 0], [0, 0]]), "item"),
    (
        "items as refs",
        with_blocks(TABLES[0], TABLES[1], rows=[[0, 1], [0, 0], [1, 1], [9, 9]]),
        "cannot be an array|bytes for",
    ),
    (
        "high ref",
        with_blocks(TABLES[0], pack_array(np.array([0, 3], "<i4")), TABLES[1], REFS[1]),
        "chunk that is not listed",
    ),
    (
        "negative ref",
        with_blocks(TABLES[0], pack_array(np.array([0, -1], "<i4")), TABLES[1], REFS[1]),
        "chunk that is not listed",
    ),
    (
        "odd refs",
        with_blocks(TABLES[0], pack_bytes(b"abc"), TABLES[1], REFS[1]),
        "3 bytes for 0 numbers",
    ),
    (
        "refs as text",
        with_blocks(TABLES[0], pack_bytes(b"\0" * 400), TABLES[1], REFS[1]),
        "cannot be an array",
    ),
    ("one member of two", root(6, 3), "all of its 3 members"),
    ("logical", root(11, 99), "bytes_logical 99"),
    ("unique", root(12, 99), "bytes_unique 99"),
    ("stored", root(13, 99), "bytes_stored 99"),
    ("chunk twice", array("digests", [[7] * 32] * 3, "u1"), "a chunk twice"),
    ("overlap", array("offsets", [4096, 4096, 4119]), "overlap"),
    ("same place", array("offsets", [4096, 4200, 4200]), "overlap"),
    (
        "lengths of items",
        both(array("lengths", [10, 23, 24]), root(12, 57)),
        "chunks of rank 0 do not fit",
    ),
    (
        "too few refs",
        with_blocks(TABLES[0], pack_array(np.array([0], "<i4")), TABLES[1], REFS[1]),
        "chunks of rank 0 do not fit",
    ),
    (
        "alias of another grid",
        with_blocks(
            items_block(
                tensor("a", (3 << 20, 2), "uint8", itemsize=1),
                tensor("b", (6 << 20,), "uint8", itemsize=1, of=(7 << 20,), at=(1 << 20,), alias=0),
            ),
            REFS[0],
            TABLES[1],
            REFS[1],
        ),
        "the items of rank 0",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "why"), [row[1:] for row in FORGERIES], ids=[row[0] for row in FORGERIES]
)
def test_nonsense_under_right_digests_is_found(change: Any, why: str) -> None:
    with pytest.raises(IntegrityError, match=why) as caught:
        reader_of(forged(change)).verify_structure()
    assert is_damage(caught.value, PATH)


def test_refs_over_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode_manifest(sample_manifest())
    monkeypatch.setattr("groupio.format.manifest.CHUNKS_MAX", 1)
    with pytest.raises(IntegrityError, match="block 1 takes 8 bytes, more than 4"):
        reader_of(data).member(0)


def test_tables_over_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("groupio.format.manifest.ITEM_TABLE_BYTES_MAX", 2)
    raw = Section(3, 3, 0, blake3(b"abc").digest())
    for block in ((raw, b"abc"), TABLES[0]):
        with pytest.raises(IntegrityError, match="more than 2"):
            reader_of(forged(with_blocks(block, REFS[0], TABLES[1], REFS[1]))).member(0)


def test_an_unchanged_forgery_is_the_manifest() -> None:
    assert forged(lambda f: None) == encode_manifest(sample_manifest())
    rebuilt = with_blocks(TABLES[0], REFS[0], TABLES[1], REFS[1])
    assert forged(rebuilt) == encode_manifest(sample_manifest())


@settings(max_examples=200)
@given(st.data())
def test_forged_sections_never_raise_anything_else(data: Any) -> None:
    """Random bytes put under right digests: nonsense behind every check of a digest."""
    forgery = Forgery(sample_manifest())
    name = data.draw(st.sampled_from(SECTIONS))
    old = forgery.sections[name][1]
    position = data.draw(st.integers(0, max(0, len(old) - 1)))
    stored = data.draw(st.sampled_from([*flips(old, [position] * 2), b""]) | st.binary())
    row = data.draw(
        st.builds(
            Section,
            st.just(len(stored)),
            st.just(forgery.sections[name][0].raw) | st.integers(0, 1 << 40),
            st.integers(0, 2),
            st.just(blake3(stored).digest()),
        )
    )
    forgery.sections[name] = (row, stored)
    error = error_of(reader_of(forgery.build()).verify_structure)
    assert error is None or isinstance(error, IntegrityError | FormatError)


@settings(max_examples=100)
@given(st.integers(0, 18), st.recursive(st.none() | st.integers() | st.binary(), st.lists))
def test_forged_roots_never_raise_anything_else(index: int, value: Any) -> None:
    try:
        data = forged(root(index, value)) if index < 18 else forged(lambda f: f.root.pop())
    except (OverflowError, TypeError):
        return
    error = error_of(reader_of(data).verify_structure)
    assert error is None or isinstance(error, IntegrityError)
