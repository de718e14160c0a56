from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from format_help import KEY, STORE_ID, is_damage, reheaded, sample_manifest
from hypothesis import given
from hypothesis import strategies as st

from groupio.errors import FormatError, IntegrityError, InvalidInput
from groupio.format.envelope import RecordKind, wrap
from groupio.format.limits import (
    ADDRESS_MAX,
    ATTEMPT_MAX,
    LINEAGE_MAX,
    ROOT_BYTES_MAX,
    SEGMENT_SEQ_MAX,
    TERM_MAX,
)
from groupio.format.manifest import encode_manifest
from groupio.format.records import (
    AbortRecord,
    ControllerRecord,
    InflightRecord,
    StoreRecord,
    _store_check,
    controller_name,
    decode_abort,
    decode_controller,
    decode_inflight,
    decode_lineage,
    decode_record_kind,
    decode_store,
    encode_abort,
    encode_controller,
    encode_inflight,
    encode_lineage,
    encode_store,
    key_is_valid,
    lineage_name,
    parse_controller_name,
    parse_key,
    parse_lineage_name,
    parse_segment_name,
    segment_name,
)
from groupio.model import EPOCH_MAX, DecisionKey, Lineage

keys = st.builds(
    DecisionKey,
    st.integers(1, LINEAGE_MAX),
    st.integers(0, EPOCH_MAX),
    st.integers(0, ATTEMPT_MAX),
)
nodes = st.from_regex(r"[A-Za-z0-9_.]{1,64}", fullmatch=True)
texts = st.text(max_size=20)
counts = st.integers(0, 2**63 - 1)
times = st.floats(0, 1e12)
names = st.builds(segment_name, keys, nodes, st.integers(0, SEGMENT_SEQ_MAX))

ABORT = AbortRecord(KEY, 2, "rank 3 died", (3,), "w1", 1.5)
INFLIGHT = InflightRecord(
    KEY, 2, 4, "w1", 1.5, "boot", 77, 123456, "host", (segment_name(KEY, "n", 0),)
)
LINEAGE = Lineage(2, 1, 40, 1.5)
CONTROLLER = ControllerRecord(7, "tcp://n:1", "n", STORE_ID, 1.5)
STORE = StoreRecord(STORE_ID, "job é", 1, 1.5)

CODECS: list[tuple[Any, Callable[[Any], bytes], Callable[[bytes, str], Any]]] = [
    (ABORT, encode_abort, decode_abort),
    (INFLIGHT, encode_inflight, decode_inflight),
    (LINEAGE, encode_lineage, decode_lineage),
    (CONTROLLER, encode_controller, decode_controller),
    (STORE, encode_store, decode_store),
]
EACH = pytest.mark.parametrize(
    ("record", "encode", "decode"),
    CODECS,
    ids=["abort", "inflight", "lineage", "controller", "store"],
)


@given(
    st.builds(
        AbortRecord, keys, counts, texts, st.lists(st.integers(0, 99)).map(tuple), texts, times
    )
)
def test_abort_records_come_back(record: AbortRecord) -> None:
    assert decode_abort(encode_abort(record), f"epochs/{record.key}") == record


@given(
    st.builds(
        InflightRecord, keys, counts, st.integers(1, 99), texts, times, texts, counts, counts,
        texts, st.lists(names, max_size=3).map(tuple),
    )
)  # fmt: skip
def test_inflight_records_come_back(record: InflightRecord) -> None:
    assert decode_inflight(encode_inflight(record), f"inflight/{record.key}") == record


@given(st.integers(1, LINEAGE_MAX), st.data())
def test_lineages_come_back(number: int, data: Any) -> None:
    record = Lineage(
        number, data.draw(st.integers(0, number - 1)), data.draw(st.integers(-1, EPOCH_MAX)), 2.5
    )
    assert decode_lineage(encode_lineage(record), f"lineages/{lineage_name(number)}") == record


@given(
    st.builds(
        ControllerRecord,
        st.integers(1, TERM_MAX),
        st.from_regex(r"[!-~]{0,30}", fullmatch=True),
        nodes,
        st.from_regex(r"[0-9a-f]{32}", fullmatch=True),
        times,
        st.booleans(),
    )
)
def test_controller_records_come_back(record: ControllerRecord) -> None:
    path = f"controllers/{controller_name(record.term)}"
    assert decode_controller(encode_controller(record), path) == record


@given(st.builds(StoreRecord, st.just(STORE_ID), texts, st.just(1), times))
def test_store_records_come_back(record: StoreRecord) -> None:
    assert decode_store(encode_store(record), "groupio.json") == record


@EACH
def test_every_flipped_bit_is_found(record: Any, encode: Any, decode: Any) -> None:
    data = encode(record)
    for position in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            with pytest.raises(IntegrityError) as caught:
                decode(bytes(changed), "some/path")
            assert is_damage(caught.value, "some/path")


@EACH
def test_every_truncation_and_extension_is_found(record: Any, encode: Any, decode: Any) -> None:
    data = encode(record)
    for length in range(len(data)):
        with pytest.raises(IntegrityError):
            decode(data[:length], "p")
    for more in (b"\0", b" ", data):
        with pytest.raises(IntegrityError):
            decode(data + more, "p")


@EACH
@given(data=st.binary(max_size=200))
def test_random_bytes_are_damage(record: Any, encode: Any, decode: Any, data: bytes) -> None:
    with pytest.raises(IntegrityError):
        decode(data, "p")


def test_the_bytes_of_version_1_stay_as_they_are() -> None:
    assert encode_lineage(LINEAGE).hex() == (
        "475250494f52454301000400320000007200000000000000"
        "36a532a2af276e10d6a9aafff70ed64139aa73be0e328ce356cd6b658e10a6716511e64dabc36c7c"
        "84a66e756d62657202a6706172656e7401ab61667465725f65706f636828aa637265617465645f6174"
        "cb3ff8000000000000"
    )
    assert encode_abort(ABORT)[64:] == (
        b"\x86\xa3key\x83\xa7lineage\x01\xa5epoch\x05\xa7attempt\x00\xabincarnation\x02"
        b"\xa6reason\xabrank 3 died\xa7members\x91\x03\xa8write_id\xa2w1"
        b"\xa2at\xcb\x3f\xf8\0\0\0\0\0\0"
    )
    assert encode_store(STORE) == (
        b'{"store_id":"00112233445566778899aabbccddeeff","job":"job \xc3\xa9","format":1,'
        b'"created_at":1.5,"check":'
        b'"a6748427616ea04b2281fdbb54dc7e867973f5aae60e9ddc802631b0c815353a"}\n'
    )


def test_the_kind_is_read_from_the_first_64_bytes() -> None:
    records = {
        RecordKind.COMMIT: encode_manifest(sample_manifest()),
        RecordKind.ABORT: encode_abort(ABORT),
        RecordKind.INFLIGHT: encode_inflight(INFLIGHT),
        RecordKind.LINEAGE: encode_lineage(LINEAGE),
        RecordKind.CONTROLLER: encode_controller(CONTROLLER),
    }
    for kind, data in records.items():
        assert decode_record_kind(data[:64]) is kind
        with pytest.raises(IntegrityError):
            decode_record_kind(data[:63], "p")


def test_a_newer_version_or_another_kind_is_a_format_error() -> None:
    data = encode_abort(ABORT)
    for changed in (reheaded(data, version=2), reheaded(data, kind=9)):
        with pytest.raises(FormatError, match="use a newer one") as caught:
            decode_abort(changed, "p")
        assert caught.value.path == "p"
    with pytest.raises(FormatError, match="kind abort where one of kind inflight"):
        decode_inflight(data, "p")


@pytest.mark.parametrize(
    "fields", [{"magic": b"GRPIOREX"}, {"root": ROOT_BYTES_MAX + 1}, {"total": 70}, {"total": 999}]
)
def test_headers_with_a_right_digest_but_impossible_content(fields: dict[str, Any]) -> None:
    with pytest.raises(IntegrityError):
        decode_abort(reheaded(encode_abort(ABORT), **fields), "p")


@pytest.mark.parametrize(
    "root",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"key": 1}),
        b"\x91" * 50_000,
        msgspec.msgpack.encode(msgspec.structs.replace(ABORT, key=DecisionKey(0, 1, 1))),
        msgspec.msgpack.encode(msgspec.structs.asdict(ABORT) | {"members": [-1]}),
        msgspec.msgpack.encode(msgspec.structs.asdict(ABORT) | {"at": float("nan")}),
        msgspec.msgpack.encode(msgspec.structs.asdict(ABORT))[:-1],
    ],
)
def test_roots_with_a_right_digest_but_impossible_content(root: bytes) -> None:
    with pytest.raises(IntegrityError):
        decode_abort(wrap(RecordKind.ABORT, root), "p")


def test_an_array_that_claims_a_huge_count_takes_no_memory() -> None:
    root = msgspec.msgpack.encode(msgspec.structs.asdict(ABORT) | {"members": []})
    at = root.index(b"members") + 7
    huge = root[:at] + b"\xdd\xff\xff\xff\xff" + root[at + 1 :]
    with pytest.raises(IntegrityError, match="length <="):
        decode_abort(wrap(RecordKind.ABORT, huge), "p")


def test_a_record_under_the_name_of_another_is_found() -> None:
    other = DecisionKey(1, 6, 0)
    with pytest.raises(IntegrityError, match=str(KEY)):
        decode_abort(encode_abort(ABORT), f"store/epochs/{other}")
    with pytest.raises(IntegrityError):
        decode_inflight(encode_inflight(INFLIGHT), str(other))
    with pytest.raises(IntegrityError, match="lineage 2"):
        decode_lineage(encode_lineage(LINEAGE), "lineages/00000003")
    with pytest.raises(IntegrityError, match="term 7"):
        decode_controller(encode_controller(CONTROLLER), "controllers/00000008")


def changed(record: Any, **fields: Any) -> Any:
    return msgspec.structs.replace(record, **fields)


@pytest.mark.parametrize(
    ("encode", "record"),
    [
        (encode_abort, changed(ABORT, key=DecisionKey(1, 1, ATTEMPT_MAX + 1))),
        (encode_abort, changed(ABORT, reason="x" * 100_000)),
        (encode_abort, changed(ABORT, reason="\ud800")),
        (encode_abort, changed(ABORT, incarnation=1 << 70)),
        (encode_abort, changed(ABORT, at=float("nan"))),
        (encode_inflight, changed(INFLIGHT, segments=("../x",))),
        (encode_inflight, changed(INFLIGHT, world_size=0)),
        (encode_lineage, changed(LINEAGE, parent=2)),
        (encode_lineage, changed(LINEAGE, after_epoch=-2)),
        (encode_lineage, changed(LINEAGE, number=LINEAGE_MAX + 1)),
        (encode_controller, changed(CONTROLLER, term=0)),
        (encode_controller, changed(CONTROLLER, term=TERM_MAX + 1)),
        (encode_controller, changed(CONTROLLER, address="tcp://a b")),
        (encode_controller, changed(CONTROLLER, address="tcp://a\n")),
        (encode_controller, changed(CONTROLLER, address="x" * (ADDRESS_MAX + 1))),
        (encode_controller, changed(CONTROLLER, node="a/b")),
        (encode_controller, changed(CONTROLLER, node="n\n")),
        (encode_controller, changed(CONTROLLER, life="xyz")),
        (encode_controller, changed(CONTROLLER, at=-1.0)),
        (encode_store, changed(STORE, store_id="xyz")),
        (encode_store, changed(STORE, job="\ud800")),
        (encode_store, changed(STORE, format=2)),
    ],
)
def test_nothing_is_written_that_could_not_be_read(encode: Any, record: Any) -> None:
    with pytest.raises(InvalidInput):
        encode(record)


def test_store_records_of_other_formats_and_sizes() -> None:
    with pytest.raises(IntegrityError, match="too many"):
        decode_store(b" " * (ROOT_BYTES_MAX + 1), "p")
    with pytest.raises(IntegrityError, match="not the record of a store"):
        decode_store(b"[" * 100_000, "p")
    newer = encode_store(STORE).replace(b'"format":1', b'"format":2')
    with pytest.raises(IntegrityError):
        decode_store(newer, "p")
    fields = msgspec.structs.asdict(changed(STORE, format=2))
    fields["check"] = _store_check(changed(STORE, format=2))
    with pytest.raises(FormatError, match="store format 2"):
        decode_store(msgspec.json.encode(fields) + b"\n", "p")


@given(keys, nodes, st.integers(0, SEGMENT_SEQ_MAX))
def test_names_lead_back(key: DecisionKey, node: str, seq: int) -> None:
    assert parse_key(str(key)) == key
    assert key_is_valid(key)
    assert parse_segment_name(segment_name(key, node, seq)) == (key, node, seq)
    number = max(1, seq)
    assert parse_lineage_name(lineage_name(number)) == number


@pytest.mark.parametrize(
    "name",
    [
        "",
        str(KEY)[:-1],
        str(KEY) + "\n",
        str(DecisionKey(0, 1, 1)),
        str(KEY).replace("5", "\N{ARABIC-INDIC DIGIT FIVE}"),
        "L00000001-E99999999999999999999-A000000",
        "../" + str(KEY),
    ],
)
def test_names_of_no_key(name: str) -> None:
    assert parse_key(name) is None
    assert parse_segment_name(f"{name}-node-0000.seg") is None


@pytest.mark.parametrize("tail", ["-n-00001.seg", "-n-1.seg", "-a/b-0001.seg", "-n-0001.tmp", ""])
def test_names_of_no_segment(tail: str) -> None:
    assert parse_segment_name(f"{KEY}{tail}") is None


def test_a_lineage_is_named_by_eight_digits() -> None:
    assert lineage_name(2) == "00000002"
    assert decode_lineage(encode_lineage(LINEAGE), "lineages/00000002") == LINEAGE


@pytest.mark.parametrize("name", ["", "0000001", "00000000", "000000010", "0000000x"])
def test_names_of_no_lineage(name: str) -> None:
    assert parse_lineage_name(name) is None


@given(st.integers(1, TERM_MAX))
def test_names_of_terms_lead_back(term: int) -> None:
    assert parse_controller_name(controller_name(term)) == term
    assert len(controller_name(term)) >= 8


@pytest.mark.parametrize(
    "name", ["", "0000001", "00000000", "000000010", "0000000x", "9" * 19, "1" * 20, "00000001\n"]
)
def test_names_of_no_term(name: str) -> None:
    assert parse_controller_name(name) is None


@pytest.mark.parametrize(
    ("key", "node", "seq"),
    [
        (DecisionKey(0, 0, 0), "n", 0),
        (KEY, "a/b", 0),
        (KEY, "", 0),
        (KEY, "a-b", 0),
        (KEY, "n", -1),
        (KEY, "n", SEGMENT_SEQ_MAX + 1),
    ],
)
def test_segments_that_cannot_be_named(key: DecisionKey, node: str, seq: int) -> None:
    with pytest.raises(InvalidInput):
        segment_name(key, node, seq)
