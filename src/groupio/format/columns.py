"""Sections: stretches of a file that carry arrays or tables, each under its own digest.

A section says how many bytes it takes, how many it holds when unpacked, how it is encoded and
the BLAKE3 digest of the bytes as stored. Numbers are little-endian arrays; where zlib makes an
array smaller (tried on the differences of neighbours, which are small for offsets and indices)
it is stored so, else raw.
"""

from __future__ import annotations

import zlib
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3
from msgspec import Meta

from groupio.errors import IntegrityError
from groupio.model import DIGEST_BYTES

RAW = 0
"""Stored as it is."""

ZLIB = 1
"""Stored as one zlib stream."""

DELTA = 2
"""An integer array, of whose first differences (from 0, wrapping) there is one zlib stream."""

_ZLIB_LEVEL = 1  # Higher levels cost more time than the few bytes that they save.
_ZLIB_RATIO_MAX = 1032  # No deflate stream grows more than this.


Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
"""A size or a number of things, as msgspec checks it."""

Digest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
"""A BLAKE3 digest, as msgspec checks it."""


class Section(msgspec.Struct, frozen=True, array_like=True):
    """Describes a section: bytes ``stored``, bytes ``raw`` when unpacked, encoding, digest."""

    stored: Count
    raw: Count
    encoding: Annotated[int, Meta(ge=RAW, le=DELTA)]
    digest: Digest


def damaged(path: str, why: str, chunk: bytes | None = None) -> IntegrityError:
    """The error for stored bytes of ``path`` that are not what was written."""
    return IntegrityError(
        f"{path} is damaged: {why}; restore the file from a copy or use another epoch",
        path=path,
        chunk=None if chunk is None else chunk.hex(),
    )


def pack_array(array: npt.NDArray[Any], *, compress: bool = True) -> tuple[Section, bytes]:
    """A section of a little-endian integer ``array`` of one dimension, and its stored bytes.

    ``compress`` False skips the attempt, for arrays that are known to be random (digests).
    """
    raw = array.tobytes()
    if compress:
        packed = zlib.compress(np.diff(array, prepend=array.dtype.type(0)).tobytes(), _ZLIB_LEVEL)
        if len(packed) < len(raw):
            return Section(len(packed), len(raw), DELTA, blake3(packed).digest()), packed
    return Section(len(raw), len(raw), RAW, blake3(raw).digest()), raw


def pack_bytes(raw: bytes) -> tuple[Section, bytes]:
    """A section of ``raw``, and its stored bytes."""
    packed = zlib.compress(raw, _ZLIB_LEVEL)
    if len(packed) < len(raw):
        return Section(len(packed), len(raw), ZLIB, blake3(packed).digest()), packed
    return Section(len(raw), len(raw), RAW, blake3(raw).digest()), raw


def check_stored(section: Section, bytes_max: int, path: str, what: str) -> None:
    """IntegrityError, before they are read, when the stored bytes are more than ``what`` can have.

    Nothing is stored in more bytes than it has when it is unpacked.
    """
    if section.stored > bytes_max:
        raise damaged(path, f"{what} takes {section.stored} bytes, more than {bytes_max}")


def unpack_bytes(section: Section, stored: bytes, raw_max: int, path: str, what: str) -> bytes:
    """What ``section`` holds, at most ``raw_max`` bytes; IntegrityError names ``what`` of
    ``path`` when the stored bytes are not those that were written."""
    if blake3(stored).digest() != section.digest:
        raise damaged(path, f"the digest of {what} does not match")
    if section.encoding == RAW:
        if section.raw != section.stored:
            raise damaged(path, f"{what} gives two sizes")
        if section.raw > raw_max:
            raise damaged(path, f"{what} is larger than {raw_max} bytes")
        return stored
    if section.raw > min(raw_max, section.stored * _ZLIB_RATIO_MAX):
        raise damaged(path, f"{what} claims to unpack to {section.raw} bytes")
    stream = zlib.decompressobj()
    try:
        raw = stream.decompress(stored, section.raw + 1)
    except zlib.error as error:
        raise damaged(path, f"{what} cannot be unpacked ({error})") from None
    if len(raw) != section.raw or not stream.eof or stream.unused_data:
        raise damaged(path, f"{what} does not unpack to {section.raw} bytes")
    return raw


def unpack_array(
    section: Section, stored: bytes, form: str, count: int, path: str, what: str
) -> npt.NDArray[Any]:
    """The array of ``count`` numbers of dtype ``form`` that ``section`` holds (read-only when it
    was stored raw); IntegrityError as for :func:`unpack_bytes`."""
    expected = count * np.dtype(form).itemsize
    if section.raw != expected:
        raise damaged(path, f"{what} has {section.raw} bytes for {count} numbers")
    array = np.frombuffer(unpack_bytes(section, stored, expected, path, what), form)
    # cumsum wraps as diff did, so any array comes back.
    return np.cumsum(array, dtype=array.dtype) if section.encoding == DELTA else array
