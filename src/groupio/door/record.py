"""The record of a door, ``groupio.json``: whose door it is, and its files with size and digest.

It is JSON, so that people and other tools can read it. Nothing of it is trusted before its size,
its types and the names in it have been checked. A record of schema 2 has a digest of itself;
records of schema 1, which earlier releases made, have none.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from blake3 import blake3
from msgspec import Meta

from groupio.backend.doors import Doors
from groupio.backend.folders import check_name
from groupio.errors import FormatError, IntegrityError, InvalidInput
from groupio.format.columns import Count, damaged
from groupio.format.dcp_metadata import METADATA_NAME
from groupio.format.records import Text
from groupio.model import EpochHeader

RECORD = "groupio.json"
"""The name of the file."""

RECORD_BYTES_MAX = 1 << 20
"""Largest record of a door in bytes; a real one has some hundred, and 150 more for each file."""

_SEALED, _UNSEALED = "groupio/door/2", "groupio/door/1"
_HEX = r"^[0-9a-f]{64}\Z"


class DoorFileRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of a door: its size in bytes, and the BLAKE3 digest of it in hex."""

    bytes: Count
    blake3: Annotated[str, Meta(pattern=_HEX)]


class DoorRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Whose door it is: the decision key and the write id of its epoch; ``files`` by name."""

    schema: Text
    key: Text
    write_id: Text
    files: dict[str, DoorFileRow]
    check: str = ""
    """BLAKE3 of the record with this field empty, in hex; "" in a record of schema 1."""

    @property
    def is_sealed(self) -> bool:
        """Whether a flipped bit of the record itself is noticed."""
        return self.schema == _SEALED

    def is_of(self, header: EpochHeader) -> bool:
        """Whether it is the door of this very write of the epoch."""
        return self.write_id == header.write_id


def encode_record(key: str, write_id: str, files: dict[str, DoorFileRow]) -> bytes:
    """The sealed record of a new door as the bytes of a file.

    InvalidInput when it could not be read again.
    """
    data = _bytes_of(DoorRecord(_SEALED, key, write_id, files))
    try:
        decode_record(data, "the new record")
    except (FormatError, IntegrityError) as error:
        raise InvalidInput(f"the record of a door cannot be written: {error.message}") from None
    return data


def decode_record(data: bytes, path: str) -> DoorRecord:
    """The record in ``data``; IntegrityError(path) for damage, FormatError for a newer schema."""
    if len(data) > RECORD_BYTES_MAX:
        raise damaged(path, f"it has {len(data)} bytes, too many for the record of a door")
    try:
        record = msgspec.json.decode(data, type=DoorRecord)
        for name in record.files:
            check_name(name.removeprefix("."))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, InvalidInput) as error:
        raise damaged(path, f"it is not the record of a door ({error})") from None
    if METADATA_NAME not in record.files:
        raise damaged(path, f"it does not list {METADATA_NAME}")
    if record.schema not in (_SEALED, _UNSEALED):
        raise FormatError(
            f"{path} is of schema {record.schema[:40]!r}; this release reads {_SEALED}, use a "
            "newer one",
            path=path,
        )
    # The whole file is compared: white space or another spelling would be bytes under no digest.
    if record.is_sealed and data != _bytes_of(record):
        raise damaged(path, "the digest of the door's record does not match")
    if not record.is_sealed and record.check:
        raise damaged(path, "its schema has no digest, and it gives one")
    return record


def read_record(doors: Doors, name: str) -> DoorRecord | None:
    """The record of the door ``name``; None when there is no door, or none with a record.

    Errors as :func:`decode_record`; StorageError when it cannot be read.
    """
    data = doors.read(name, RECORD, RECORD_BYTES_MAX)
    return None if data is None else decode_record(data, f"{doors.path}/{name}/{RECORD}")


def _bytes_of(record: DoorRecord) -> bytes:
    """The file of ``record`` with the digest that belongs to it, one field a line."""
    content = msgspec.json.encode(msgspec.structs.replace(record, check=""))
    sealed = msgspec.structs.replace(record, check=blake3(content).hexdigest())
    return msgspec.json.format(msgspec.json.encode(sealed), indent=1) + b"\n"
