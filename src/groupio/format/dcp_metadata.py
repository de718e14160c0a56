"""The ``.metadata`` file by which ``torch.distributed.checkpoint`` finds a checkpoint.

It is a pickle of torch's ``Metadata``. It is put together from fixed opcodes (protocol 2), needs
neither torch nor pickle, and unpickles to objects equal to those that torch's own
``FileSystemWriter`` pickles, in torch 2.6 and later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from groupio.errors import InvalidInput
from groupio.format.frames import DTYPE_BYTES
from groupio.format.opcodes import (
    APPENDS,
    BUILD,
    EMPTY_DICT,
    EMPTY_LIST,
    EMPTY_TUPLE,
    FALSE,
    MARK,
    NEWOBJ,
    NONE,
    POP,
    PROTO,
    REDUCE,
    SETITEMS,
    STOP,
    global_name,
    integer,
    integers,
    keep,
    kept,
    text,
    tuple_of,
)

METADATA_NAME = ".metadata"
"""Name of the file in the directory of a checkpoint."""

_VERSION = "1.0.0"  # what torch writes into Metadata.version
_MODULE = "torch.distributed.checkpoint.metadata"


class TensorEntry(NamedTuple):
    """A tensor of the checkpoint: global ``shape``, ``dtype`` as in an item table, and its pieces.

    ``boxes`` are (offsets, sizes) in the global tensor. ``places`` are (relative path, offset,
    length) of an archive for each box, whose tensor has the box at its start.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
    places: Sequence[tuple[str, int, int]]


class ValueEntry(NamedTuple):
    """Any other value; ``place`` is the (relative path, offset, length) of its archive."""

    name: str
    place: tuple[str, int, int]


_Entry = TensorEntry | ValueEntry


def encode_metadata(
    tensors: Sequence[TensorEntry],
    values: Sequence[ValueEntry],
    paths: Mapping[str, tuple[str | int, ...]],
) -> bytes:
    """The ``.metadata`` of a checkpoint of ``tensors`` and ``values``.

    ``paths`` says where in a nested state dict a name stands, and in which order the names are
    listed; one without a path stands at the top, behind the others. InvalidInput names the entry
    whose dtype torch does not know, whose boxes and places are not of one number, or whose name
    is given twice.
    """
    order = {name: number for number, name in enumerate(paths)}
    entries: list[_Entry] = [*tensors, *values]
    entries.sort(key=lambda entry: order.get(entry.name, len(order)))
    names = [entry.name for entry in entries]
    if len(set(names)) != len(names):
        twice = next(name for name, times in Counter(names).items() if times > 1)
        raise InvalidInput(f"the metadata of a checkpoint cannot have {twice[:200]!r} twice")
    emitter = _Emitter()
    parts = [
        PROTO,
        *emitter.constants,
        emitter.new("Metadata") + EMPTY_DICT + MARK,
        text("state_dict_metadata") + EMPTY_DICT + MARK,
        *_state_dict(emitter, entries),
        SETITEMS + text("planner_data") + EMPTY_DICT + MARK,
        *_planner_data(emitter, names, paths),
        SETITEMS + text("storage_data") + EMPTY_DICT + MARK,
        *_storage_data(emitter, entries),
        SETITEMS + text("version") + text(_VERSION),
        SETITEMS + BUILD + STOP,
    ]
    return b"".join(parts)


_GLOBALS = {
    "Metadata": _MODULE,
    "TensorStorageMetadata": _MODULE,
    "BytesStorageMetadata": _MODULE,
    "ChunkStorageMetadata": _MODULE,
    "TensorProperties": _MODULE,
    "MetadataIndex": _MODULE,
    "_MEM_FORMAT_ENCODING": _MODULE,
    "_StorageInfo": "torch.distributed.checkpoint.filesystem",
    "Size": "torch",
    "strided": "torch",
}
_KEYS = (
    "properties", "size", "chunks", "offsets", "sizes", "fqn", "offset", "index",
    "relative_path", "length",
)  # fmt: skip


class _Emitter:
    """Pieces of one pickle, to be joined in the order in which they were asked for: what occurs
    more than once is spelt out the first time, filed, and referred to from then on.

    ``constants`` files the classes and the names of their fields; it leaves nothing on the stack.
    """

    def __init__(self) -> None:
        self._memo: dict[object, bytes] = {}
        self._filed_so_far = 0
        self._globals: dict[str, bytes] = {}
        self._keys: dict[str, bytes] = {}
        self.constants: list[bytes] = []
        for name, module in _GLOBALS.items():
            self.constants.append(self._filed(name, global_name(module, name)) + POP)
            self._globals[name] = self._memo[name]
        for key in _KEYS:
            self.constants.append(self._filed(key, text(key)) + POP)
            self._keys[key] = self._memo[key]
        self._memo.clear()

    def new(self, name: str) -> bytes:
        """An object of the class, without fields."""
        return self._globals[name] + EMPTY_TUPLE + NEWOBJ

    def form(self, name: str, *keys: str) -> bytes:
        """An object of the class with these fields, to be completed by ``%`` with their values."""
        fields = b"".join(self._keys[key].replace(b"%", b"%%") + b"%b" for key in keys)
        return self.new(name) + EMPTY_DICT + MARK + fields + SETITEMS + BUILD

    def name(self, name: str) -> bytes:
        """A str that occurs more than once."""
        return self._memo.get(name) or self._filed(name, text(name))

    def size(self, sizes: tuple[int, ...]) -> bytes:
        """A torch.Size."""
        known = self._memo.get(sizes)
        if known is not None:
            return known
        return self._filed(sizes, self._globals["Size"] + tuple_of([integers(sizes)]) + REDUCE)

    def properties(self, dtype: str) -> bytes:
        """The properties of a contiguous tensor of ``dtype``."""
        key = (dtype,)  # no size and no name is one
        state = self._memo.get(key)
        if state is None:
            encoding = self._globals["_MEM_FORMAT_ENCODING"] + tuple_of([integer(0)]) + REDUCE
            layout = self._globals["strided"]
            fields = [global_name("torch", dtype), layout, FALSE, encoding, FALSE]
            state = self._filed(key, tuple_of(fields))
        return self.new("TensorProperties") + state + BUILD

    def _filed(self, key: object, made: bytes) -> bytes:
        number = self._filed_so_far
        self._filed_so_far += 1
        self._memo[key] = kept(number)
        return made + keep(number)


def _state_dict(emitter: _Emitter, entries: Sequence[_Entry]) -> Iterator[bytes]:
    whole = emitter.form("TensorStorageMetadata", "properties", "size", "chunks")
    piece = emitter.form("ChunkStorageMetadata", "offsets", "sizes")
    value = emitter.new("BytesStorageMetadata")
    size = emitter.size
    for entry in entries:
        yield emitter.name(entry.name)
        if isinstance(entry, ValueEntry):
            yield value
            continue
        name, dtype, shape, boxes, places = entry
        if dtype not in DTYPE_BYTES or len(boxes) != len(places):
            raise InvalidInput(
                f"the tensor {name[:200]!r} of dtype {dtype[:80]!r} with {len(boxes)} boxes in "
                f"{len(places)} places cannot be written into the metadata of a checkpoint"
            )
        properties, extent = emitter.properties(dtype), size(shape)
        pieces = [piece % (size(offsets), size(sizes)) for offsets, sizes in boxes]
        chunks = b"".join((EMPTY_LIST, MARK, *pieces, APPENDS))
        yield whole % (properties, extent, chunks)


def _storage_data(emitter: _Emitter, entries: Sequence[_Entry]) -> Iterator[bytes]:
    piece = emitter.form("MetadataIndex", "fqn", "index", "offset")
    plain = emitter.form("MetadataIndex", "fqn", "index")
    info = emitter.form("_StorageInfo", "relative_path", "offset", "length")
    for entry in entries:
        fqn = emitter.name(entry.name)
        if isinstance(entry, ValueEntry):
            path, offset, length = entry.place
            yield plain % (fqn, NONE)
            yield info % (emitter.name(path), integer(offset), integer(length))
            continue
        _, _, _, boxes, places = entry
        for number, (box, (path, offset, length)) in enumerate(zip(boxes, places, strict=True)):
            yield piece % (fqn, integer(number), emitter.size(box[0]))
            yield info % (emitter.name(path), integer(offset), integer(length))


def _planner_data(
    emitter: _Emitter, names: Sequence[str], paths: Mapping[str, tuple[str | int, ...]]
) -> Iterator[bytes]:
    for name in names:
        steps = [
            emitter.name(step) if isinstance(step, str) else integer(step)
            for step in paths.get(name, (name,))
        ]
        yield emitter.name(name) + tuple_of(steps)
