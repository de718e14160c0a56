"""Events and effects as bytes, for the links between agents and controllers.

A message is the msgpack of one tagged struct of a union that the caller names. Beyond what msgpack
knows there are arrays (:mod:`groupio.protocol.arrayform`), errors
(:func:`groupio.errors.to_wire`) and the data classes of :mod:`groupio.model`. Fields of type Any
hold plain values only. Item tables travel apart from their reports, each one once: members and
epochs often have the same, and 2,000 items take longer to make than everything else in a report.

What comes from a peer is checked before memory is allocated for it, and what would break the
plan or the manifest (rows that point nowhere, names with directories) is refused here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import Any, Generic, TypeVar, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from groupio import model
from groupio.errors import ERRORS, FormatError, GroupIOError, InvalidInput, parse_error, to_wire
from groupio.format.limits import CHUNKS_MAX, SEGMENTS_MAX
from groupio.format.records import parse_segment_name
from groupio.model import CHUNK_BYTES, DIGEST_BYTES, ItemSpec, MemberTable, NodeReport
from groupio.protocol.arrayform import ArrayForm

MESSAGE_BYTES_MAX = 512 << 20
"""Longest message, in bytes."""

TABLES_KEPT_BYTES = 64 << 20
"""Item tables of this many encoded bytes are remembered, in each direction."""

_Items = tuple[ItemSpec, ...]
_K = TypeVar("_K")
_V = TypeVar("_V")
_BROKEN = (msgspec.MsgspecError, ValueError, RecursionError, OverflowError)

# msgspec looks the names in annotations up where the class was defined, and groupio.model does
# not import numpy at run time: `import groupio` shall be quick.
vars(model).setdefault("np", np)
vars(model).setdefault("npt", npt)


class _Message(msgspec.Struct, frozen=True, array_like=True):
    """A message: ``which`` names for each member, report by report, its table of items."""

    tables: tuple[bytes, ...]
    which: tuple[int, ...]
    body: msgspec.Raw


class WireForm:
    """The bytes of the messages of one union, given as a union or as a sequence of structs.

    To be used by one thread at a time.
    """

    def __init__(self, types: Any) -> None:
        union = reduce(or_, types) if isinstance(types, Sequence) else types
        self._kinds = frozenset(get_args(union) or (union,))
        self._arrays = ArrayForm(MESSAGE_BYTES_MAX)
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._plain)
        self._body: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
            union, ext_hook=self._arrays.decode, dec_hook=_typed
        )
        self._message = msgspec.msgpack.Decoder(_Message)
        self._tables = msgspec.msgpack.Decoder(_Items)
        self._sent: _Remembered[int, tuple[_Items, bytes]] = _Remembered()
        self._received: _Remembered[bytes, _Items] = _Remembered()

    def encode(self, message: Any) -> bytes:
        """``message`` as bytes; InvalidInput when it is longer than MESSAGE_BYTES_MAX."""
        assert type(message) in self._kinds, f"{type(message).__name__} does not travel here"
        tables: dict[bytes, int] = {}
        which: list[int] = []

        def strip(report: NodeReport) -> NodeReport:
            for member in report.members:
                which.append(tables.setdefault(self._items_bytes(member.items), len(tables)))
            members = tuple(replace(member, items=()) for member in report.members)
            return replace(report, members=members)

        self._arrays.begin()
        body = msgspec.Raw(self._encoder.encode(_with_reports(message, strip)))
        data = self._encoder.encode(_Message(tuple(tables), tuple(which), body))
        size = max(len(data), self._arrays.spread_bytes)
        if size > MESSAGE_BYTES_MAX:
            raise InvalidInput(
                f"a {type(message).__name__} message of {size} bytes exceeds the limit of "
                f"{MESSAGE_BYTES_MAX} bytes between nodes; save fewer items per epoch"
            )
        return data

    def decode(self, data: bytes | memoryview) -> Any:
        """The message that ``data`` encodes; FormatError when it is none of the union.

        Arrays own their memory.
        """
        if len(data) > MESSAGE_BYTES_MAX:
            raise FormatError(
                f"a message of {len(data)} bytes exceeds the limit of {MESSAGE_BYTES_MAX} bytes"
            )
        self._arrays.begin()
        try:
            message = self._message.decode(data)
            tables = [self._items(table) for table in message.tables]
            which = iter(message.which)

            def restore(report: NodeReport) -> NodeReport:
                members = []
                for member in report.members:
                    index = next(which, -1)
                    if not 0 <= index < len(tables):
                        raise msgspec.ValidationError("a member has no table of items")
                    members.append(replace(member, items=tables[index]))
                return _checked(replace(report, members=tuple(members)))

            return _with_reports(self._body.decode(message.body), restore)
        except _BROKEN as error:
            raise FormatError(
                f"a message of {len(data)} bytes cannot be read: {error};"
                " the peer may be of another version of groupio"
            ) from None

    def _plain(self, value: Any) -> Any:
        """What msgpack has no form for."""
        if isinstance(value, np.ndarray):
            return self._arrays.encode(value)
        if isinstance(value, GroupIOError):
            return to_wire(value)
        if isinstance(value, np.bool_ | np.integer | np.floating):
            return value.item()
        raise TypeError(f"a {type(value).__name__} cannot travel between nodes")

    def _items_bytes(self, items: _Items) -> bytes:
        known = self._sent.get(id(items))
        if known is None:
            known = items, self._encoder.encode(items)
            self._sent.put(id(items), known, len(known[1]))
        return known[1]

    def _items(self, table: bytes) -> _Items:
        items = self._received.get(table)
        if items is None:
            items = self._tables.decode(table)
            self._received.put(table, items, len(table))
        return items


class _Remembered(Generic[_K, _V]):
    """The values used last, up to TABLES_KEPT_BYTES."""

    def __init__(self) -> None:
        self._values: OrderedDict[_K, tuple[_V, int]] = OrderedDict()
        self._bytes = 0

    def get(self, key: _K) -> _V | None:
        if key not in self._values:
            return None
        self._values.move_to_end(key)
        return self._values[key][0]

    def put(self, key: _K, value: _V, nbytes: int) -> None:
        self._values[key] = value, nbytes
        self._bytes += nbytes
        while self._bytes > TABLES_KEPT_BYTES:
            _, (_, nbytes) = self._values.popitem(last=False)
            self._bytes -= nbytes


def _typed(kind: Any, value: Any) -> Any:
    """``value`` as ``kind``, one of the types that msgspec does not know."""
    if kind is GroupIOError:
        return _error(value)
    if not isinstance(value, np.ndarray):
        raise ValueError(f"a {type(value).__name__} is no array")
    (scalar,) = get_args(get_args(kind)[1])
    if value.dtype != np.dtype(scalar):
        raise ValueError(f"an array is of {value.dtype} and not of {np.dtype(scalar)}")
    # All arrays of bytes are lists of digests, the others are columns.
    shape = (len(value), DIGEST_BYTES) if value.dtype == np.uint8 else (len(value),)
    if value.shape != shape:
        raise ValueError(f"an array of {value.dtype} has the shape {value.shape}")
    return value


def _error(value: Any) -> GroupIOError:
    if not isinstance(value, dict):  # an array has an index of its own
        raise ValueError(f"a {type(value).__name__} is no error")
    if value.get("kind") not in ERRORS:
        raise ValueError("an error is of no known kind")
    return parse_error(value)


# -- what must hold inside a message ---------------------------------------------------------


def _with_reports(value: Any, change: Callable[[NodeReport], NodeReport]) -> Any:
    """``value`` with every report inside it changed, in the order of the fields."""
    if isinstance(value, NodeReport):
        return change(value)
    if isinstance(value, msgspec.Struct):
        changed = {}
        for name in value.__struct_fields__:
            before = getattr(value, name)
            if isinstance(before, msgspec.Struct | NodeReport | tuple):
                after = _with_reports(before, change)
                if after is not before:
                    changed[name] = after
        return msgspec.structs.replace(value, **changed) if changed else value
    if isinstance(value, tuple) and value and isinstance(value[0], msgspec.Struct | NodeReport):
        return tuple([_with_reports(element, change) for element in value])
    return value


def _checked(report: NodeReport) -> NodeReport:
    wrong = _contradiction(report)
    if wrong:
        raise msgspec.ValidationError(f"the report of node {report.node[:80]!r} {wrong}")
    return report


def _contradiction(report: NodeReport) -> str:
    """What is wrong with ``report``, or ""."""
    chunks, segments = report.chunks, report.segments
    n = len(chunks.lengths)
    columns = (chunks.digests, chunks.segments, chunks.offsets)
    if n > CHUNKS_MAX or len(segments) > SEGMENTS_MAX or any(len(c) != n for c in columns):
        return "has columns of different lengths, or too long ones"
    if not _within(chunks.lengths, 1, CHUNK_BYTES):
        return f"has chunks that are not of 1 to {CHUNK_BYTES} bytes"
    stored = chunks.segments >= 0
    if not _within(chunks.segments, -1, len(segments) - 1) or (chunks.offsets[stored] < 0).any():
        return "has chunks at places that do not exist"
    for segment in segments:
        if parse_segment_name(segment.name) is None or segment.bytes < 0:
            return f"names a segment {segment.name[:80]!r} of {segment.bytes} bytes"
    for member in report.members:
        if not _member_fits(member, n):
            return f"has a member {member.rank} whose chunks do not exist"
    return ""


def _member_fits(member: MemberTable, n_chunks: int) -> bool:
    return member.rank >= 0 and _within(member.refs, 0, n_chunks - 1)


def _within(values: npt.NDArray[Any], low: int, high: int) -> bool:
    return not len(values) or bool(values.min() >= low and values.max() <= high)
