"""The catalogue of decisions: what is written comes back, and nothing else is taken."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from groupio.errors import FormatError, IntegrityError, InvalidInput
from groupio.format import catalogue
from groupio.format.catalogue import Entry, decode_catalogue, encode_catalogue
from groupio.format.codec import encode_plain
from groupio.format.columns import pack_bytes
from groupio.format.envelope import RecordKind, wrap
from groupio.model import DecisionKey, EpochHeader

STORE = "0123456789abcdef" * 2
PATH = "store/catalogue"


def header(epoch: int, **fields: Any) -> EpochHeader:
    plain: dict[str, Any] = {
        "store_id": STORE,
        "job": "job",
        "lineage": 1,
        "epoch": epoch,
        "attempt": 1,
        "incarnation": 2,
        "world_size": 3,
        "fingerprint": b"f" * 32,
        "content_id": b"c" * 32,
        "write_id": "write",
        "created_at": 1.5,
        "bytes_logical": 1,
        "bytes_unique": 2,
        "bytes_stored": 3,
        "metadata": {"loss": 0.5, "betas": (0.9, float("inf"))},
        "replicated": ("a.*",),
        "door": "dcp",
    }
    return EpochHeader(**(plain | fields))


def entry(epoch: int, **fields: Any) -> Entry:
    return Entry.of(DecisionKey(1, epoch, 1), (1 << 64) - 1 - epoch, header(epoch, **fields))


ABORT = Entry.of(DecisionKey(2, 9, 3), 77, None)
ENTRIES = [entry(1), entry(5), ABORT]


def table(entries: Any, count: int | None = None, store: Any = STORE, **section: Any) -> bytes:
    """A catalogue whose digests are all right."""
    packed, stored = pack_bytes(msgspec.msgpack.encode(entries))
    packed = msgspec.structs.replace(packed, **section)
    number = len(entries) if count is None else count
    root = msgspec.msgpack.encode((store, number, packed))
    return wrap(RecordKind.CATALOGUE, root, [stored])


def test_what_is_written_comes_back() -> None:
    found = decode_catalogue(encode_catalogue(STORE, reversed(ENTRIES)), STORE, PATH)
    assert found == ENTRIES
    assert found[0].header(STORE, PATH) == header(1)
    assert found[2].content is None
    assert decode_catalogue(encode_catalogue(STORE, []), STORE, PATH) == []


def test_every_bit_is_under_a_digest() -> None:
    data = encode_catalogue(STORE, ENTRIES)
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1 << at % 8
        with pytest.raises((IntegrityError, FormatError)):
            decode_catalogue(bytes(changed), STORE, PATH)
    for cut in (0, 10, 64, len(data) - 1):
        with pytest.raises(IntegrityError):
            decode_catalogue(data[:cut], STORE, PATH)
    with pytest.raises(IntegrityError):
        decode_catalogue(data + b"\0", STORE, PATH)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (table(ENTRIES, store="f" * 32), "of the store f"),
        (table(ENTRIES, count=2), "3 entries and not 2"),
        (table(ENTRIES, stored=1), "does not end"),
        (table(ENTRIES, raw=1 << 40), "claims to unpack"),
        (table([ENTRIES[1], ENTRIES[0]]), "not in order"),
        (table([ENTRIES[0], ENTRIES[0]]), "not in order"),
        (table([Entry(DecisionKey(1, 1, 10**6), 1)]), "not a key"),
        (table([["x", 1, None]]), "not a catalogue"),
        (table({"a": 1}), "not a catalogue"),
        (table([[["x" * 9, b"\xff"], 1]]), "not a catalogue"),
        (wrap(RecordKind.CATALOGUE, b"\x93" * 70_000), "not a catalogue"),
        (wrap(RecordKind.ABORT, b""), "kind abort"),
    ],
)
def test_nonsense_with_right_digests(data: bytes, said: str) -> None:
    with pytest.raises((IntegrityError, FormatError), match=said):
        decode_catalogue(data, STORE, PATH)


@pytest.mark.parametrize("metadata", [b"\x01?", encode_plain([])])
def test_metadata_that_is_none(metadata: bytes) -> None:
    content = entry(1).content
    assert content is not None
    forged = Entry(DecisionKey(1, 1, 1), 1, msgspec.structs.replace(content, metadata=metadata))
    with pytest.raises(IntegrityError, match="the metadata of L"):
        forged.header(STORE, PATH)


def test_large_entries_and_old_ones_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    large = entry(7, metadata={"x": "y" * 5000})
    found = decode_catalogue(encode_catalogue(STORE, [*ENTRIES, large]), STORE, PATH)
    assert found == ENTRIES
    monkeypatch.setattr(catalogue, "CATALOGUE_BYTES_MAX", 250)
    assert decode_catalogue(encode_catalogue(STORE, ENTRIES), STORE, PATH) == ENTRIES[1:]


def test_what_could_not_be_read_is_not_written() -> None:
    with pytest.raises(InvalidInput, match="cannot be written"):
        encode_catalogue(STORE, [entry(1, world_size=0)])
    with pytest.raises(InvalidInput, match="cannot be written"):
        encode_catalogue(STORE, [entry(1, job="\ud800")])
