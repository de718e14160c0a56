"""Frames: what stands around the bytes of tensors so that torch reads them where they lie.

``torch.load`` wants a zip archive: the local header of a record first, the central directory
last, and it reads only the records that the directory names. So each *run* (chunks of a tensor
that follow each other without a gap) stands directly behind the constant local header of the
record ``a/data/0``, and behind all data stands the *frames region*::

    version   local header of "a/version", b"3\\n"
    pickles   for each kind: local header of "a/data.pkl", the pickle that rebuilds the tensor
    trailers  187 bytes for each row: central directory of the three records, and its end

A row makes one tensor readable: the stretch of the file from the header before its run to the
end of its trailer is an archive. Many rows may share a run, and all share the rest. Offsets in
an archive are 32 bits wide and relative to its start, which bounds a framed file to 4 GiB.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Annotated, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from groupio.errors import InvalidInput
from groupio.format.limits import (
    DTYPE_NAME_MAX,
    FRAME_KINDS_MAX,
    FRAMES_BYTES_MAX,
    FRAMES_MAX,
    NDIM_MAX,
    SEGMENT_BYTES_MAX,
)
from groupio.format.opcodes import (
    EMPTY_TUPLE,
    FALSE,
    PERSISTENT,
    PROTO,
    REDUCE,
    STOP,
    global_name,
    integer,
    integers,
    text,
    tuple_of,
)

_DATA = b"a/data/0"
_PICKLE = b"a/data.pkl"
_VERSION = b"a/version"
_VERSION_TEXT = b"3\n"
_ZIP_MAX = (1 << 32) - 1  # this value itself announces a field of 64 bits

_LOCAL = struct.Struct("<IHHHHHIIIHH")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_END = struct.Struct("<IHHHHIIH")

_LEGACY_STORAGES = {
    "bool": "BoolStorage",
    "uint8": "ByteStorage",
    "int8": "CharStorage",
    "int16": "ShortStorage",
    "int32": "IntStorage",
    "int64": "LongStorage",
    "float16": "HalfStorage",
    "float32": "FloatStorage",
    "float64": "DoubleStorage",
    "bfloat16": "BFloat16Storage",
    "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
}

DTYPE_BYTES = {
    "bool": 1,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "bfloat16": 2,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
}
"""The dtypes that torch knows too, by their names in item tables; bytes of an element."""

_Size = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


def _local_header(name: bytes, crc: int = 0, size: int = 0) -> bytes:
    return _LOCAL.pack(0x04034B50, 0, 0, 0, 0, 0, crc, size, size, len(name), 0) + name


def _central_entry(name: bytes, crc: int = 0, size: int = 0, at: int = 0) -> bytes:
    sizes = (crc, size, size, len(name))
    return _CENTRAL.pack(0x02014B50, 0, 0, 0, 0, 0, 0, *sizes, 0, 0, 0, 0, 0, at) + name


def _end_record(entries: int, size: int, at: int = 0) -> bytes:
    return _END.pack(0x06054B50, 0, 0, entries, entries, size, at, 0)


LOCAL_HEADER = _local_header(_DATA)
"""What stands directly before a run: 38 constant bytes (torch reads no sizes or sums there)."""

_VERSION_RECORD = _local_header(_VERSION) + _VERSION_TEXT
_PICKLE_HEADER = _local_header(_PICKLE)

_ENTRIES = (
    _central_entry(_PICKLE)
    + _central_entry(_VERSION, size=len(_VERSION_TEXT))
    + _central_entry(_DATA)
)
_TRAILER = np.frombuffer(_ENTRIES + _end_record(3, len(_ENTRIES)), np.uint8)

TRAILER_BYTES = len(_TRAILER)
"""Size of the trailer of a row."""

_KIND_BYTES, _KIND_DIM_BYTES = 400, 22  # no pickle with its header is larger

_SIZES_AT, _OFFSET_AT, _END_OFFSET_AT = 20, 42, 16  # in a central entry, and in the end record
_PICKLE_AT = 0
_VERSION_AT = _PICKLE_AT + _CENTRAL.size + len(_PICKLE)
_DATA_AT = _VERSION_AT + _CENTRAL.size + len(_VERSION)
_FIELDS = np.dtype(
    {
        "names": [
            "pickle_stored", "pickle_raw", "pickle_at", "version_at",
            "data_stored", "data_raw", "entries_at",
        ],
        "formats": ["<u4"] * 7,
        "offsets": [
            _PICKLE_AT + _SIZES_AT,
            _PICKLE_AT + _SIZES_AT + 4,
            _PICKLE_AT + _OFFSET_AT,
            _VERSION_AT + _OFFSET_AT,
            _DATA_AT + _SIZES_AT,
            _DATA_AT + _SIZES_AT + 4,
            len(_ENTRIES) + _END_OFFSET_AT,
        ],
        "itemsize": TRAILER_BYTES,
    }
)  # fmt: skip
"""The numbers in a trailer that differ from row to row."""


class Kind(NamedTuple):
    """What a row's tensor is. All rows with one kind share a pickle.

    ``shape`` is its extent, row-major and contiguous; it starts ``skip`` elements behind the start
    of its run, which has ``record`` elements of ``dtype`` (a name of DTYPE_BYTES).
    """

    dtype: Annotated[str, Meta(max_length=DTYPE_NAME_MAX)]
    shape: Annotated[tuple[_Size, ...], Meta(max_length=NDIM_MAX)]
    skip: _Size
    record: _Size


@dataclass(frozen=True, slots=True)
class FrameTable:
    """The rows of a file, in any order.

    ``chunk_offsets`` int64[n]: where in the file the tensor starts. ``run_offsets`` int64[n]:
    where the run starts that it lies in. ``kinds`` int32[n]: its row of ``kind_list``.
    """

    chunk_offsets: npt.NDArray[np.int64]
    run_offsets: npt.NDArray[np.int64]
    kinds: npt.NDArray[np.int32]
    kind_list: tuple[Kind, ...]

    def __len__(self) -> int:
        return len(self.run_offsets)


NO_FRAMES = FrameTable(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int32), ())
"""The table of a framed file without tensors."""


class Frames:
    """The frames of a file whose region starts at byte ``start`` and has ``length`` bytes.

    InvalidInput when the table is not sound, exceeds a limit, or an archive would reach 4 GiB.
    """

    def __init__(self, table: FrameTable, start: int) -> None:
        self.table = table
        self.start = start
        wrong = _wrong_size(table, start)
        if not wrong:
            elements = [DTYPE_BYTES[kind.dtype] for kind in table.kind_list]
            self._records = _products([kind.record for kind in table.kind_list], elements)
            self._skips = _products([kind.skip for kind in table.kind_list], elements)
            self._pickles = [tensor_pickle(kind) for kind in table.kind_list]
            self._pickle_lengths = np.array([len(p) for p in self._pickles], np.int64)
            ends = np.cumsum(self._pickle_lengths + len(_PICKLE_HEADER))
            self._pickle_starts = (
                start + len(_VERSION_RECORD) + ends - self._pickle_lengths - len(_PICKLE_HEADER)
            )
            records = len(_VERSION_RECORD) + int(ends[-1] if len(ends) else 0)
            self._trailers = start + records
            self.length = records + TRAILER_BYTES * len(table)
            wrong = self._wrong_rows()
        if wrong:
            raise InvalidInput(f"the frames of a file at byte {start} are impossible: {wrong}")

    @cached_property
    def slice_offsets(self) -> npt.NDArray[np.int64]:
        """Where the archive of each row starts in the file, int64[n]."""
        return self.table.run_offsets - len(LOCAL_HEADER)

    @cached_property
    def slice_lengths(self) -> npt.NDArray[np.int64]:
        """How long the archive of each row is, in bytes, int64[n]."""
        return self._trailer_starts + TRAILER_BYTES - self.slice_offsets

    @cached_property
    def run_ends(self) -> npt.NDArray[np.int64]:
        """Where the run of each row ends in the file, int64[n]."""
        return self.table.run_offsets + self._records[self.table.kinds]

    def slice_of(self, row: int) -> tuple[int, int]:
        """Offset and length of the archive of ``row`` in the file."""
        return int(self.slice_offsets[row]), int(self.slice_lengths[row])

    def find(self, chunk_offset: int) -> npt.NDArray[np.int64]:
        """The rows whose tensor starts at ``chunk_offset``, int64[any]."""
        order, ascending = self._by_chunk
        first, last = np.searchsorted(ascending, (chunk_offset, chunk_offset + 1))
        return order[first:last]

    def encode(self) -> bytes:
        """The bytes of the region."""
        records = [_VERSION_RECORD]
        for pickle in self._pickles:
            records += (_PICKLE_HEADER, pickle)
        trailers = np.empty((len(self.table), TRAILER_BYTES), np.uint8)
        trailers[:] = _TRAILER
        fields = trailers.view(_FIELDS)[:, 0]
        kinds = self.table.kinds
        fields["pickle_stored"] = fields["pickle_raw"] = self._pickle_lengths[kinds]
        fields["pickle_at"] = self._pickle_starts[kinds] - self.slice_offsets
        fields["version_at"] = self.start - self.slice_offsets
        fields["data_stored"] = fields["data_raw"] = self._records[kinds]
        fields["entries_at"] = self._trailer_starts - self.slice_offsets
        return b"".join((*records, trailers.tobytes()))

    @cached_property
    def _trailer_starts(self) -> npt.NDArray[np.int64]:
        return self._trailers + TRAILER_BYTES * np.arange(len(self.table), dtype=np.int64)

    @cached_property
    def _by_chunk(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        order = np.argsort(self.table.chunk_offsets, kind="stable")
        return order, self.table.chunk_offsets[order]

    def _wrong_rows(self) -> str:
        table = self.table
        if self.length > FRAMES_BYTES_MAX:
            return f"they take {self.length} bytes, more than {FRAMES_BYTES_MAX}"
        if not len(table):
            return ""
        if not 0 <= int(table.kinds.min()) <= int(table.kinds.max()) < len(table.kind_list):
            return "a row has a kind that is not listed"
        # Bounded first, so that the sums below cannot overflow.
        first, last = int(table.run_offsets.min()), int(table.run_offsets.max())
        if not len(LOCAL_HEADER) <= first <= last <= self.start:
            return "a run does not lie before them"
        if (self.run_ends > self.start).any():
            return "a run does not lie before them"
        if (table.run_offsets + self._skips[table.kinds] != table.chunk_offsets).any():
            return "a tensor does not start where its kind says"
        return "" if int(self.slice_lengths.max()) < _ZIP_MAX else "an archive reaches 4 GiB"


def encode_frames(table: FrameTable, at: int) -> bytes:
    """The frames region of ``table`` when it starts at byte ``at`` of the file.

    InvalidInput as for :class:`Frames`.
    """
    return Frames(table, at).encode()


def fitting(table: FrameTable) -> FrameTable:
    """``table``, without its last rows where a file must not have as many.

    What they would have shown has to be copied before torch can read it.
    """
    dims = np.array([len(kind.shape) for kind in table.kind_list], np.int64)
    kinds_end = np.cumsum(_KIND_BYTES + _KIND_DIM_BYTES * dims)
    kept = min(FRAME_KINDS_MAX, int(np.searchsorted(kinds_end, FRAMES_BYTES_MAX // 2, "right")))
    room = FRAMES_BYTES_MAX - len(_VERSION_RECORD) - (int(kinds_end[kept - 1]) if kept else 0)
    most = min(FRAMES_MAX, room // TRAILER_BYTES)
    if kept == len(table.kind_list) and len(table) <= most:
        return table
    rows = np.flatnonzero(table.kinds < kept)[:most]
    return FrameTable(
        table.chunk_offsets[rows],
        table.run_offsets[rows],
        table.kinds[rows],
        table.kind_list[:kept],
    )


def _products(counts: list[int], elements: list[int]) -> npt.NDArray[np.int64]:
    return np.array(counts, np.int64) * np.array(elements, np.int64)


def _wrong_size(table: FrameTable, start: int) -> str:
    """What is wrong with the sizes and kinds of ``table``, or ""."""
    n = len(table)
    if not (table.chunk_offsets.shape == table.run_offsets.shape == table.kinds.shape == (n,)):
        return f"their arrays do not all have {n} rows"
    if n > FRAMES_MAX or len(table.kind_list) > FRAME_KINDS_MAX or start > SEGMENT_BYTES_MAX:
        return f"{n} rows of {len(table.kind_list)} kinds are too many"
    for kind in table.kind_list:
        wrong = _wrong_kind(kind)
        if wrong:
            return f"{kind.shape} of {kind.dtype[:80]!r} at {kind.skip} of {kind.record} {wrong}"
    return ""


def _wrong_kind(kind: Kind) -> str:
    element = DTYPE_BYTES.get(kind.dtype)
    if element is None:
        return "has a dtype that torch does not know"
    if len(kind.shape) > NDIM_MAX or min(kind.shape, default=0) < 0 or kind.skip < 0:
        return "is no tensor"
    if prod(max(size, 1) for size in kind.shape) >= 1 << 63:
        return "is larger than any tensor"
    if kind.skip + prod(kind.shape) > kind.record:
        return "does not lie inside its run"
    return "" if kind.record * element < _ZIP_MAX else "reaches 4 GiB"


def tensor_pickle(kind: Kind) -> bytes:
    """The pickle from which torch rebuilds the tensor of ``kind``, as ``torch.save`` writes it."""
    strides = [1] * len(kind.shape)
    for d in range(len(strides) - 2, -1, -1):
        strides[d] = strides[d + 1] * max(kind.shape[d + 1], 1)
    legacy = _LEGACY_STORAGES.get(kind.dtype)
    if legacy is None:
        function, storage = "_rebuild_tensor_v3", global_name("torch.storage", "UntypedStorage")
        size = kind.record * DTYPE_BYTES[kind.dtype]
        more = [global_name("torch", kind.dtype)]
    else:
        function, storage = "_rebuild_tensor_v2", global_name("torch", legacy)
        size, more = kind.record, []
    stored = tuple_of([text("storage"), storage, text("0"), text("cpu"), integer(size)])
    hooks = global_name("collections", "OrderedDict") + EMPTY_TUPLE + REDUCE
    where = [integer(kind.skip), integers(kind.shape), integers(strides)]
    arguments = tuple_of([stored + PERSISTENT, *where, FALSE, hooks, *more])
    return b"".join((PROTO, global_name("torch._utils", function), arguments, REDUCE, STOP))


def value_zip(pickled: bytes) -> bytes:
    """A whole archive, as ``torch.save`` makes it, of the value whose pickle is ``pickled``.

    InvalidInput when it would reach 4 GiB.
    """
    if len(pickled) >= _ZIP_MAX - 1024:
        raise InvalidInput(
            f"a pickled value of {len(pickled)} bytes is too large for a file that torch reads; "
            "store it as arrays"
        )
    parts, entries, at = [], [], 0
    for name, content in ((_PICKLE, pickled), (_VERSION, _VERSION_TEXT)):
        crc = zlib.crc32(content)
        parts += [_local_header(name, crc, len(content)), content]
        entries.append(_central_entry(name, crc, len(content), at))
        at = sum(map(len, parts))
    directory = b"".join(entries)
    return b"".join((*parts, directory, _end_record(len(entries), len(directory), at)))
