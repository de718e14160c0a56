"""The few opcodes of pickle protocol 2 that torch needs, as bytes.

torch reads tensors and ``.metadata`` files through pickles. groupio writes them from these fixed
pieces and never reads one. Every function gives the bytes that leave one object on the stack of
the machine that unpickles.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from groupio.errors import InvalidInput

PROTO = b"\x80\x02"
STOP = b"."
MARK = b"("
NONE = b"N"
FALSE = b"\x89"
EMPTY_DICT = b"}"
EMPTY_LIST = b"]"
EMPTY_TUPLE = b")"
APPENDS = b"e"
SETITEMS = b"u"
BUILD = b"b"
NEWOBJ = b"\x81"
REDUCE = b"R"
POP = b"0"
PERSISTENT = b"Q"

_TUPLES = (EMPTY_TUPLE, b"\x85", b"\x86", b"\x87")
_SHORT = tuple(b"K%c" % value for value in range(256))


def global_name(module: str, name: str) -> bytes:
    """The class, function or constant ``name`` of ``module``."""
    return f"c{module}\n{name}\n".encode("ascii")


def text(value: str) -> bytes:
    """A str; lone surrogates come back too."""
    raw = value.encode("utf-8", "surrogatepass")
    return b"X" + len(raw).to_bytes(4, "little") + raw


def integer(value: int) -> bytes:
    """An int of any size up to 255 bytes; InvalidInput for a larger one."""
    if 0 <= value < 256:
        return _SHORT[value]
    if 0 <= value < 1 << 16:
        return b"M" + value.to_bytes(2, "little")
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + value.to_bytes(4, "little", signed=True)
    nbytes = value.bit_length() // 8 + 1
    if nbytes > 255:
        raise InvalidInput(f"an int of {nbytes} bytes is too large for a record that torch reads")
    return b"\x8a" + bytes((nbytes,)) + value.to_bytes(nbytes, "little", signed=True)


def tuple_of(parts: Sequence[bytes]) -> bytes:
    """A tuple of the objects that ``parts`` make."""
    if len(parts) < len(_TUPLES):
        return b"".join(parts) + _TUPLES[len(parts)]
    return b"".join((MARK, *parts, b"t"))


def integers(values: Iterable[int]) -> bytes:
    """A tuple of ints."""
    return tuple_of([integer(value) for value in values])


def keep(number: int) -> bytes:
    """Files the object on top of the stack under ``number``, and leaves it there."""
    return b"q%c" % number if number < 256 else b"r" + number.to_bytes(4, "little")


def kept(number: int) -> bytes:
    """The object that was filed under ``number``."""
    return b"h%c" % number if number < 256 else b"j" + number.to_bytes(4, "little")
