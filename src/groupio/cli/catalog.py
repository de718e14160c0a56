"""Lists the decisions of a store, opened no further than their headers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from groupio.backend.base import EPOCHS, LINEAGES, RandomReader
from groupio.backend.posix import PosixBackend
from groupio.backend.tree import store_path
from groupio.cli.output import CommandError
from groupio.client.store_parts import is_store, part_store, parts_in
from groupio.client.store_reader import check_is_store
from groupio.errors import FormatError, GroupIOError, IntegrityError, NotFound, StorageError
from groupio.format.manifest import ManifestReader
from groupio.format.records import (
    StoreRecord,
    decode_lineage,
    parse_key,
    parse_lineage_name,
)
from groupio.model import DecisionKey, EpochHeader, Lineage
from groupio.protocol import lineage as lines
from groupio.store.catalogue import Decisions, read_decisions


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
    decisions: Decisions
    lineages: tuple[Lineage, ...] = ()
    committed: dict[DecisionKey, EpochHeader] = field(default_factory=dict)
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


def with_parts(store: str) -> list[tuple[str | None, str]]:
    """The stores of a step's parts, the unnamed one first; without it where only parts exist."""
    path = store_path(store)
    parts: list[tuple[str | None, str]] = [
        (part, os.fspath(part_store(path, part))) for part in parts_in(path)
    ]
    return parts if parts and not is_store(path) else [(None, store), *parts]


@contextmanager
def open_store(store: str | os.PathLike[str]) -> Iterator[PosixBackend]:
    """The store for reading; NotFound when there is none at that path, InvalidInput when a
    checkpoint of torch is."""
    backend = PosixBackend.open(store, create=False)
    try:
        check_is_store(backend)
        yield backend
    finally:
        backend.close()


def read_catalog(backend: PosixBackend, *, from_files: bool = False) -> Catalog:
    """List a store. What is damaged stands in ``unreadable``; it raises for the store alone.

    With ``from_files`` every decision is read from its own file, whatever the catalogue says.
    """
    record = backend.store_record()
    catalog = Catalog(record, Decisions(record.store_id))
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
    catalog.decisions = decisions = read_decisions(
        backend, found, use_catalogue=not from_files, is_damage=lambda _: True
    )
    catalog.committed = decisions.headers()
    catalog.unreadable += [
        Unreadable(f"{backend.path}/{EPOCHS}/{key}", why, key)
        for key, why in decisions.damaged.items()
    ]
    foreign = [name for name in backend.list(EPOCHS) if parse_key(name) is None]
    catalog.foreign += [f"{backend.path}/{EPOCHS}/{name}" for name in foreign]
    return catalog


def open_manifest(reader: RandomReader) -> ManifestReader:
    """The manifest in an open record; the reader stays open as long as it is used."""
    return ManifestReader(reader.read, reader.size, reader.path)
