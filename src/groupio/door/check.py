"""Whether a door is what was published: its record, its files, and whose door it is.

A damaged door hurts no epoch: it is derived, and ``groupio export --dcp`` makes it again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from blake3 import blake3

from groupio.backend.doors import Doors
from groupio.door.publish import RECORD
from groupio.door.side import EXTRA
from groupio.errors import GroupIOError, StorageError
from groupio.format.dcp_metadata import METADATA_NAME
from groupio.model import EpochHeader

BLOCK_BYTES = 4 << 20
"""Files are read in blocks of this size."""

Progress = Callable[[int], None]
"""Told how many more bytes of copied chunks were compared."""


class Flaw(NamedTuple):
    """One thing that is wrong with a door.

    ``kind`` is "missing", "truncated", "corrupt", "swapped" (sound, but of another write of the
    epoch), or "unreadable"; ``path`` is the file or the directory.
    """

    kind: str
    path: str
    detail: str


def check_door(
    doors: Doors,
    name: str,
    header: EpochHeader | None,
    *,
    read_data: bool,
    progress: Progress = lambda _: None,
) -> list[Flaw]:
    """What is wrong with the door ``name``, which should be that of the epoch of ``header``.

    Without a header (its record cannot be read) only the files are compared with the record of
    the door. The digests of copied chunks are compared only with ``read_data``. ``detail`` says
    nothing of how to repair it, which is the same for all.
    """
    path = f"{doors.path}/{name}"
    try:
        raw = doors.read(name, RECORD)
        if raw is None:
            return [Flaw("missing", f"{path}/{RECORD}", "the record of the door is missing")]
        write_id, files = _parse(raw)
    except StorageError as error:
        return [Flaw("unreadable", path, error.message)]
    except (GroupIOError, ValueError, KeyError, TypeError, AttributeError):
        return [Flaw("corrupt", f"{path}/{RECORD}", "the record of the door is damaged")]
    if header is not None and write_id != header.write_id:
        detail = f"it shows another write of epoch {name} than the one that is committed"
        return [Flaw("swapped", path, detail)]
    flaws = []
    for file, (size, digest) in files.items():
        wanted = digest if read_data or not _has_chunks(file) else None
        count = progress if _has_chunks(file) else lambda _: None
        try:
            found = _check_file(doors, name, file, size, wanted, count)
        except StorageError as error:
            found = ("unreadable", error.message)
        except GroupIOError:
            found = ("truncated", "it became shorter while it was read")
        if found is not None:
            flaws.append(Flaw(found[0], f"{path}/{file}", found[1]))
    return flaws


def _parse(raw: bytes) -> tuple[str, dict[str, tuple[int, bytes]]]:
    """The write id of the epoch, and size and digest of each file."""
    record: Any = json.loads(raw)
    rows: Mapping[str, Any] = record["files"]
    files = {str(f): (int(row["bytes"]), bytes.fromhex(row["blake3"])) for f, row in rows.items()}
    if METADATA_NAME not in files:
        raise KeyError(METADATA_NAME)
    return str(record["write_id"]), files


def _has_chunks(file: str) -> bool:
    """Whether it is a file of copied chunks, which may be large."""
    return file.startswith(EXTRA.removesuffix(".bin"))


def _check_file(
    doors: Doors, name: str, file: str, size: int, digest: bytes | None, progress: Progress
) -> tuple[str, str] | None:
    reader = doors.reader(name, file)
    if reader is None:
        return "missing", "a file of the door is missing"
    with reader:
        if reader.size < size:
            return "truncated", f"it has {reader.size} bytes instead of {size}"
        if reader.size > size:
            return "corrupt", f"it has {reader.size} bytes instead of {size}"
        if digest is None:
            return None
        hashed = blake3()
        for start in range(0, size, BLOCK_BYTES):
            block = reader.read(start, min(BLOCK_BYTES, size - start))
            hashed.update(block)
            progress(len(block))
        if hashed.digest() != digest:
            return "corrupt", "its bytes have another digest than its door's record says"
    return None
