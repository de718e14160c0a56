"""Small records of a store, and the names of its files.

An abort record decides an attempt as not committed, an in-flight record announces a save before
it refers to older segments, a lineage record starts a line of epochs, a controller record says
who rules over the job from a term on, and the store's id record says which store a path leads to.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, TypeVar

import msgspec
from blake3 import blake3
from msgspec import Meta

from groupio.errors import FormatError, IntegrityError, InvalidInput
from groupio.format.columns import Count, damaged
from groupio.format.envelope import RecordKind, read_envelope, read_root, wrap
from groupio.format.limits import (
    ADDRESS_MAX,
    ATTEMPT_MAX,
    LINEAGE_MAX,
    ROOT_BYTES_MAX,
    SEGMENT_SEQ_MAX,
    SEGMENTS_MAX,
    STORE_FORMAT,
    TERM_MAX,
    TEXT_MAX,
)
from groupio.model import EPOCH_MAX, WORLD_SIZE_MAX, DecisionKey, Lineage

__all__ = [
    "AbortRecord",
    "ControllerRecord",
    "InflightRecord",
    "RecordKind",
    "StoreRecord",
    "check_key",
    "controller_name",
    "decode_abort",
    "decode_controller",
    "decode_inflight",
    "decode_lineage",
    "decode_record_kind",
    "decode_store",
    "encode_abort",
    "encode_controller",
    "encode_inflight",
    "encode_lineage",
    "encode_store",
    "file_name",
    "key_is_valid",
    "lineage_name",
    "parse_controller_name",
    "parse_key",
    "parse_lineage_name",
    "parse_segment_name",
    "segment_name",
]

_KEY = re.compile(r"L([0-9]{8})-E([0-9]{20})-A([0-9]{6})")
_SEGMENT = re.compile(r"(L[0-9]{8}-E[0-9]{20}-A[0-9]{6})-([A-Za-z0-9_.]{1,64})-([0-9]{4,6})\.seg")
_LINEAGE = re.compile(r"[0-9]{8}")
_CONTROLLER = re.compile(r"[0-9]{8,19}")
_NODE = re.compile(r"[A-Za-z0-9_.]{1,64}")
_HEX = r"^[0-9a-f]{32}\Z"  # not "$", which lets a line break follow
_ADDRESS = r"^[!-~]*\Z"

Text = Annotated[str, Meta(max_length=TEXT_MAX)]
"""A text of a record, as msgspec checks it."""

StoreId = Annotated[str, Meta(pattern=_HEX)]
"""32 hexadecimal digits, as msgspec checks them."""

Seconds = Annotated[float, Meta(ge=0)]
"""A time in seconds since 1970, as msgspec checks it (never NaN)."""

WorldSize = Annotated[int, Meta(ge=1, le=WORLD_SIZE_MAX)]
"""A number of members, as msgspec checks it."""

Rank = Annotated[int, Meta(ge=0, lt=WORLD_SIZE_MAX)]
"""The number of a member, as msgspec checks it."""

_Record = TypeVar("_Record", bound=msgspec.Struct)


class AbortRecord(msgspec.Struct, frozen=True):
    """The decision that an attempt is not committed. ``members`` are the ranks to blame."""

    key: DecisionKey
    incarnation: Count
    reason: Text
    members: Annotated[tuple[Rank, ...], Meta(max_length=WORLD_SIZE_MAX)]
    write_id: Text
    at: Seconds


class InflightRecord(msgspec.Struct, frozen=True):
    """Announces an undecided save, by whom, and the older segments that it may refer to.

    ``boot_id``, ``pid`` and ``pid_start`` (clock ticks, from /proc) name one process of ``host``.
    """

    key: DecisionKey
    incarnation: Count
    world_size: WorldSize
    write_id: Text
    at: Seconds
    boot_id: Text
    pid: Count
    pid_start: Count
    host: Text
    segments: Annotated[tuple[Text, ...], Meta(max_length=SEGMENTS_MAX)]
    nodes: Annotated[tuple[Text, ...], Meta(max_length=WORLD_SIZE_MAX)] = ()
    """The nodes whose agents hold the bytes; none where only ``host`` does."""
    pid_space: Count = 0
    """The PID namespace of ``pid``, by its inode; 0 where it is not known."""


class StoreRecord(msgspec.Struct, frozen=True):
    """The id record of a store; ``store_id`` is 32 hexadecimal digits, chosen at random once."""

    store_id: StoreId
    job: Text
    format: Count
    created_at: Seconds


class ControllerRecord(msgspec.Struct, frozen=True):
    """Who rules over the job from ``term`` on; only the record of the highest term counts.

    ``address`` is where agents reach the controller, "" when nobody rules in this term (the
    earlier ruler resigned). (node, life) is the agent process that wrote it; ``at`` is its
    clock, for people. ``by_token``: agents show it the job's token, else the key in the store.
    """

    term: Annotated[int, Meta(ge=1, le=TERM_MAX)]
    address: Annotated[str, Meta(max_length=ADDRESS_MAX, pattern=_ADDRESS)]
    node: Annotated[str, Meta(pattern=rf"^{_NODE.pattern}\Z")]
    life: Annotated[str, Meta(pattern=_HEX)]
    at: Seconds
    by_token: bool = True


class _StoreWire(StoreRecord, frozen=True):
    check: str
    """BLAKE3 of the other fields, so that a flipped bit is seen in this text file too."""


def decode_record_kind(first: bytes, path: str = "record") -> RecordKind:
    """What the record is that starts with ``first`` (at least 64 bytes of it).

    FormatError for a version or kind that this release does not know, IntegrityError for damage.
    """
    return read_envelope(first, path).kind


def encode_abort(record: AbortRecord) -> bytes:
    """An abort record as the bytes of a file; InvalidInput when a field is out of range."""
    return _checked(decode_abort, _encode(RecordKind.ABORT, record))


def decode_abort(data: bytes, path: str) -> AbortRecord:
    """The abort record in ``data``; FormatError or IntegrityError(path) when it is none."""
    record = _decode(RecordKind.ABORT, AbortRecord, data, path)
    check_key(record.key, path)
    return record


def encode_inflight(record: InflightRecord) -> bytes:
    """An in-flight record as the bytes of a file; InvalidInput when a field is out of range."""
    return _checked(decode_inflight, _encode(RecordKind.INFLIGHT, record))


def decode_inflight(data: bytes, path: str) -> InflightRecord:
    """The in-flight record in ``data``; FormatError or IntegrityError(path) when it is none."""
    record = _decode(RecordKind.INFLIGHT, InflightRecord, data, path)
    check_key(record.key, path)
    for name in record.segments:
        if parse_segment_name(name) is None:
            raise damaged(path, f"{name[:120]!r} is not the name of a segment")
    return record


def encode_lineage(record: Lineage) -> bytes:
    """A lineage record as the bytes of a file; InvalidInput when a field is out of range."""
    return _checked(decode_lineage, _encode(RecordKind.LINEAGE, record))


def decode_lineage(data: bytes, path: str) -> Lineage:
    """The lineage record in ``data``; FormatError or IntegrityError(path) when it is none."""
    record = _decode(RecordKind.LINEAGE, Lineage, data, path)
    numbers = 0 <= record.parent < record.number <= LINEAGE_MAX
    if not (numbers and -1 <= record.after_epoch <= EPOCH_MAX and record.created_at >= 0):
        raise damaged(path, f"lineage {record.number} after {record.parent} is impossible")
    if parse_lineage_name(file_name(path)) not in (None, record.number):
        raise damaged(path, f"it is the record of lineage {record.number}")
    return record


def encode_controller(record: ControllerRecord) -> bytes:
    """A controller record as the bytes of a file; InvalidInput when a field is out of range."""
    return _checked(decode_controller, _encode(RecordKind.CONTROLLER, record))


def decode_controller(data: bytes, path: str) -> ControllerRecord:
    """The controller record in ``data``; FormatError or IntegrityError(path) when it is none."""
    record = _decode(RecordKind.CONTROLLER, ControllerRecord, data, path)
    if parse_controller_name(file_name(path)) not in (None, record.term):
        raise damaged(path, f"it is the record of term {record.term}")
    return record


def encode_store(record: StoreRecord) -> bytes:
    """A store's id record as a line of JSON; InvalidInput when a field is out of range."""
    fields = {name: getattr(record, name) for name in StoreRecord.__struct_fields__}
    try:
        data = msgspec.json.encode({**fields, "check": _store_check(record)}) + b"\n"
    except UnicodeEncodeError as error:
        raise InvalidInput(f"the store's record cannot be written: {error}") from None
    return _checked(decode_store, data)


def decode_store(data: bytes, path: str) -> StoreRecord:
    """The id record of a store; FormatError for another format, IntegrityError(path) for damage."""
    if len(data) > ROOT_BYTES_MAX:
        raise damaged(path, f"it has {len(data)} bytes, too many for the record of a store")
    try:
        wire = msgspec.json.decode(data, type=_StoreWire)
    except (msgspec.DecodeError, RecursionError) as error:
        raise damaged(path, f"it is not the record of a store ({error})") from None
    record = StoreRecord(wire.store_id, wire.job, wire.format, wire.created_at)
    # The whole file is compared: white space or another spelling would be bytes under no digest.
    if wire.check != _store_check(record) or data != msgspec.json.encode(wire) + b"\n":
        raise damaged(path, "the digest of the store's record does not match")
    if wire.format != STORE_FORMAT:
        raise FormatError(
            f"{path} is of store format {wire.format}; this release reads {STORE_FORMAT}, use a "
            "newer one",
            path=path,
        )
    return record


def _store_check(record: StoreRecord) -> str:
    return blake3(msgspec.msgpack.encode(msgspec.structs.astuple(record))).hexdigest()


def parse_key(name: str) -> DecisionKey | None:
    """The key of which ``name`` is the file name, or None."""
    match = _KEY.fullmatch(name)
    if match is None:
        return None
    key = DecisionKey(*map(int, match.groups()))
    return key if key_is_valid(key) else None


def key_is_valid(key: DecisionKey) -> bool:
    """Whether the numbers of ``key`` are in range, so that its name can be parsed again."""
    return (
        1 <= key.lineage <= LINEAGE_MAX
        and 0 <= key.epoch <= EPOCH_MAX
        and 0 <= key.attempt <= ATTEMPT_MAX
    )


def check_key(key: DecisionKey, path: str) -> None:
    """IntegrityError unless ``key`` is in range and ``path`` does not name another key.

    A record that was moved or copied to the name of another is found here.
    """
    if not key_is_valid(key) or parse_key(file_name(path)) not in (None, key):
        raise damaged(path, f"it is the record of {key}")


def segment_name(key: DecisionKey, node: str, seq: int) -> str:
    """The file name of the segment ``seq`` that ``node`` writes for ``key``.

    InvalidInput when a part is out of range (a node is 1 to 64 of ``A-Z a-z 0-9 _ .``).
    """
    if not (key_is_valid(key) and _NODE.fullmatch(node) and 0 <= seq <= SEGMENT_SEQ_MAX):
        raise InvalidInput(f"there is no segment {seq} of node {node[:80]!r} for {key}")
    return f"{key}-{node}-{seq:04d}.seg"


def parse_segment_name(name: str) -> tuple[DecisionKey, str, int] | None:
    """(key, node, seq) of the segment whose file name is ``name``, or None."""
    match = _SEGMENT.fullmatch(name)
    key = parse_key(match[1]) if match else None
    if match is None or key is None:
        return None
    node, seq = match[2], int(match[3])
    # One name for each segment: "00001" is no second spelling of "0001".
    return (key, node, seq) if segment_name(key, node, seq) == name else None


def lineage_name(number: int) -> str:
    """The file name of the record of lineage ``number``."""
    return f"{number:08d}"


def parse_lineage_name(name: str) -> int | None:
    """The lineage of which ``name`` is the file name, or None."""
    number = int(name) if _LINEAGE.fullmatch(name) else 0
    return number if number >= 1 else None


def controller_name(term: int) -> str:
    """The file name of the controller record of ``term``."""
    return f"{term:08d}"


def parse_controller_name(name: str) -> int | None:
    """The term of whose controller record ``name`` is the file name, or None."""
    term = int(name) if _CONTROLLER.fullmatch(name) else 0
    # One name for each term: "000000001" is no second spelling of "00000001".
    return term if 1 <= term <= TERM_MAX and controller_name(term) == name else None


def file_name(path: str) -> str:
    """The last part of ``path``."""
    return path.rsplit("/", 1)[-1]


def _encode(kind: RecordKind, record: msgspec.Struct) -> bytes:
    try:
        return wrap(kind, msgspec.msgpack.encode(record))
    except (UnicodeEncodeError, OverflowError) as error:
        raise InvalidInput(f"the {kind.name.lower()} record cannot be written: {error}") from None


def _checked(decode: Callable[[bytes, str], object], data: bytes) -> bytes:
    """``data`` after reading it back: nothing is written that could not be read."""
    try:
        decode(data, "the new record")
    except (IntegrityError, FormatError) as error:
        raise InvalidInput(f"a field of the record is out of range: {error.message}") from None
    return data


def _decode(kind: RecordKind, form: type[_Record], data: bytes, path: str) -> _Record:
    root = read_root(data, kind, path)
    try:
        return msgspec.msgpack.decode(root, type=form)
    except (msgspec.DecodeError, RecursionError) as error:
        raise damaged(path, f"its content is not a {kind.name.lower()} record ({error})") from None
