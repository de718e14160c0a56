"""The frame around every binary record: a fixed header, a root, and for a manifest a body.

::

    magic "GRPIOREC", version u16, kind u16, root length u32, total length u64,
    BLAKE3 of the root (32), first 8 bytes of the BLAKE3 of the 56 bytes so far
    root    msgpack
    body    the sections that the root describes, without gaps

Later versions keep these 64 bytes as they are, so that a reader can tell a newer record from a
damaged one.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from blake3 import blake3

from groupio.errors import FormatError
from groupio.format.columns import damaged
from groupio.format.limits import RECORD_VERSION, ROOT_BYTES_MAX

_MAGIC = b"GRPIOREC"
_FIXED = struct.Struct("<8sHHIQ32s")
_CHECK_BYTES = 8
HEADER_BYTES = _FIXED.size + _CHECK_BYTES
"""Size of the fixed header: 64."""


class RecordKind(IntEnum):
    """What a record is."""

    COMMIT = 1
    ABORT = 2
    INFLIGHT = 3
    LINEAGE = 4
    CONTROLLER = 5
    CATALOGUE = 6


_KINDS = frozenset(int(kind) for kind in RecordKind)


class Envelope(NamedTuple):
    """A checked header; lengths in bytes."""

    kind: RecordKind
    root_length: int
    total_length: int
    root_digest: bytes

    def checked_root(self, root: bytes, path: str) -> bytes:
        """``root`` if it is the one that this header describes, else IntegrityError."""
        if len(root) != self.root_length or blake3(root).digest() != self.root_digest:
            raise damaged(path, "the digest of its root does not match")
        return root


def wrap(kind: RecordKind, root: bytes, body: Sequence[bytes] = ()) -> bytes:
    """A whole record of ``root`` and the parts of ``body``."""
    total = HEADER_BYTES + len(root) + sum(map(len, body))
    digest = blake3(root).digest()
    fixed = _FIXED.pack(_MAGIC, RECORD_VERSION, kind, len(root), total, digest)
    return b"".join((fixed, _check(fixed), root, *body))


def _check(fixed: bytes) -> bytes:
    return blake3(fixed).digest(_CHECK_BYTES)


def read_envelope(first: bytes, path: str) -> Envelope:
    """The header at the start of ``first`` (at least 64 bytes of the record).

    FormatError for a version or kind that this release does not know; IntegrityError for
    anything that is not the header of a record.
    """
    fixed = first[: _FIXED.size]
    if len(first) < HEADER_BYTES or _check(fixed) != first[_FIXED.size : HEADER_BYTES]:
        raise damaged(path, "it does not start with the header of a record")
    magic, version, kind, root_length, total, digest = _FIXED.unpack(fixed)
    if magic != _MAGIC:
        raise damaged(path, "it does not start with the header of a record")
    if version != RECORD_VERSION or kind not in _KINDS:
        raise FormatError(
            f"{path} is a record of kind {kind} in version {version}; this release reads version "
            f"{RECORD_VERSION}, use a newer one",
            path=path,
        )
    if root_length > ROOT_BYTES_MAX or total < HEADER_BYTES + root_length:
        raise damaged(path, f"its header gives impossible lengths ({root_length} of {total})")
    return Envelope(RecordKind(kind), root_length, total, digest)


def read_root(data: bytes, kind: RecordKind, path: str) -> bytes:
    """The root of a whole record without a body; raises as :func:`read_envelope` does, and
    FormatError when it is of another kind."""
    envelope = read_envelope(data, path)
    check_kind(envelope, kind, path)
    if len(data) != envelope.total_length or len(data) != HEADER_BYTES + envelope.root_length:
        raise damaged(path, f"it has {len(data)} bytes and not {envelope.total_length}")
    return envelope.checked_root(data[HEADER_BYTES:], path)


def check_kind(envelope: Envelope, kind: RecordKind, path: str) -> None:
    """FormatError when the record is of another kind than ``kind``."""
    if envelope.kind != kind:
        raise FormatError(
            f"{path} is a record of kind {envelope.kind.name.lower()} where one of kind "
            f"{kind.name.lower()} was expected",
            path=path,
        )
