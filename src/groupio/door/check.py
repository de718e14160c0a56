"""Checks whether a door is what was published: its record, its files, and whose door it is.

A damaged door hurts no epoch: it is derived, and ``groupio export --dcp`` makes it again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from blake3 import blake3

from groupio.backend.doors import Doors
from groupio.door.record import RECORD, read_record
from groupio.door.side import EXTRA
from groupio.errors import GroupIOError, StorageError
from groupio.model import EpochHeader

BLOCK_BYTES = 4 << 20
"""Files are read in blocks of this size."""

Progress = Callable[[int], None]
"""Told how many more bytes of copied chunks were compared."""


class Flaw(NamedTuple):
    """One thing that is wrong with a door.

    ``kind`` is "missing", "truncated", "corrupt", "swapped" (sound, but of another write of the
    epoch), "unreadable", or "unsealed" (its record has no digest of itself, which is no damage);
    ``path`` is the file or the directory.
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
        record = read_record(doors, name)
    except StorageError as error:
        return [Flaw("unreadable", path, error.message)]
    except GroupIOError as error:
        return [Flaw("corrupt", f"{path}/{RECORD}", error.message)]
    if record is None:
        return [Flaw("missing", f"{path}/{RECORD}", "the record of the door is missing")]
    if header is not None and not record.is_of(header):
        detail = f"it shows another write of epoch {name} than the one that is committed"
        return [Flaw("swapped", path, detail)]
    flaws = []
    if not record.is_sealed:
        detail = "its record is of an earlier release and has no digest of itself"
        flaws.append(Flaw("unsealed", f"{path}/{RECORD}", detail))
    for file, row in record.files.items():
        size, digest = row.bytes, bytes.fromhex(row.blake3)
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
