"""What a store lists: its decisions, opened no further than their headers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from groupio.backend.base import EPOCHS, LINEAGES, RandomReader, read_record
from groupio.backend.posix import PosixBackend
from groupio.cli.output import CommandError
from groupio.client.store_reader import check_is_store
from groupio.errors import FormatError, GroupIOError, IntegrityError, NotFound, StorageError
from groupio.format.manifest import ManifestReader
from groupio.format.records import (
    AbortRecord,
    RecordKind,
    StoreRecord,
    decode_abort,
    decode_lineage,
    decode_record_kind,
    parse_key,
    parse_lineage_name,
)
from groupio.model import DecisionKey, EpochHeader, Lineage
from groupio.protocol import lineage as lines

HEAD_BYTES = 4096
"""The first bytes of a record that tell its kind."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A record that cannot be read, where it is and why."""

    path: str
    error: GroupIOError
    key: DecisionKey | None = None


@dataclass(slots=True)
class Catalog:
    """The decisions of a store by key, and what could not be read of them."""

    record: StoreRecord
    lineages: tuple[Lineage, ...] = ()
    committed: dict[DecisionKey, EpochHeader] = field(default_factory=dict)
    aborted: dict[DecisionKey, AbortRecord] = field(default_factory=dict)
    unreadable: list[Unreadable] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    """Files whose names are not those of decisions or lineages."""

    @property
    def visible(self) -> dict[int, DecisionKey]:
        """Commits that the current line shows, by epoch; the others are abandoned."""
        table = lines.by_number(self.lineages)
        return lines.visible(self.committed, table, lines.current(table))

    def find(self, epoch: str, lineage: int | None = None) -> DecisionKey:
        """The commit of ``epoch`` ("latest" or a number), of the current line or ``lineage``.

        CommandError for what is no epoch, NotFound for one that is not committed, the error of
        its record when that cannot be read.
        """
        visible = self.visible
        if epoch == "latest":
            if lineage is not None:
                visible = {k.epoch: k for k in sorted(self.committed) if k.lineage == lineage}
            if not visible:
                raise NotFound("no epoch is committed in this store yet")
            return visible[max(visible)]
        if not epoch.isdecimal():
            raise CommandError(f"{epoch!r} is not an epoch: give its number, or 'latest'")
        number = int(epoch)
        if lineage is None and number in visible:
            return visible[number]
        abandoned = [
            key for key in self.committed if key.epoch == number and lineage in (None, key.lineage)
        ]
        if abandoned:
            return max(abandoned)
        for bad in self.unreadable:
            key = bad.key
            if key is not None and key.epoch == number and lineage in (None, key.lineage):
                raise bad.error
        raise NotFound(f"epoch {number} is not committed in this store; {self._offer()}")

    def _offer(self) -> str:
        epochs = sorted({key.epoch for key in self.committed})
        if not epochs:
            return "none is"
        shown = ", ".join(map(str, epochs[-8:]))
        return f"there is {shown}" if len(epochs) <= 8 else f"the newest are {shown}"


@contextmanager
def open_store(store: str) -> Iterator[PosixBackend]:
    """The store for reading; NotFound when there is none at that path, InvalidInput when a
    checkpoint of torch is."""
    backend = PosixBackend.open(store, create=False)
    try:
        check_is_store(backend)
        yield backend
    finally:
        backend.close()


def read_catalog(backend: PosixBackend) -> Catalog:
    """List a store. What is damaged stands in ``unreadable``; it raises for the store alone."""
    catalog = Catalog(backend.store_record())
    found = []
    for name in backend.list(LINEAGES):
        path = f"{backend.path}/{LINEAGES}/{name}"
        if parse_lineage_name(name) is None:
            catalog.foreign.append(path)
            continue
        try:
            found.append(decode_lineage(backend.read(LINEAGES, name), path))
        except (FormatError, IntegrityError, NotFound, StorageError) as error:
            catalog.unreadable.append(Unreadable(path, error))
    catalog.lineages = tuple(found)
    for name in backend.list(EPOCHS):
        key = parse_key(name)
        if key is None:
            catalog.foreign.append(f"{backend.path}/{EPOCHS}/{name}")
            continue
        try:
            _add_decision(catalog, backend, key)
        except (FormatError, IntegrityError, NotFound, StorageError) as error:
            path = f"{backend.path}/{EPOCHS}/{name}"
            catalog.unreadable.append(Unreadable(path, error, key))
    return catalog


def _add_decision(catalog: Catalog, backend: PosixBackend, key: DecisionKey) -> None:
    with backend.reader(EPOCHS, str(key)) as reader:
        kind = decode_record_kind(reader.read(0, min(reader.size, HEAD_BYTES)), reader.path)
        if kind is RecordKind.COMMIT:
            catalog.committed[key] = open_manifest(reader).header
        elif kind is RecordKind.ABORT:
            catalog.aborted[key] = decode_abort(read_record(reader), reader.path)
        else:
            raise FormatError(
                f"{reader.path} is a record of kind {kind.name.lower()}, not a decision",
                path=reader.path,
            )


def open_manifest(reader: RandomReader) -> ManifestReader:
    """The manifest in an open record; the reader stays open as long as it is used."""
    return ManifestReader(reader.read, reader.size, reader.path)
