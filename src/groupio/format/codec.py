"""Plain values as bytes: what comes back has the same values and the very same types.

Plain are None, bool, int of any size, float (every NaN payload, -0.0), complex, str (lone
surrogates too), bytes, list, tuple, dict with plain keys in their order, and numpy scalars and
arrays of any dtype without objects (structured and ml_dtypes ones too). Subclasses are not: a
reader could not know them.

An encoded value is the version byte 1 and one *node*: a tag byte and its content. ``n`` is an
unsigned LEB128 number::

    N T F      None, True, False          i n bytes   int, two's complement
    d 8 bytes  float                      c 16 bytes  complex
    s n utf8   str                        b n bytes   bytes
    l n nodes  list                       t n nodes   tuple
    m n pairs of nodes  dict              a dtype n n... n bytes   array: ndim, shape, C-order data
    u n utf8   numpy.str_                 v n bytes   numpy.bytes_
    g dtype n bytes     any other numpy scalar

``dtype`` is a node: a name (str) or, for a structured dtype, a tuple (see :func:`_dtype_value`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from groupio.errors import FormatError, InvalidInput
from groupio.format.dtypes import dtype_from_name, dtype_name
from groupio.format.limits import (
    DTYPE_FIELDS_MAX,
    ITEM_BYTES_MAX,
    NDIM_MAX,
    PLAIN_BYTES_MAX,
    PLAIN_DEPTH_MAX,
    PLAIN_VERSION,
)

_DOUBLE = struct.Struct("<d")
_COMPLEX = struct.Struct("<dd")
_DTYPE_ERRORS = (InvalidInput, FormatError, TypeError, ValueError, OverflowError)


class PlainError(Exception):
    """A value inside another is not plain; ``path`` leads to it (like ``['opt'][3]``)."""

    def __init__(self, path: str, type_name: str, hint: str) -> None:
        super().__init__(f"{path or 'the value'} of type {type_name} {hint}")
        self.path = path
        self.type_name = type_name
        self.hint = hint


def encode_plain(value: Any, *, name: str = "") -> bytes:
    """``value`` as bytes.

    InvalidInput for what is not plain: its message has ``name`` (of the item), the path inside
    the value, the type found there and what to do.
    """
    writer = _Writer()
    try:
        writer.node(value, "", 0)
    except PlainError as error:
        where = f"{name}{error.path}" or "the value"
        raise InvalidInput(f"{where} is of type {error.type_name}, which {error.hint}") from None
    return b"".join(writer.parts)


def decode_plain(data: bytes | bytearray | memoryview) -> Any:
    """The value that ``data`` encodes; arrays own their memory and are writable.

    FormatError when ``data`` is not exactly one encoded value of a known version.
    """
    reader = _Reader(bytes(data))
    if len(data) > PLAIN_BYTES_MAX or len(data) < 2:
        raise reader.error(f"its size is not 2 to {PLAIN_BYTES_MAX} bytes")
    if data[0] != PLAIN_VERSION:
        raise reader.error(f"it is of version {data[0]} and this release reads {PLAIN_VERSION}")
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

    def __init__(self) -> None:
        self.parts: list[bytes] = [bytes([PLAIN_VERSION])]
        self.size = 1

    def put(self, *parts: bytes) -> None:
        self.size += sum(map(len, parts))
        self.parts.extend(parts)

    def node(self, value: Any, path: str, depth: int) -> None:
        if depth > PLAIN_DEPTH_MAX:
            hint = f"lies deeper than {PLAIN_DEPTH_MAX} containers; flatten it or break the cycle"
            raise PlainError(_clipped(path), type(value).__name__, hint)
        # By exact type: a subclass would not come back as itself.
        write = _WRITERS.get(type(value))
        if write is None and isinstance(value, np.generic) and value.dtype.type is type(value):
            write = _write_scalar
        if write is None:
            hint = "cannot be stored; convert it to a plain value, a numpy array or bytes"
            raise PlainError(_clipped(path), _type_name(value), hint)
        write(self, value, path, depth)
        if self.size > PLAIN_BYTES_MAX:
            hint = f"makes the value larger than {PLAIN_BYTES_MAX} bytes; store it as its own item"
            raise PlainError(_clipped(path), _type_name(value), hint)


def _type_name(value: Any) -> str:
    kind = type(value)
    prefix = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{prefix}{kind.__qualname__}"


def _clipped(path: str) -> str:
    return path if len(path) <= 400 else f"{path[:200]}...{path[-200:]}"


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


def _write_singleton(writer: _Writer, value: Any, path: str, depth: int) -> None:
    writer.put(b"N" if value is None else b"T" if value else b"F")


def _write_int(writer: _Writer, value: int, path: str, depth: int) -> None:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    writer.put(b"i", _varint(len(data)), data)


def _write_float(writer: _Writer, value: float, path: str, depth: int) -> None:
    writer.put(b"d", _DOUBLE.pack(value))


def _write_complex(writer: _Writer, value: complex, path: str, depth: int) -> None:
    writer.put(b"c", _COMPLEX.pack(value.real, value.imag))


def _write_str(writer: _Writer, value: str, path: str, depth: int) -> None:
    data = value.encode("utf-8", "surrogatepass")
    writer.put(b"s" if type(value) is str else b"u", _varint(len(data)), data)


def _write_bytes(writer: _Writer, value: bytes, path: str, depth: int) -> None:
    exact = bytes(value)
    writer.put(b"b" if type(value) is bytes else b"v", _varint(len(exact)), exact)


def _write_sequence(
    writer: _Writer, value: list[Any] | tuple[Any, ...], path: str, depth: int
) -> None:
    writer.put(b"l" if type(value) is list else b"t", _varint(len(value)))
    for index, element in enumerate(value):
        writer.node(element, f"{path}[{index}]", depth + 1)


def _write_dict(writer: _Writer, value: dict[Any, Any], path: str, depth: int) -> None:
    writer.put(b"m", _varint(len(value)))
    for key, element in value.items():
        step = path + _step(key)
        writer.node(key, f"{step} (the key)", depth + 1)
        writer.node(element, step, depth + 1)


def _write_dtype(writer: _Writer, value: Any, path: str, depth: int) -> None:
    try:
        described = _dtype_value(value.dtype)
        made = _dtype_of(described)
        if made != value.dtype or made.type is not value.dtype.type:
            raise ValueError("it would come back as another dtype")
    except _DTYPE_ERRORS:
        kind = f"{_type_name(value)} with dtype {str(value.dtype)[:80]}"
        hint = "cannot be stored; convert it to numbers, bytes or fixed-width strings"
        raise PlainError(_clipped(path), kind, hint) from None
    writer.node(described, path, depth + 1)


def _write_scalar(writer: _Writer, value: Any, path: str, depth: int) -> None:
    writer.put(b"g")
    _write_dtype(writer, value, path, depth)
    data = value.tobytes()
    writer.put(_varint(len(data)), data)


def _write_array(writer: _Writer, value: Any, path: str, depth: int) -> None:
    writer.put(b"a")
    _write_dtype(writer, value, path, depth)
    writer.put(_varint(value.ndim), *map(_varint, value.shape))
    writer.put(_varint(value.nbytes), value.tobytes())


_WRITERS: dict[type, Callable[[_Writer, Any, str, int], None]] = {
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


class _Reader:
    """Walks over one encoded value; every count is checked against the bytes that are left."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.keys_open = 0

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
            case _:
                raise self.error(f"the tag {tag!r} is not known")

    def mapping(self, depth: int) -> dict[Any, Any]:
        count = self.count()
        result = {}
        for _ in range(count):
            self.keys_open += 1
            key = self.node(depth + 1)
            self.keys_open -= 1
            value = self.node(depth + 1)
            try:
                result[key] = value
            except TypeError:
                raise self.error(f"a {type(key).__name__} cannot be a key") from None
        if len(result) != count:
            raise self.error("a dict has a key twice")
        return result

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
