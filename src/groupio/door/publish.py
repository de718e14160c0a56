"""Makes the door of a committed epoch: ``dcp/<epoch>`` in its store.

The directory holds ``.metadata``, which ``torch.distributed.checkpoint`` reads, side files, and
``groupio.json``, which says of which epoch the door is and has a digest of each file. Everything
in it is derived from the epoch and can be made again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from groupio.backend.base import SEGMENTS, Backend
from groupio.backend.doors import DoorFile, Doors
from groupio.client.store_reader import StoreReader
from groupio.door.contents import Contents, Shown, read_contents
from groupio.door.pieces import Finder, Piece
from groupio.door.record import RECORD, DoorFileRow, encode_record, read_record
from groupio.door.side import Copies, Place, write_values
from groupio.errors import FormatError, GroupIOError, IntegrityError, NotFound
from groupio.format.dcp_metadata import METADATA_NAME, TensorEntry, ValueEntry, encode_metadata
from groupio.format.frames import Frames
from groupio.format.manifest import ManifestReader
from groupio.format.segment import SegmentReader
from groupio.model import DecisionKey, EpochHeader

log = logging.getLogger("groupio.door")

AWAIT_POLL_S = 0.1
"""How often it is looked whether another node has made a door."""

DCP = "dcp"
"""What the header of an epoch says that was saved with this door."""


@dataclass(frozen=True, slots=True)
class Door:
    """A door that was published. ``files`` are those of the directory and their sizes in bytes;
    ``unseen`` the tensors that it cannot show."""

    path: str
    epoch: int
    tensors: int
    values: int
    pieces: int
    copied: int
    """Bytes of chunks that had to be copied."""
    files: dict[str, int]
    unseen: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """The sizes of the files together."""
        return sum(self.files.values())


def make_door(
    reader: StoreReader,
    manifest: ManifestReader,
    *,
    pause: Callable[[], None] = lambda: None,
    threads: int = 1,
) -> Door:
    """Make the door of the epoch of ``manifest`` and publish it, durably, instead of an older one.

    ``pause`` is called now and then by a thread that would rather let others work. IntegrityError
    when something of the epoch is damaged, StorageError or StorageFull when it cannot be written;
    an older door is then still there.
    """
    pause()
    contents = read_contents(reader, manifest, threads)
    finder = Finder(manifest, _frames_of(reader.backend, manifest))
    copies = Copies(reader.backend, manifest)
    tensors = [_entry(finder, copies, shown) for shown in contents.tensors]
    with reader.backend.doors() as doors, doors.create(str(manifest.header.epoch)) as new:
        files: dict[str, DoorFile] = {}

        def create(name: str) -> DoorFile:
            files[name] = new.create(name)
            return files[name]

        copies.write(create, pause)
        _write_rest(manifest, contents, tensors, files, create)
        new.publish()
    if contents.unseen:
        log.warning(
            "the door of epoch %d does not show %d tensor(s) of dtypes that it cannot have: %s",
            manifest.header.epoch,
            len(contents.unseen),
            ", ".join(contents.unseen[:5]),
        )
    return Door(
        path=f"{doors.path}/{manifest.header.epoch}",
        epoch=manifest.header.epoch,
        tensors=len(tensors),
        values=len(contents.values),
        pieces=sum(len(entry.boxes) for entry in tensors),
        copied=copies.bytes,
        files={name: file.size for name, file in files.items()},
        unseen=tuple(contents.unseen),
    )


def ensure_door(
    store: str,
    epoch: int | None,
    *,
    wanted: bool = False,
    pause: Callable[[], None] = lambda: None,
    file_mode: int | None = None,
    umask: int | None = None,
) -> Door | None:
    """Make the door of ``epoch`` unless it is there; None when there was nothing to do.

    With ``epoch`` None: of the newest epoch of the line. Not ``wanted``: only if the epoch was
    saved with a door. Where no door is to be made, or it could
    not be, that of another write of the epoch, which a rewind abandoned, is removed: torch would
    read the wrong bytes there. Errors as :func:`make_door`; NotFound when a numbered epoch is not
    committed. ``file_mode`` and ``umask`` as of ``PosixBackend.open``.
    """
    try:
        with StoreReader.open(store, file_mode=file_mode, umask=umask) as reader:
            manifest = reader.resolve("latest" if epoch is None else epoch)
            with reader.backend.doors() as doors:
                if has_door(doors, manifest.header):
                    return None
                if manifest.header.door != DCP and not wanted:
                    remove_other(doors, manifest.header)
                    return None
                try:
                    return make_door(reader, manifest, pause=pause)
                except GroupIOError:
                    remove_other(doors, manifest.header)
                    raise
    except NotFound:
        if epoch is None:
            return None
        raise


def await_door(store: str, epoch: int, timeout_s: float) -> bool:
    """Wait until somebody else published the door of ``epoch``; False when it is not there in time.

    NotFound when the epoch is not committed, StorageError when the store cannot be read.
    """
    deadline = time.monotonic() + timeout_s
    with StoreReader.open(store) as reader:
        header = reader.resolve(epoch).header
        with reader.backend.doors() as doors:
            while not has_door(doors, header):
                if time.monotonic() >= deadline:
                    return False
                time.sleep(AWAIT_POLL_S)
    return True


def has_door(doors: Doors, header: EpochHeader) -> bool:
    """Whether the directory of the epoch's number is the whole door of this very epoch.

    Only names and sizes are looked at.
    """
    name = str(header.epoch)
    try:
        record = read_record(doors, name)
        if record is None or not record.is_of(header):
            return False
        there = doors.sizes(name)
    except GroupIOError:
        return False  # something else than a door of ours
    return all(there.get(file) == row.bytes for file, row in record.files.items())


def remove_other(doors: Doors, header: EpochHeader) -> None:
    """Remove the door with the epoch's number if it is that of another write of the epoch."""
    name = str(header.epoch)
    try:
        record = read_record(doors, name)
    except GroupIOError:
        return  # something else than a door of ours
    if record is not None and not record.is_of(header):
        doors.remove(name)


def _write_rest(
    manifest: ManifestReader,
    contents: Contents,
    tensors: list[TensorEntry],
    files: dict[str, DoorFile],
    create: Callable[[str], DoorFile],
) -> None:
    """The values, then the metadata that leads to everything, then the record of the door."""
    values = write_values(contents.values, create)
    entries = [ValueEntry(name, place) for name, place in values.items()]
    _write_whole(create(METADATA_NAME), encode_metadata(tensors, entries, contents.paths))
    header = manifest.header
    key = str(DecisionKey(header.lineage, header.epoch, header.attempt))
    rows = {name: DoorFileRow(file.size, file.digest().hex()) for name, file in files.items()}
    _write_whole(create(RECORD), encode_record(key, header.write_id, rows))


def _write_whole(file: DoorFile, data: bytes) -> None:
    file.write(data)
    file.sync_close()


def _frames_of(backend: Backend, manifest: ManifestReader) -> dict[int, Frames]:
    """The frames of the epoch's segments that have some, by the index of the segment.

    Where they cannot be read the chunks are copied instead, and verified on the way.
    """
    found: dict[int, Frames] = {}
    for index, segment in enumerate(manifest.segments):
        try:
            with backend.reader(SEGMENTS, segment.name) as reader:
                frames = SegmentReader(reader.read, reader.size, reader.path).frames
        except (IntegrityError, FormatError) as error:
            log.warning("chunks of %s are copied: %s", segment.name, error)
            continue
        if frames is not None:
            found[index] = frames
    return found


def _entry(finder: Finder, copies: Copies, shown: Shown) -> TensorEntry:
    """The tensor; where its copied pieces are, if it has any, is filled in by ``copies``."""
    spec = shown.spec
    if shown.more is None and len(shown.rows) == 1:
        # One chunk in one box, as 20,000 small tensors are.
        place = finder.place(shown.rows[0], shown.dtype, spec.shape)
        if place is not None:
            box = (spec.offsets, spec.shape)
            return TensorEntry(shown.name, shown.dtype, spec.global_shape, (box,), (place,))
    pieces = _pieces(finder, shown)
    places: list[Place] = []
    for piece in pieces:
        if piece.place is None:
            copies.add(piece.rows, shown.dtype, piece.box[1], places)
        else:
            places.append(piece.place)
    boxes = [piece.box for piece in pieces]
    return TensorEntry(shown.name, shown.dtype, spec.global_shape, boxes, places)


def _pieces(finder: Finder, shown: Shown) -> list[Piece]:
    """The pieces of all boxes. A piece is known by where it starts: of two that start at the same
    index (boxes that overlap without being equal) the larger one is taken."""
    best: dict[tuple[int, ...], Piece] = {}
    for spec, rows in shown.boxes():
        for piece in finder.pieces(spec, rows, shown.dtype):
            known = best.setdefault(piece.box[0], piece)
            if prod(known.box[1]) < prod(piece.box[1]):
                best[piece.box[0]] = piece
    return list(best.values())
