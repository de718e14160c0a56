"""Plain values as pickles that unpickle to equal values of the same types.

Written from fixed pieces (:mod:`groupio.format.opcodes`); groupio never reads a pickle. Values
with arrays name numpy (and ml_dtypes), which whoever unpickles them needs to have; all others name
the standard library only. OrderedDict, Counter and set are among what
``torch.load(weights_only=True)`` accepts.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from groupio.errors import InvalidInput
from groupio.format import opcodes as op
from groupio.format.containers import FACTORIES, kind_of
from groupio.format.dtypes import ML_DTYPES

_TRUE = b"\x88"
_FLOAT = struct.Struct(">d")
_INT_BYTES_MAX = 255
_LONG = b"\x8b"
_BYTES, _LONG_BYTES = b"B", b"\x8e"
_PROTO_4 = b"\x80\x04"

Emit = Callable[[bytes], None]


def pickle_value(value: Any) -> bytes:
    """The pickle of a plain value, as :func:`groupio.format.codec.decode_plain` gives it.

    InvalidInput for what is not plain, and for numpy arrays of objects.
    """
    parts: list[bytes] = []
    _write(value, parts.append)
    parts.append(op.STOP)
    # bytes have an opcode of their own since protocol 3; torch writes protocol 2 otherwise.
    newer = any(part[:1] in (_BYTES, _LONG_BYTES) for part in parts)
    return b"".join((_PROTO_4 if newer else op.PROTO, *parts))


def _write(value: Any, emit: Emit) -> None:
    write = _WRITERS.get(type(value))
    if write is not None:
        write(value, emit)
    elif isinstance(value, np.ndarray):
        _write_array(value, emit)
    elif isinstance(value, np.generic):
        _write_scalar(value, emit)
    else:
        _write_container(value, emit)


def _write_int(value: int, emit: Emit) -> None:
    nbytes = value.bit_length() // 8 + 1
    if nbytes <= _INT_BYTES_MAX:
        emit(op.integer(value))
    else:
        data = value.to_bytes(nbytes, "little", signed=True)
        emit(_LONG + nbytes.to_bytes(4, "little") + data)


def _write_bytes(value: bytes, emit: Emit) -> None:
    size = len(value)
    emit(_BYTES + size.to_bytes(4, "little") if size < 1 << 32 else _long_bytes(size))
    emit(value)


def _long_bytes(size: int) -> bytes:
    return _LONG_BYTES + size.to_bytes(8, "little")


def _write_complex(value: complex, emit: Emit) -> None:
    emit(op.global_name("builtins", "complex"))
    emit(_float(value.real) + _float(value.imag) + b"\x86" + op.REDUCE)


def _float(value: float) -> bytes:
    return b"G" + _FLOAT.pack(value)


def _write_list(value: list[Any], emit: Emit) -> None:
    emit(op.EMPTY_LIST + op.MARK)
    for entry in value:
        _write(entry, emit)
    emit(op.APPENDS)


def _write_tuple(value: tuple[Any, ...], emit: Emit) -> None:
    emit(op.MARK)
    for entry in value:
        _write(entry, emit)
    emit(b"t")


def _write_dict(value: dict[Any, Any], emit: Emit) -> None:
    emit(op.EMPTY_DICT + op.MARK)
    _write_entries(value, emit)
    emit(op.SETITEMS)


def _write_entries(value: dict[Any, Any], emit: Emit) -> None:
    for key, entry in value.items():
        _write(key, emit)
        _write(entry, emit)


def _write_container(value: Any, emit: Emit) -> None:
    kind = kind_of(value)
    if kind is None:
        raise InvalidInput(f"a value of type {type(value).__name__} is not plain")
    name, content = kind.name, kind.take(value)
    module = "collections"
    if name in ("set", "frozenset", "range", "slice"):
        module = "builtins"
    elif name == "SimpleNamespace":
        module = "types"
    emit(op.global_name(module, name))
    match name:
        case "OrderedDict" | "defaultdict":
            factory = content[0] if name == "defaultdict" else ""
            entries = content[1] if name == "defaultdict" else content
            emit(_factory(factory) if name == "defaultdict" else op.EMPTY_TUPLE)
            emit(op.REDUCE + op.MARK)
            _write_entries(entries, emit)
            emit(op.SETITEMS)
        case "SimpleNamespace":
            emit(op.EMPTY_TUPLE + op.REDUCE)
            _write_dict(content, emit)
            emit(op.BUILD)
        case "deque":
            _write_tuple((content[1], content[0]), emit)
            emit(op.REDUCE)
        case "namedtuple":
            type_name, fields, values = content
            _write_tuple((type_name, fields), emit)
            emit(op.REDUCE)
            _write_tuple(values, emit)
            emit(op.REDUCE)
        case _:
            # The spans are made of three arguments, the others of one.
            _write_tuple(content if type(content) is tuple else (content,), emit)
            emit(op.REDUCE)


def _factory(name: str) -> bytes:
    if not name:
        return op.tuple_of([op.NONE])
    return op.tuple_of([op.global_name(FACTORIES[name].__module__, name)])


def _write_array(value: np.ndarray[Any, Any], emit: Emit) -> None:
    """``numpy.ndarray(shape, dtype, bytearray(...))``: writeable, and of any byte order."""
    emit(op.global_name("numpy", "ndarray"))
    emit(op.integers(value.shape))
    _write_dtype(value.dtype, emit)
    emit(op.global_name("builtins", "bytearray"))
    _write_bytes(value.tobytes(), emit)
    emit(b"\x85" + op.REDUCE + b"\x87" + op.REDUCE)


def _write_scalar(value: np.generic, emit: Emit) -> None:
    if isinstance(value, np.str_ | np.bytes_):
        # Not through an array, which would drop zeros at the end.
        emit(op.global_name("numpy", type(value).__name__))
        _write("".join(value) if isinstance(value, np.str_) else bytes(value), emit)
        emit(b"\x85" + op.REDUCE)
        return
    emit(op.global_name("operator", "getitem"))
    _write_array(np.asarray(value), emit)
    emit(op.EMPTY_TUPLE + b"\x86" + op.REDUCE)


def _write_dtype(dtype: np.dtype[Any], emit: Emit) -> None:
    if dtype.hasobject:
        raise InvalidInput(f"an array of dtype {dtype} has objects, which are not plain")
    emit(op.global_name("numpy", "dtype"))
    if dtype.name in ML_DTYPES and dtype.isnative:
        emit(op.global_name("ml_dtypes", dtype.name) + b"\x85" + op.REDUCE)
        return
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        emit(op.MARK)
        _write_dtype(base, emit)
        emit(op.integers(shape) + b"t\x85" + op.REDUCE)
        return
    if dtype.names is None or dtype.fields is None:
        # longlong and its like have the str of another type; they are equal dtypes.
        emit(op.text(dtype.str) + b"\x85" + op.REDUCE)
        return
    _write_fields(dtype, emit)


def _write_fields(dtype: np.dtype[Any], emit: Emit) -> None:
    """The argument of ``numpy.dtype`` for a structured dtype, with ``align``."""
    assert dtype.names is not None
    assert dtype.fields is not None
    rows = [(*dtype.fields[name], None)[:3] for name in dtype.names]
    emit(op.EMPTY_DICT + op.MARK)
    for key, values in (
        ("names", list(dtype.names)),
        ("offsets", [row[1] for row in rows]),
        ("titles", [row[2] for row in rows]),
        ("itemsize", dtype.itemsize),
    ):
        emit(op.text(key))
        _write(values, emit)
    emit(op.text("formats") + op.EMPTY_LIST + op.MARK)
    for row in rows:
        _write_dtype(row[0], emit)
    emit(op.APPENDS + op.SETITEMS)
    emit((_TRUE if dtype.isalignedstruct else op.FALSE) + b"\x86" + op.REDUCE)


_WRITERS: dict[type, Callable[[Any, Emit], None]] = {
    type(None): lambda _, emit: emit(op.NONE),
    bool: lambda value, emit: emit(_TRUE if value else op.FALSE),
    int: _write_int,
    float: lambda value, emit: emit(_float(value)),
    complex: _write_complex,
    str: lambda value, emit: emit(op.text(value)),
    bytes: _write_bytes,
    list: _write_list,
    tuple: _write_tuple,
    dict: _write_dict,
}
