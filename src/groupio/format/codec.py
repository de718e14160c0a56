"""Plain values <-> bytes, with exact types; no pickle and no code is ever run by reading.

An encoded value is a version byte and one *node*: a tag byte and its content. ``n`` is an
unsigned LEB128 number::

    N T F      None, True, False          i n bytes   int, two's complement
    d 8 bytes  float                      c 16 bytes  complex
    s n utf8   str                        b n bytes   bytes
    l n nodes  list                       t n nodes   tuple
    m n pairs of nodes  dict              a dtype n n... n bytes   array: ndim, shape, C-order data
    u n utf8   numpy.str_                 v n bytes   numpy.bytes_
    g dtype n bytes     any other numpy scalar

``dtype`` is a node: a name (str) or, for a structured dtype, a tuple (see :func:`_dtype_value`).
A value that needs nothing else is of version 1. Version 2 has these nodes too::

    x n utf8 node  a container of this kind with this content (:mod:`.containers`); of kind "?" one
                   of an unknown class: (name of the class, path in the value, what is left of it)
    L n column     list                   K n column  tuple
    M n column column   dict: keys, values

A *column* is a code byte and its content for as many values as were said. Numbers are
little-endian, ``lengths`` are a column of ints that are not negative::

    N  a zero byte each: None             T  a byte each, 0 or 1: bool
    1 2 4 8  two's complement of so many bytes each: int
    i  lengths, bytes: other ints         d c  8 or 16 bytes each: float, complex
    s  lengths in characters, n utf8: str         b  lengths, bytes: bytes
    l t  lengths, column of all elements: list, tuple
    m  lengths, column of all keys, column of all values: dict
    g  dtype n bytes: numpy numbers       *  a node each
    U  the number of columns (a byte), for each value the number of its column (a byte), and the
       columns, none of which is a U: values of several types
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, compress, pairwise, repeat
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from groupio.errors import FormatError, InvalidInput
from groupio.format.containers import as_base, kind_of, known_base, make_container
from groupio.format.dtypes import dtype_from_name, dtype_name
from groupio.format.limits import (
    DTYPE_FIELDS_MAX,
    ITEM_BYTES_MAX,
    NDIM_MAX,
    PLAIN_BYTES_MAX,
    PLAIN_DEPTH_MAX,
    PLAIN_VERSION,
    PLAIN_VERSION_MAX,
)

_DOUBLE = struct.Struct("<d")
_COMPLEX = struct.Struct("<dd")
_DTYPE_ERRORS = (InvalidInput, FormatError, TypeError, ValueError, OverflowError)


COLUMNS_FROM = 256
"""Lists, tuples and dicts of so many elements are written as columns."""

_FORMS = {b"1": "<i1", b"2": "<i2", b"4": "<i4", b"8": "<i8", b"d": "<f8", b"c": "<c16"}
_UNKNOWN = "?"
_UNION_MAX = 16
_LOOKED_AT_MAX = 1 << 24
_ROW_MAX = 64
_ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes))
_Path = tuple[Any, ...] | None
"""The path to a value: the path to its container, and the step from there."""


class Converted(tuple[str, str, str]):
    """A container of an unknown class that was stored, or came back, as one of another class:
    its path in the value (like ``['opt'][3]``), its class, and the other one."""

    __slots__ = ()


class PlainError(Exception):
    """A value inside another is not plain; ``path`` leads to it (like ``['opt'][3]``)."""

    def __init__(self, path: str, type_name: str, hint: str) -> None:
        super().__init__(f"{path or 'the value'} of type {type_name} {hint}")
        self.path = path
        self.type_name = type_name
        self.hint = hint


class _NoColumns(Exception):
    """The container has to be written node by node, which says best what is wrong with it."""


def encode_plain(
    value: Any,
    *,
    name: str = "",
    columns: bool = True,
    converted: list[Converted] | None = None,
) -> bytes:
    """``value`` as bytes.

    With a list as ``converted``, containers of unknown classes are stored as those of a known base
    class, and listed there. InvalidInput for what is not plain: its message has ``name`` (of the
    item), the path inside the value, the type found there and what to do. Without ``columns`` long
    lists and dicts are written so that older releases can read them.
    """
    writer = _Writer(columns, converted)
    try:
        writer.node(value, None, 0)
    except PlainError as error:
        where = f"{name}{error.path}" or "the value"
        raise InvalidInput(f"{where} is of type {error.type_name}, which {error.hint}") from None
    return b"".join((bytes([writer.version]), *writer.parts))


def decode_plain(
    data: bytes | bytearray | memoryview, converted: list[Converted] | None = None
) -> Any:
    """The value that ``data`` encodes; arrays own their memory and are writable.

    ``converted`` gets the containers that were stored as those of another class. FormatError when
    ``data`` is not exactly one encoded value of a known version.
    """
    reader = _Reader(bytes(data), converted)
    if len(data) > PLAIN_BYTES_MAX or len(data) < 2:
        raise reader.error(f"its size is not 2 to {PLAIN_BYTES_MAX} bytes")
    if not PLAIN_VERSION <= data[0] <= PLAIN_VERSION_MAX:
        raise reader.error(
            f"it is of version {data[0]} and this release reads {PLAIN_VERSION} to "
            f"{PLAIN_VERSION_MAX}"
        )
    reader.at = 1
    value = reader.node(0)
    if reader.at != len(data):
        raise reader.error("bytes follow its end")
    return value


def _dtype_value(dtype: np.dtype[Any]) -> Any:
    """``dtype`` as a plain value.

    A name, ("array", element dtype, shape) for a subarray, or ("struct", item size, aligned,
    ((field name, title or None, offset, field dtype), ...)).
    """
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return ("array", _dtype_value(base), shape)
    if dtype.names is None or dtype.fields is None:
        return dtype_name(dtype)
    rows = []
    for name in dtype.names:
        field, offset, title = (*dtype.fields[name], None)[:3]
        rows.append((name, title, offset, _dtype_value(field)))
    return ("struct", dtype.itemsize, dtype.isalignedstruct, tuple(rows))


def _dtype_of(value: Any) -> np.dtype[Any]:
    """The dtype of which :func:`_dtype_value` made ``value``; ValueError when it is none."""
    if type(value) is str:
        return dtype_from_name(value)
    # Plain checks before the patterns: comparing an array with a str gives an array.
    if type(value) is not tuple or not value or type(value[0]) is not str:
        raise ValueError("not a dtype")
    match value:
        case ("array", base, tuple(shape)) if len(shape) <= NDIM_MAX:
            if not all(type(extent) is int for extent in shape):
                raise ValueError("not a shape")
            return _made_dtype((_dtype_of(base), shape))
        case ("struct", int(size), bool(aligned), tuple(rows)) if len(rows) <= DTYPE_FIELDS_MAX:
            fields = {
                "names": [name for name, _, _, _ in rows],
                "titles": [title for _, title, _, _ in rows],
                "offsets": [offset for _, _, offset, _ in rows],
                "formats": [_dtype_of(field) for _, _, _, field in rows],
            }
            return _made_dtype({**fields, "itemsize": size, "aligned": aligned})
    raise ValueError("not a dtype")


def _made_dtype(form: Any) -> np.dtype[Any]:
    made: np.dtype[Any] = np.dtype(form)
    return made


class _Writer:
    """Collects the parts of one encoded value."""

    def __init__(self, columns: bool, converted: list[Converted] | None) -> None:
        self.parts: list[bytes] = []
        self.size = 1
        self.version = PLAIN_VERSION
        self.converted = converted
        self.columns = columns
        self.in_column = 0
        self.open: set[int] = set()
        """The identities of the containers around the value that is being written."""

    def put(self, *parts: bytes) -> None:
        self.size += sum(map(len, parts))
        self.parts.extend(parts)

    def node(self, value: Any, path: _Path, depth: int) -> None:
        if depth > PLAIN_DEPTH_MAX:
            hint = f"lies deeper than {PLAIN_DEPTH_MAX} containers; flatten it or break the cycle"
            raise PlainError(_text(path), _type_name(value), hint)
        # By exact type: a subclass would not come back as itself.
        write = _WRITERS.get(type(value))
        if write is None and isinstance(value, np.generic) and value.dtype.type is type(value):
            write = _write_scalar
        if write is None or write in _CONTAINERS:
            self.container(value, path, depth, write or _write_kind)
        else:
            write(self, value, path, depth)
        if self.size > PLAIN_BYTES_MAX:
            hint = f"makes the value larger than {PLAIN_BYTES_MAX} bytes; store it as its own item"
            raise PlainError(_text(path), _type_name(value), hint)

    def container(self, value: Any, path: _Path, depth: int, write: _Write) -> None:
        """A value that may contain others, itself too."""
        identity = id(value)
        if identity in self.open:
            raise PlainError(_text(path), _type_name(value), "contains itself; break the cycle")
        self.open.add(identity)
        try:
            write(self, value, path, depth)
        finally:
            self.open.discard(identity)

    def as_columns(self, tag: bytes, value: Any, depth: int, *columns: list[Any]) -> bool:
        """Write a long container; False, and nothing is written, where columns cannot hold it."""
        if not self.columns:
            return False
        kept, size, version, opened = len(self.parts), self.size, self.version, set(self.open)
        self.in_column += 1
        try:
            self.put(tag, _varint(len(value)))
            column = _ColumnWriter(self, value)
            for values in columns:
                column.write(values, depth + 1)
        except (_NoColumns, PlainError):
            del self.parts[kept:]
            self.size, self.version, self.open = size, version, opened
            # What is wrong is told by the way that knows the path; so is what is in here.
            self.columns = False
            if self.in_column > 1:
                raise _NoColumns from None
            return False
        finally:
            self.in_column -= 1
        self.version = PLAIN_VERSION_MAX
        return True


_Write = Callable[[_Writer, Any, _Path, int], None]


def _type_name(value: Any) -> str:
    kind = type(value)
    prefix = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{prefix}{kind.__qualname__}"


def _text(path: _Path) -> str:
    steps: list[str] = []
    while path is not None:
        path, step = path
        steps.append(step if type(step) is str else f"[{step[0]!r}]" if step else "")
    text = "".join(reversed(steps))
    return text if len(text) <= 400 else f"{text[:200]}...{text[-200:]}"


def _step(key: Any) -> str:
    text = repr(key) if type(key) in (str, bytes, int, bool, float, type(None)) else str(type(key))
    return f"[{text[:80]}]"


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _write_singleton(writer: _Writer, value: Any, path: _Path, depth: int) -> None:
    writer.put(b"N" if value is None else b"T" if value else b"F")


def _write_int(writer: _Writer, value: int, path: _Path, depth: int) -> None:
    data = _int_bytes(value)
    writer.put(b"i", _varint(len(data)), data)


def _int_bytes(value: int) -> bytes:
    return value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)


def _write_float(writer: _Writer, value: float, path: _Path, depth: int) -> None:
    writer.put(b"d", _DOUBLE.pack(value))


def _write_complex(writer: _Writer, value: complex, path: _Path, depth: int) -> None:
    writer.put(b"c", _COMPLEX.pack(value.real, value.imag))


def _write_str(writer: _Writer, value: str, path: _Path, depth: int) -> None:
    data = value.encode("utf-8", "surrogatepass")
    writer.put(b"s" if type(value) is str else b"u", _varint(len(data)), data)


def _write_bytes(writer: _Writer, value: bytes, path: _Path, depth: int) -> None:
    exact = bytes(value)
    writer.put(b"b" if type(value) is bytes else b"v", _varint(len(exact)), exact)


def _write_sequence(
    writer: _Writer, value: list[Any] | tuple[Any, ...], path: _Path, depth: int
) -> None:
    is_list = type(value) is list
    tag = b"L" if is_list else b"K"
    if len(value) >= COLUMNS_FROM and writer.as_columns(tag, value, depth, list(value)):
        return
    writer.put(b"l" if is_list else b"t", _varint(len(value)))
    for index, element in enumerate(value):
        writer.node(element, (path, (index,)), depth + 1)


def _write_dict(writer: _Writer, value: dict[Any, Any], path: _Path, depth: int) -> None:
    if len(value) >= COLUMNS_FROM and writer.as_columns(
        b"M", value, depth, list(value), list(value.values())
    ):
        return
    writer.put(b"m", _varint(len(value)))
    for key, element in value.items():
        step = (path, _step(key))
        writer.node(key, (step, " (the key)"), depth + 1)
        writer.node(element, step, depth + 1)


def _write_kind(writer: _Writer, value: Any, path: _Path, depth: int) -> None:
    """A container of another class."""
    kind = kind_of(value)
    if kind is None:
        _write_unknown(writer, value, path, depth)
        return
    writer.version = PLAIN_VERSION_MAX
    name = kind.name.encode()
    writer.put(b"x", _varint(len(name)), name)
    content = kind.take(value)
    if type(value) in (set, frozenset):
        content = _sorted(writer, content, path, depth)
    # To who reads a path the content is the container itself.
    if type(content) is not tuple:
        writer.node(content, path, depth + 1)
        return
    writer.put(b"t", _varint(len(content)))
    for part in content:
        writer.node(part, path, depth + 2)


def _sorted(writer: _Writer, elements: list[Any], path: _Path, depth: int) -> list[Any]:
    """Equal sets become equal bytes."""

    def encoded(element: Any) -> bytes:
        apart = _Writer(False, writer.converted)
        apart.open = writer.open
        apart.in_column = writer.in_column
        apart.node(element, (path, "{...}"), depth + 2)
        return b"".join(apart.parts)

    kinds = set(map(type, elements))
    return sorted(elements, key=None if kinds in ({int}, {str}, {bytes}) else encoded)


def _write_unknown(writer: _Writer, value: Any, path: _Path, depth: int) -> None:
    base = None if writer.converted is None else known_base(type(value))
    if base is None or writer.converted is None:
        hint = "cannot be stored; convert it to a plain value, a numpy array or bytes"
        raise PlainError(_text(path), _type_name(value), hint)
    if writer.in_column:
        raise _NoColumns  # which do not know the path
    where, was = _text(path), _type_name(value)
    writer.converted.append(Converted((where, was, base.__name__)))
    writer.version = PLAIN_VERSION_MAX
    writer.put(b"x", _varint(len(_UNKNOWN)), _UNKNOWN.encode(), b"t", _varint(3))
    writer.node(was, path, depth + 1)
    writer.node(where, path, depth + 1)
    writer.node(as_base(value, base), path, depth + 2)


def _write_dtype(writer: _Writer, value: Any, path: _Path, depth: int) -> None:
    try:
        described = _dtype_value(value.dtype)
        made = _dtype_of(described)
        if made != value.dtype or made.type is not value.dtype.type:
            raise ValueError("it would come back as another dtype")
    except _DTYPE_ERRORS:
        kind = f"{_type_name(value)} with dtype {str(value.dtype)[:80]}"
        hint = "cannot be stored; convert it to numbers, bytes or fixed-width strings"
        raise PlainError(_text(path), kind, hint) from None
    writer.node(described, path, depth + 1)


def _write_scalar(writer: _Writer, value: Any, path: _Path, depth: int) -> None:
    writer.put(b"g")
    _write_dtype(writer, value, path, depth)
    data = value.tobytes()
    writer.put(_varint(len(data)), data)


def _write_array(writer: _Writer, value: Any, path: _Path, depth: int) -> None:
    writer.put(b"a")
    _write_dtype(writer, value, path, depth)
    writer.put(_varint(value.ndim), *map(_varint, value.shape))
    writer.put(_varint(value.nbytes), value.tobytes())


_WRITERS: dict[type, _Write] = {
    type(None): _write_singleton,
    bool: _write_singleton,
    int: _write_int,
    float: _write_float,
    complex: _write_complex,
    str: _write_str,
    bytes: _write_bytes,
    list: _write_sequence,
    tuple: _write_sequence,
    dict: _write_dict,
    np.ndarray: _write_array,
    # numpy drops trailing NULs when it makes an array of these two, so they go as text and bytes.
    np.str_: _write_str,
    np.bytes_: _write_bytes,
}
_CONTAINERS = frozenset((_write_sequence, _write_dict))


class _ColumnWriter:
    """Writes the elements of one container by columns: those of all inner lists together too."""

    def __init__(self, writer: _Writer, top: Any) -> None:
        self.writer = writer
        self.top = top
        self.around: set[int] = {id(top)}
        self.is_acyclic = False

    def write(self, values: list[Any], depth: int) -> None:
        """A column of ``values``."""
        if depth > PLAIN_DEPTH_MAX or self.writer.size > PLAIN_BYTES_MAX:
            raise _NoColumns
        kinds = set(map(type, values))
        if len(kinds) == 1:
            self.of_type(kinds.pop(), values, depth)
        elif not 1 < len(kinds) <= _UNION_MAX:
            self.nodes(values, depth)
        else:
            order = list(dict.fromkeys(map(type, values)))
            number = {kind: index for index, kind in enumerate(order)}
            codes = bytes(map(number.__getitem__, map(type, values)))
            self.writer.put(b"U", bytes([len(order)]), codes)
            for index, kind in enumerate(order):
                chosen = codes.translate(bytes(code == index for code in range(256)))
                self.of_type(kind, list(compress(values, chosen)), depth)

    def of_type(self, kind: type, values: list[Any], depth: int) -> None:
        """A column of values of one type."""
        put = self.writer.put
        if kind is int:
            self.ints(values)
        elif kind is float:
            put(b"d", np.array(values, "<f8").tobytes())
        elif kind is str:
            text = "".join(values).encode("utf-8", "surrogatepass")
            put(b"s")
            self.lengths(values)
            put(_varint(len(text)), text)
        elif kind is bool:
            put(b"T", bytes(values))
        elif kind is type(None):
            put(b"N", bytes(len(values)))
        elif kind is list or kind is tuple:
            put(b"l" if kind is list else b"t")
            self.inside(values, self.lengths(values), values)
            self.write(list(chain.from_iterable(values)), depth + 1)
        elif kind is dict:
            put(b"m")
            self.inside(values, self.lengths(values), map(dict.values, values))
            self.write(list(chain.from_iterable(values)), depth + 1)
            self.write(list(chain.from_iterable(map(dict.values, values))), depth + 1)
        elif kind is bytes:
            put(b"b")
            self.lengths(values)
            put(*values)
        elif kind is complex:
            put(b"c", np.array(values, "<c16").tobytes())
        elif issubclass(kind, np.number | np.bool_) and np.dtype(kind).type is kind:
            put(b"g")
            _write_dtype(self.writer, values[0], None, depth)
            data = np.array(values, values[0].dtype).tobytes()
            put(_varint(len(data)), data)
        else:
            self.nodes(values, depth)

    def nodes(self, values: list[Any], depth: int) -> None:
        """Each by itself."""
        self.writer.put(b"*")
        for value in values:
            self.writer.node(value, None, depth)

    def ints(self, values: list[int]) -> None:
        """In as few bytes each as the largest needs."""
        try:
            array = np.array(values, np.int64)
        except OverflowError:
            data = list(map(_int_bytes, values))
            self.writer.put(b"i")
            self.lengths(data)
            self.writer.put(*data)
            return
        self.put_ints(array)

    def lengths(self, values: Sequence[Any]) -> int:
        """How long each of ``values`` is. Returns the sum."""
        lengths = np.fromiter(map(len, values), np.int64, len(values))
        self.put_ints(lengths)
        return int(lengths.sum())

    def put_ints(self, array: npt.NDArray[np.int64]) -> None:
        """A column of ints."""
        bits = max(int(array.max()).bit_length(), (~int(array.min())).bit_length()) + 1
        width = next(width for width in (1, 2, 4, 8) if bits <= 8 * width)
        self.writer.put(b"%d" % width, array.astype(f"<i{width}").tobytes())

    def inside(self, values: list[Any], count: int, inner: Iterable[Iterable[Any]]) -> None:
        """Raises _NoColumns when what these containers hold may be without end.

        ``inner`` are the ``count`` elements of each. Where none is a container there is an end; of
        many that is not asked, because a container in itself has more than can be looked at.
        """
        if self.is_acyclic:
            return
        if count <= _LOOKED_AT_MAX and set(map(type, chain.from_iterable(inner))) <= _ATOMS:
            return
        found = set(map(id, filter(None, values)))
        if not self.around.isdisjoint(found):
            if _has_cycle(self.top):
                raise _NoColumns
            self.is_acyclic = True  # it only stands in several places
        self.around |= found


def _has_cycle(top: Any) -> bool:
    """Whether a list, tuple or dict contains itself, by way of lists, tuples and dicts."""
    done: set[int] = set()
    open_now: set[int] = {id(top)}
    stack = [(top, _inner(top))]
    while stack:
        value, inner = stack[-1]
        child = next(inner, None)
        if child is None:
            stack.pop()
            open_now.discard(id(value))
            done.add(id(value))
        elif id(child) in open_now:
            return True
        elif id(child) not in done:
            open_now.add(id(child))
            stack.append((child, _inner(child)))
    return False


def _inner(value: Any) -> Iterator[Any]:
    """The containers in ``value``."""
    elements = chain(value, value.values()) if type(value) is dict else iter(value)
    return (one for one in elements if type(one) in (list, tuple, dict))


def _common_size(ends: npt.NDArray[np.int64]) -> int:
    """How long all parts are that end there, if they are equally long and short, else 0."""
    sizes = np.diff(ends)
    common = len(sizes) and sizes[0] <= _ROW_MAX and (sizes == sizes[0]).all()
    return int(sizes[0]) if common else 0


def _rows(flat: list[Any], size: int) -> Iterator[tuple[Any, ...]]:
    """``flat`` in tuples of ``size``."""
    return zip(*[iter(flat)] * size, strict=True)


def _cut(flat: list[Any], ends: npt.NDArray[np.int64], cls: type) -> list[Any]:
    """The parts of ``flat`` that end there, each a list or a tuple."""
    size = _common_size(ends)
    if size:
        return list(_rows(flat, size) if cls is tuple else map(list, _rows(flat, size)))
    whole = cls(flat)
    return [whole[lo:hi] for lo, hi in pairwise(ends.tolist())]


class _Reader:
    """Walks over one encoded value; every count is checked against the bytes that are left."""

    def __init__(self, data: bytes, converted: list[Converted] | None) -> None:
        self.data = data
        self.at = 0
        self.keys_open = 0
        self.converted = converted

    def error(self, why: str) -> FormatError:
        return FormatError(
            f"an encoded value of {len(self.data)} bytes cannot be read at byte {self.at}: {why}"
        )

    def take(self, length: int) -> bytes:
        data = self.data[self.at : self.at + length]
        if len(data) != length:
            raise self.error("it ends too early")
        self.at += length
        return data

    def number(self) -> int:
        at = self.at
        if at < len(self.data) and self.data[at] < 0x80:
            self.at = at + 1
            return self.data[at]
        result = 0
        for shift in range(0, 63, 7):
            byte = self.take(1)[0]
            result |= (byte & 0x7F) << shift
            if byte < 0x80:
                return result
        raise self.error("a number is too large")

    def count(self) -> int:
        """The number of elements that follow; each takes at least one byte."""
        count = self.number()
        if count > len(self.data) - self.at:
            raise self.error(f"{count} elements cannot follow")
        return count

    def sized(self) -> bytes:
        return self.take(self.number())

    def text(self) -> str:
        try:
            return self.sized().decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise self.error("a str is not UTF-8") from None

    def node(self, depth: int) -> Any:
        if depth > PLAIN_DEPTH_MAX:
            raise self.error(f"it is nested deeper than {PLAIN_DEPTH_MAX}")
        tag = self.take(1)
        if tag == b"s":  # by far the most
            return self.text()
        match tag:
            case b"N":
                return None
            case b"T" | b"F":
                return tag == b"T"
            case b"i":
                return int.from_bytes(self.sized(), "little", signed=True)
            case b"d":
                return _DOUBLE.unpack(self.take(8))[0]
            case b"c":
                return complex(*_COMPLEX.unpack(self.take(16)))
            case b"u":
                return np.str_(self.text())
            case b"b" | b"v":
                return self.sized() if tag == b"b" else np.bytes_(self.sized())
            case b"l" | b"t":
                values = [self.node(depth + 1) for _ in range(self.count())]
                return values if tag == b"l" else tuple(values)
            case b"m":
                return self.mapping(depth)
            case b"g":
                return self.scalar(depth)
            case b"a":
                return self.array(depth)
            case b"x" | b"L" | b"K" | b"M" if self.data[0] > PLAIN_VERSION:
                return self.newer(tag, depth)
            case _:
                raise self.error(f"the tag {tag!r} is not known")

    def newer(self, tag: bytes, depth: int) -> Any:
        """A node that version 1 does not have."""
        if tag == b"x":
            return self.container(depth)
        count = self.count()
        if tag == b"M":
            return self.joined(*self.columns_of_dicts(count, depth + 1))
        values = self.column(count, depth + 1)
        return values if tag == b"L" else tuple(values)

    def container(self, depth: int) -> Any:
        kind = self.text()
        # The elements of a set are hashed, like keys.
        hashed = kind in ("set", "frozenset")
        self.keys_open += hashed
        content = self.node(depth + 1)
        self.keys_open -= hashed
        if kind == _UNKNOWN:
            if type(content) is not tuple or list(map(type, content[:2])) != [str, str]:
                raise self.error("a container of an unknown class has another form")
            was, where, value = content[0], content[1], content[-1]
            if self.converted is not None:
                self.converted.append(Converted((where, was, type(value).__name__)))
            return value
        try:
            return make_container(kind, content)
        except InvalidInput as error:
            raise self.error(error.message) from None

    def mapping(self, depth: int) -> dict[Any, Any]:
        count = self.count()
        keys, values = [], []
        for _ in range(count):
            self.keys_open += 1
            keys.append(self.node(depth + 1))
            self.keys_open -= 1
            values.append(self.node(depth + 1))
        return self.joined(keys, values)

    def joined(self, keys: list[Any], values: list[Any]) -> dict[Any, Any]:
        try:
            result = dict(zip(keys, values, strict=True))
        except TypeError as error:
            raise self.error(f"a key of a dict cannot be one: {error}") from None
        if len(result) != len(keys):
            raise self.error("a dict has a key twice")
        return result

    # -- columns ---------------------------------------------------------------------------------

    def column(self, count: int, depth: int, *, in_union: bool = False) -> list[Any]:
        """So many values; each takes at least one byte."""
        if depth > PLAIN_DEPTH_MAX:
            raise self.error(f"it is nested deeper than {PLAIN_DEPTH_MAX}")
        code = self.take(1)
        if count > len(self.data) - self.at:
            raise self.error(f"{count} elements cannot follow")
        match code:
            case b"N" | b"T":
                return self.singletons(code, count)
            case b"1" | b"2" | b"4" | b"8" | b"d" | b"c":
                numbers: list[Any] = self.numbers(_FORMS[code], count).tolist()
                return numbers
            case b"i":
                return [int.from_bytes(one, "little", signed=True) for one in self.cut_bytes(count)]
            case b"b":
                return self.cut_bytes(count)
            case b"s":
                return self.strings(count)
            case b"l" | b"t":
                ends = self.lengths(count)
                flat = self.column(int(ends[-1]), depth + 1)
                return _cut(flat, ends, list if code == b"l" else tuple)
            case b"m":
                return self.dicts(count, depth)
            case b"g":
                return self.numpy_numbers(count, depth)
            case b"*":
                return [self.node(depth) for _ in range(count)]
            case b"U" if not in_union:
                return self.union(count, depth)
            case _:
                raise self.error(f"the code {code!r} of a column is not known here")

    def numbers(self, form: str, count: int) -> npt.NDArray[Any]:
        return np.frombuffer(self.take(count * np.dtype(form).itemsize), form)

    def singletons(self, code: bytes, count: int) -> list[Any]:
        data = self.numbers("u1", count)
        if count and int(data.max()) > (code == b"T"):
            raise self.error("a byte stands for no value")
        truths: list[Any] = data.astype(np.bool_).tolist()
        return [None] * count if code == b"N" else truths

    def lengths(self, count: int) -> npt.NDArray[np.int64]:
        """Where each part ends, and 0 before; no more bytes than there can be parts of."""
        code = self.take(1)
        if code not in (b"1", b"2", b"4", b"8"):
            raise self.error("lengths are no column of ints")
        sizes = self.numbers(_FORMS[code], count).astype(np.int64)
        left = len(self.data) - self.at
        if count and (int(sizes.min()) < 0 or float(sizes.sum(dtype=np.float64)) > left):
            raise self.error("parts are longer than what follows")
        return np.concatenate(([0], np.cumsum(sizes)))

    def cut_bytes(self, count: int) -> list[bytes]:
        ends = self.lengths(count).tolist()
        data = self.take(ends[-1])
        return [data[lo:hi] for lo, hi in pairwise(ends)]

    def strings(self, count: int) -> list[str]:
        ends = self.lengths(count).tolist()
        text = self.text()
        if len(text) != ends[-1]:
            raise self.error("texts are not as long as they should be")
        return [text[lo:hi] for lo, hi in pairwise(ends)]

    def columns_of_dicts(self, count: int, depth: int) -> tuple[list[Any], list[Any]]:
        self.keys_open += 1
        keys = self.column(count, depth)
        self.keys_open -= 1
        return keys, self.column(count, depth)

    def dicts(self, count: int, depth: int) -> list[dict[Any, Any]]:
        ends = self.lengths(count)
        keys, values = self.columns_of_dicts(int(ends[-1]), depth + 1)
        size = _common_size(ends)
        first = keys[:size]
        if size and set(map(type, keys)) == {str} and keys == first * count:
            self.joined(first, first)  # no key stands twice
            return list(map(dict, map(zip, repeat(first, count), _rows(values, size))))
        return [self.joined(keys[lo:hi], values[lo:hi]) for lo, hi in pairwise(ends.tolist())]

    def numpy_numbers(self, count: int, depth: int) -> list[Any]:
        dtype = self.dtype(depth)
        if not issubclass(dtype.type, np.number | np.bool_):
            raise self.error(f"a column of {dtype} is not known")
        return list(self.filled((count,), dtype))

    def union(self, count: int, depth: int) -> list[Any]:
        kinds = self.take(1)[0]
        codes = self.numbers("u1", count)
        counts = np.bincount(codes, minlength=kinds).tolist()
        if len(counts) > kinds or 0 in counts:
            raise self.error("a value stands in no column")
        columns = [iter(self.column(one, depth, in_union=True)) for one in counts]
        return [next(columns[code]) for code in codes.tolist()]

    def dtype(self, depth: int) -> np.dtype[Any]:
        described = self.node(depth + 1)
        try:
            return _dtype_of(described)
        except _DTYPE_ERRORS:
            raise self.error(f"{str(described)[:80]!r} is not a dtype known here") from None

    def scalar(self, depth: int) -> Any:
        array = self.filled((1,), self.dtype(depth))
        # A structured scalar is a view, and as a key it must be one that cannot change.
        array.flags.writeable = not self.keys_open
        return array[0]

    def array(self, depth: int) -> Any:
        dtype = self.dtype(depth)
        ndim = self.number()
        if ndim > NDIM_MAX:
            raise self.error(f"an array has {ndim} dimensions")
        return self.filled(tuple(self.number() for _ in range(ndim)), dtype)

    def filled(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """A new array of the bytes that follow."""
        length = self.number()
        if prod(shape) * dtype.itemsize != length or max(shape, default=0) > ITEM_BYTES_MAX:
            raise self.error(f"{length} bytes do not fill an array of shape {shape}")
        source = memoryview(self.data)[self.at : self.at + length]
        if len(source) != length:
            raise self.error("it ends too early")
        self.at += length
        try:
            array = np.empty(shape, dtype)
        except ValueError:
            raise self.error(f"no array can have the shape {shape}") from None
        # As bytes, because frombuffer refuses some dtypes, such as those of size 0.
        array.reshape(-1).view(np.uint8).data[:] = source
        return array
