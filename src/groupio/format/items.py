"""Item tables: what one member contributes, as bytes.

A table is stored by columns, not by items: 20,000 small tensors compress to a fraction, decode
without a parser that trusts counts, and are checked with array arithmetic::

    header   magic "GITB", version u16, 0 u16, items u32, dims u32, name bytes u32, word bytes u32
    nbytes   i64[items]
    shape, global shape, offsets   i64[dims] each, dims = sum of ndim
    alias    i32[items]
    name length, dtype word, origin word   u16[items] each
    kind, flags, ndim   u8[items] each
    names    UTF-8, one after the other
    words    the distinct dtypes and origins, in order of appearance, joined by NUL

All numbers are little-endian. Equal sequences of items give equal bytes.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from groupio.errors import FormatError, InvalidInput
from groupio.format.columns import damaged
from groupio.format.dtypes import find_dtype
from groupio.format.limits import (
    DTYPE_NAME_MAX,
    GLOBAL_BYTES_LOG2_MAX,
    ITEM_BYTES_MAX,
    ITEM_TABLE_BYTES_MAX,
    ITEMS_MAX,
    ITEMS_VERSION,
    NAME_BYTES_MAX,
    NDIM_MAX,
)
from groupio.model import ItemKind, ItemSpec

T = TypeVar("T")

_MAGIC = b"GITB"
_HEADER = struct.Struct("<4sHHIIII")
_KINDS = (ItemKind.TENSOR, ItemKind.BYTES, ItemKind.PLAIN)
_KIND_CODES = {kind: code for code, kind in enumerate(_KINDS)}
_WORDS_MAX = 1 << 16


class _Problem(Exception):
    """Why a table is not valid; becomes InvalidInput for a writer, FormatError for a reader."""


class _UnknownDtype(_Problem):
    """A dtype that this release, or the ml_dtypes beside it, does not know."""


class _Columns(NamedTuple):
    """The columns of a table, in the order in which they are stored."""

    nbytes: npt.NDArray[np.int64]
    shape: npt.NDArray[np.int64]
    global_shape: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    alias: npt.NDArray[np.int32]
    name_length: npt.NDArray[np.uint16]
    dtype: npt.NDArray[np.uint16]
    origin: npt.NDArray[np.uint16]
    kind: npt.NDArray[np.uint8]
    flags: npt.NDArray[np.uint8]
    ndim: npt.NDArray[np.uint8]


class ItemColumns(NamedTuple):
    """A table without an object for each item; see :class:`groupio.model.ItemSpec`.

    ``dtype`` and ``origin`` index ``words``. ``shape``, ``global_shape`` and ``offsets`` have the
    ``ndim`` numbers of each item one after the other. Tables with equal names share the tuple.
    """

    names: tuple[str, ...]
    words: tuple[str, ...]
    kind: npt.NDArray[np.uint8]
    dtype: npt.NDArray[np.uint16]
    origin: npt.NDArray[np.uint16]
    ndim: npt.NDArray[np.uint8]
    shape: npt.NDArray[np.int64]
    global_shape: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    nbytes: npt.NDArray[np.int64]
    replicated: npt.NDArray[np.bool_]
    alias: npt.NDArray[np.int32]

    def spec(self, row: int, first: int) -> ItemSpec:
        """Item ``row``, whose numbers of dimensions start at ``first`` in the flat arrays."""
        dims = slice(first, first + int(self.ndim[row]))
        return ItemSpec(
            self.names[row],
            _KINDS[self.kind[row]],
            self.words[self.dtype[row]],
            tuple(self.shape[dims].tolist()),
            tuple(self.global_shape[dims].tolist()),
            tuple(self.offsets[dims].tolist()),
            int(self.nbytes[row]),
            bool(self.replicated[row]),
            self.words[self.origin[row]],
            int(self.alias[row]),
        )


# (numpy type, whether there is one value per dimension instead of one per item)
_LAYOUT = (
    ("<i8", False),
    ("<i8", True),
    ("<i8", True),
    ("<i8", True),
    ("<i4", False),
    ("<u2", False),
    ("<u2", False),
    ("<u2", False),
    ("u1", False),
    ("u1", False),
    ("u1", False),
)


def items_id(table: bytes) -> bytes:
    """The 32-byte BLAKE3 digest that names an encoded item table."""
    return blake3(table).digest()


def encode_items(items: Sequence[ItemSpec]) -> bytes:
    """``items`` as bytes; equal items give equal bytes.

    InvalidInput names the item whose name, shape, dtype, size or alias cannot be stored.
    """
    try:
        return _encode(items)
    except _Problem as problem:
        raise InvalidInput(f"the items cannot be saved: {problem}") from None


def decode_items(table: bytes) -> tuple[ItemSpec, ...]:
    """The items of an encoded table, all checked; FormatError when the bytes are not one."""
    try:
        return _decode(table)
    except _Problem as problem:
        raise FormatError(
            f"an item table of {len(table)} bytes cannot be read: {problem}"
        ) from None


def decode_stored_items(table: bytes, path: str) -> tuple[ItemSpec, ...]:
    """The items of a table whose digest has been verified in the file ``path``.

    IntegrityError(path) when the table breaks a rule, FormatError(path) when all that is wrong
    is a dtype that is not known here.
    """
    return _stored(_decode, table, path)


def decode_stored_columns(
    table: bytes, path: str, known: dict[tuple[bytes, bytes], tuple[str, ...]]
) -> ItemColumns:
    """The same as columns, several times as fast. ``known`` keeps the names of earlier tables."""
    return _stored(lambda given: _decode_columns(given, known), table, path)


def _stored(decode: Callable[[bytes], T], table: bytes, path: str) -> T:
    try:
        return decode(table)
    except _UnknownDtype as problem:
        raise FormatError(f"{path} cannot be read here: {problem}", path=path) from None
    except _Problem as problem:
        raise damaged(path, f"in an item table, {problem}") from None


def _encode(items: Sequence[ItemSpec]) -> bytes:
    if len(items) > ITEMS_MAX:
        raise _Problem(
            f"{len(items)} items are more than {ITEMS_MAX}; join small values into fewer items"
        )
    names = [_name_bytes(index, item.name) for index, item in enumerate(items)]
    words: dict[str, int] = {}
    for index, item in enumerate(items):
        if len(item.shape) != len(item.global_shape) or len(item.shape) != len(item.offsets):
            raise _Problem(
                f"item {item.name!r} has a shape, global shape and offsets of different lengths"
            )
        if len(item.shape) > NDIM_MAX:
            raise _Problem(f"item {index} has {len(item.shape)} dimensions, more than {NDIM_MAX}")
        words.setdefault(item.dtype, len(words))
        words.setdefault(item.origin, len(words))
    word_bytes = _join_words(words)
    name_bytes = b"".join(names)
    if len(name_bytes) > ITEM_TABLE_BYTES_MAX:
        raise _Problem(f"their names take {len(name_bytes)} bytes; use shorter names")
    columns = _Columns(
        _ints(items, "nbytes", "<i8", [item.nbytes for item in items]),
        _ints(items, "shape", "<i8", [d for item in items for d in item.shape]),
        _ints(items, "global shape", "<i8", [d for item in items for d in item.global_shape]),
        _ints(items, "offsets", "<i8", [d for item in items for d in item.offsets]),
        _ints(items, "alias", "<i4", [item.alias for item in items]),
        np.array([len(name) for name in names], "<u2"),
        np.array([words[item.dtype] for item in items], "<u2"),
        np.array([words[item.origin] for item in items], "<u2"),
        np.array([_KIND_CODES[item.kind] for item in items], "u1"),
        np.array([item.replicated for item in items], "u1"),
        np.array([len(item.shape) for item in items], "u1"),
    )
    listed = [item.name for item in items]
    _check_names(listed)
    _check(listed, list(words), columns)
    header = _HEADER.pack(
        _MAGIC,
        ITEMS_VERSION,
        0,
        len(items),
        len(columns.shape),
        len(name_bytes),
        len(word_bytes),
    )
    table = b"".join((header, *(c.tobytes() for c in columns), name_bytes, word_bytes))
    if len(table) > ITEM_TABLE_BYTES_MAX:
        raise _Problem(
            f"their table takes {len(table)} bytes, more than {ITEM_TABLE_BYTES_MAX}; use shorter "
            "names or fewer items"
        )
    return table


def _name_bytes(index: int, name: str) -> bytes:
    try:
        encoded = name.encode()
    except UnicodeEncodeError:
        raise _Problem(f"the name of item {index} is not valid Unicode: {name[:80]!a}") from None
    if not 0 < len(encoded) <= NAME_BYTES_MAX:
        raise _Problem(
            f"the name of item {index} takes {len(encoded)} bytes, not 1 to {NAME_BYTES_MAX}"
        )
    return encoded


def _join_words(words: dict[str, int]) -> bytes:
    for word in words:
        # A word that is not plain ASCII could not be split again.
        if len(word) > DTYPE_NAME_MAX or not word.isascii() or "\0" in word:
            raise _Problem(f"{word[:DTYPE_NAME_MAX]!a} is neither a dtype nor an origin")
    if len(words) > _WORDS_MAX:
        raise _Problem(f"there are more than {_WORDS_MAX} different dtypes")
    return "\0".join(words).encode()


def _ints(items: Sequence[ItemSpec], what: str, form: str, values: list[int]) -> npt.NDArray[Any]:
    try:
        return np.array(values, form)
    except OverflowError:
        raise _Problem(
            f"one of the {len(items)} items has a number in {what} that does not fit {form[1:]}"
        ) from None


def _decode(table: bytes) -> tuple[ItemSpec, ...]:
    found = _decode_columns(table, {})
    same: dict[tuple[int, ...], tuple[int, ...]] = {}
    shapes = _split_dims(found.shape, found.ndim, same)
    whole = np.array_equal(found.shape, found.global_shape)
    global_shapes = shapes if whole else _split_dims(found.global_shape, found.ndim, same)
    offsets = _split_dims(found.offsets, found.ndim, same)
    return tuple(
        map(
            ItemSpec,
            found.names,
            [_KINDS[code] for code in found.kind.tolist()],
            [found.words[index] for index in found.dtype.tolist()],
            shapes,
            global_shapes,
            offsets,
            found.nbytes.tolist(),
            found.replicated.tolist(),
            [found.words[index] for index in found.origin.tolist()],
            found.alias.tolist(),
        )
    )


def _decode_columns(table: bytes, known: dict[tuple[bytes, bytes], tuple[str, ...]]) -> ItemColumns:
    if len(table) > ITEM_TABLE_BYTES_MAX:
        raise _Problem(f"it is larger than {ITEM_TABLE_BYTES_MAX} bytes")
    if len(table) < _HEADER.size:
        raise _Problem("it is shorter than its header")
    magic, version, zero, count, dims, name_bytes, word_bytes = _HEADER.unpack_from(table)
    if magic != _MAGIC or version != ITEMS_VERSION or zero:
        raise _Problem(f"it does not start as a table of version {ITEMS_VERSION}")
    sizes = [np.dtype(form).itemsize * (dims if per_dim else count) for form, per_dim in _LAYOUT]
    names_at = _HEADER.size + sum(sizes)
    if count > ITEMS_MAX or names_at + name_bytes + word_bytes != len(table):
        raise _Problem(f"its size does not fit {count} items of {dims} dimensions in all")
    starts = accumulate(sizes[:-1], initial=_HEADER.size)
    columns = _Columns(
        *(
            np.frombuffer(table, form, dims if per_dim else count, at)
            for (form, per_dim), at in zip(_LAYOUT, starts, strict=True)
        )
    )
    if int(columns.ndim.sum(dtype=np.int64)) != dims or (columns.ndim > NDIM_MAX).any():
        raise _Problem(f"its numbers of dimensions do not add up to {dims}")
    names_end = names_at + name_bytes
    blob = table[names_at:names_end]
    key = (blob, columns.name_length.tobytes())
    names = known.get(key)
    if names is None:
        names = tuple(_split_names(blob, columns.name_length))
        _check_names(names)
        known[key] = names
    words = _split_words(table[names_end:])
    _check(names, words, columns)
    return ItemColumns(
        names,
        tuple(words),
        columns.kind,
        columns.dtype,
        columns.origin,
        columns.ndim,
        columns.shape,
        columns.global_shape,
        columns.offsets,
        columns.nbytes,
        columns.flags.astype(bool),
        columns.alias,
    )


def _split_names(blob: bytes, lengths: npt.NDArray[np.uint16]) -> list[str]:
    if int(lengths.sum(dtype=np.int64)) != len(blob):
        raise _Problem("the lengths of its names do not add up")
    if len(lengths) and not 0 < int(lengths.min()) <= int(lengths.max()) <= NAME_BYTES_MAX:
        raise _Problem(f"it has a name that is empty or longer than {NAME_BYTES_MAX} bytes")
    ends = np.cumsum(lengths, dtype=np.int64).tolist()
    try:
        return [blob[a:b].decode() for a, b in zip([0, *ends], ends, strict=False)]
    except UnicodeDecodeError:
        raise _Problem("it has a name that is not UTF-8") from None


def _split_words(blob: bytes) -> list[str]:
    if not blob.isascii():
        raise _Problem("its dtypes are not ASCII")
    words = blob.decode().split("\0")
    if len(words) > _WORDS_MAX or max(map(len, words)) > DTYPE_NAME_MAX:
        raise _Problem("it has too many or too long dtypes")
    return words


def _split_dims(
    flat: npt.NDArray[np.int64],
    ndim: npt.NDArray[np.uint8],
    same: dict[tuple[int, ...], tuple[int, ...]],
) -> list[tuple[int, ...]]:
    """The dimensions of each item; equal ones are one tuple, for a model has few different."""
    values = tuple(flat.tolist())
    ends = np.cumsum(ndim, dtype=np.int64).tolist()
    share = same.setdefault
    return [share(d, d) for d in [values[a:b] for a, b in zip([0, *ends], ends, strict=False)]]


def _check_names(names: Sequence[str]) -> None:
    """The rules for the names of a table, for readers and writers."""
    if len(set(names)) != len(names):
        twice = Counter(names).most_common(1)[0][0]
        raise _Problem(f"the name {twice[:200]!r} is used twice; give each item its own name")
    for name in names:
        if "\0" in name:
            raise _Problem(f"the name {name[:200]!r} contains a NUL character")


def _check(names: Sequence[str], words: list[str], columns: _Columns) -> None:
    """Every other rule that a table of well-formed columns must keep, for readers and writers."""
    checks = (
        ("a kind that is not known", columns.kind >= len(_KINDS)),
        ("flags that are not known", columns.flags > 1),
        ("a dtype out of range", columns.dtype >= len(words)),
        ("an origin out of range", columns.origin >= len(words)),
        (f"a size outside 0 to {ITEM_BYTES_MAX} bytes", _outside(columns.nbytes)),
    )
    for what, wrong in checks:
        if wrong.any():
            raise _Problem(f"item {names[int(wrong.argmax())][:200]!r} has {what}")
    # Offset + shape cannot overflow: both are at most ITEM_BYTES_MAX by then.
    boxes = (
        _outside(columns.shape)
        | _outside(columns.offsets)
        | _outside(columns.global_shape)
        | (columns.offsets + columns.shape > columns.global_shape)
    )
    if boxes.any():
        owner = np.searchsorted(np.cumsum(columns.ndim, dtype=np.int64), boxes.argmax(), "right")
        raise _Problem(
            f"item {names[int(owner)][:200]!r} does not lie inside its global shape, or its shape "
            "is out of range"
        )
    _check_aliases(names, columns)
    _check_sizes(names, words, columns)


def _outside(values: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    outside: npt.NDArray[np.bool_] = (values < 0) | (values > ITEM_BYTES_MAX)
    return outside


def _check_aliases(names: Sequence[str], columns: _Columns) -> None:
    index = np.arange(len(names))
    wrong = (columns.alias < -1) | (columns.alias >= index)
    own = np.flatnonzero((columns.alias >= 0) & ~wrong)
    target = columns.alias[own]
    wrong[own] = columns.nbytes[target] != columns.nbytes[own]
    if wrong.any():
        raise _Problem(
            f"item {names[int(wrong.argmax())][:200]!r} must share the bytes of an earlier item of "
            "the same size"
        )


def _check_sizes(names: Sequence[str], words: list[str], columns: _Columns) -> None:
    tensor = columns.kind == _KIND_CODES[ItemKind.TENSOR]
    item_sizes = np.ones(len(words), np.int64)
    for word in sorted(set(columns.dtype[tensor].tolist())):
        dtype = find_dtype(words[word])
        if dtype is None:
            raise _UnknownDtype(
                f"dtype {words[word]!r} is not known here; a newer numpy or ml_dtypes may know it"
            )
        item_sizes[word] = dtype.itemsize
    # Planners multiply global extents; this keeps every such product inside int64.
    owner = np.repeat(np.arange(len(names)), columns.ndim)
    bits = np.log2(np.maximum(item_sizes[columns.dtype], 1))
    bits += np.bincount(owner, np.log2(np.maximum(columns.global_shape, 1)), len(names))
    if (bits > GLOBAL_BYTES_LOG2_MAX).any():
        raise _Problem(
            f"the global shape of item {names[int(bits.argmax())][:200]!r} is larger than "
            f"2**{GLOBAL_BYTES_LOG2_MAX} bytes"
        )
    # Neither can these products overflow: no local extent is larger than its global one.
    elements = _products(columns.shape, columns.ndim)
    wrong = tensor & (elements * item_sizes[columns.dtype] != columns.nbytes)
    if wrong.any():
        row = int(wrong.argmax())
        shape = _split_dims(columns.shape, columns.ndim, {})[row]
        raise _Problem(
            f"tensor {names[row][:200]!r} of {int(columns.nbytes[row])} bytes does not fit shape "
            f"{shape} of {words[int(columns.dtype[row])]}"
        )
    typed = np.array([bool(word) for word in words], np.bool_)[columns.dtype]
    shaped = (columns.ndim > 1) | ((columns.ndim == 1) & (elements != columns.nbytes))
    wrong = ~tensor & (typed | shaped)
    if wrong.any():
        name = names[int(wrong.argmax())]
        raise _Problem(f"item {name[:200]!r} is no tensor but has a dtype or a shape")


def _products(flat: npt.NDArray[np.int64], ndim: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """The product of each item's dimensions; 1 where there are none."""
    found = np.ones(len(ndim), np.int64)
    some = np.flatnonzero(ndim)
    if len(some):
        ends = np.cumsum(ndim[some], dtype=np.int64)
        found[some] = np.multiply.reduceat(flat, ends - ndim[some])
    return found
