"""A store as a reader sees it: which epochs are committed, and their items. Needs no agent."""

from __future__ import annotations

import difflib
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from groupio.backend.base import EPOCHS, LINEAGES, Backend
from groupio.backend.posix import PosixBackend
from groupio.client import lineage as order
from groupio.client.address import refuse_checkpoint
from groupio.client.chunk_reader import Wants, damage, default_threads, read_chunks
from groupio.client.collection import collection_paused
from groupio.client.destinations import Destination, destinations
from groupio.errors import (
    FormatError,
    IntegrityError,
    InvalidInput,
    NotFound,
)
from groupio.format.manifest import ManifestReader
from groupio.format.records import (
    RecordKind,
    decode_lineage,
    decode_record_kind,
    parse_key,
    parse_lineage_name,
)
from groupio.model import (
    ChunkTable,
    DecisionKey,
    EpochHeader,
    EpochInfo,
    Lineage,
    MemberTable,
    SegmentRef,
)
from groupio.plan.layout import Layout, lay_out
from groupio.protocol import lineage as lines
from groupio.store.catalogue import read_decisions

log = logging.getLogger("groupio.client")

_KIND_BYTES = 64


class Fetch(Protocol):
    """Reads and verifies what is wanted; returns the digests of damaged chunks. See
    :func:`groupio.client.chunk_reader.read_chunks`."""

    def __call__(
        self,
        backend: Backend,
        segments: Sequence[SegmentRef],
        table: ChunkTable,
        wants: Wants,
        *,
        deadline: float,
        threads: int,
        epoch: int,
    ) -> list[bytes]: ...


class PlannedItems(NamedTuple):
    """Items to be read: where their bytes go, and the chunks that bring them."""

    made: dict[str, Destination]
    wants: Wants

    def finish(self) -> dict[str, Any]:
        """The items, once all that is wanted has been read."""
        with collection_paused():
            return {name: destination.finish() for name, destination in self.made.items()}


class StoreReader:
    """An open store. Decisions never change, so what was found once is not read again.

    ``damaged`` are the decisions that the last :meth:`epochs` could not read: the file name of
    each and why.
    """

    def __init__(self, backend: PosixBackend) -> None:
        """Use :meth:`open`."""
        self.backend = backend
        self.damaged: list[tuple[str, str]] = []
        self._manifests: dict[DecisionKey, ManifestReader | None] = {}

    @classmethod
    def open(
        cls,
        store: str | os.PathLike[str],
        *,
        file_mode: int | None = None,
        umask: int | None = None,
    ) -> Self:
        """Open the store at a path or ``file://`` URL.

        ``file_mode`` and ``umask`` are for doors made through it, as of ``PosixBackend.open``.
        NotFound when there is none, StorageError when it cannot be read, InvalidInput when the
        address is of no supported kind, or a checkpoint of torch is there.
        """
        backend = PosixBackend.open(store, create=False, file_mode=file_mode, umask=umask)
        try:
            check_is_store(backend)
        except BaseException:
            backend.close()
            raise
        return cls(backend)

    def close(self) -> None:
        """Release the store."""
        self.backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def path(self) -> str:
        """The absolute path of the store."""
        return self.backend.path

    # -- epochs ----------------------------------------------------------------------------------

    def lineages(self) -> dict[int, Lineage]:
        """All lineages by number; IntegrityError when a record of one is damaged."""
        found = []
        for name in self.backend.list(LINEAGES):
            if parse_lineage_name(name) is not None:
                data = self.backend.read(LINEAGES, name)
                found.append(decode_lineage(data, f"{self.path}/{LINEAGES}/{name}"))
        return lines.by_number(found)

    def keys(self) -> list[DecisionKey]:
        """The keys of all decisions, commits and aborts, ascending."""
        parsed = (parse_key(name) for name in self.backend.list(EPOCHS))
        return sorted(key for key in parsed if key is not None)

    def manifest(self, key: DecisionKey) -> ManifestReader | None:
        """The manifest under ``key``, or None when the decision is an abort or is gone.

        IntegrityError or FormatError when the record cannot be read.
        """
        if key in self._manifests:
            return self._manifests[key]
        try:
            with self.backend.reader(EPOCHS, str(key)) as reader:
                size = reader.size
                first = reader.read(0, min(size, _KIND_BYTES))
        except NotFound:
            return None  # retention took it after it was listed
        path = f"{self.path}/{EPOCHS}/{key}"
        manifest = None
        if decode_record_kind(first, path) is RecordKind.COMMIT:
            backend, name = self.backend, str(key)
            manifest = ManifestReader(
                lambda offset, length: backend.read(EPOCHS, name, offset, length), size, path
            )
            _ = manifest.header
        self._manifests[key] = manifest
        return manifest

    def epochs(self) -> list[EpochInfo]:
        """The committed epochs, ascending by epoch and lineage; see ``damaged`` for the rest."""
        decisions = read_decisions(self.backend)
        self.damaged = [(str(key), error.message) for key, error in decisions.damaged.items()]
        for key, error in decisions.damaged.items():
            log.warning("epoch %d cannot be listed: %s", key.epoch, error)
        committed = {key: _info(header) for key, header in decisions.headers().items()}
        lineages = self.lineages()
        line = set(lines.visible(committed, lineages, lines.current(lineages)).values())
        listed = sorted(committed, key=lambda k: (k.epoch, k.lineage, k.attempt))
        return [
            committed[key] if key in line else replace(committed[key], abandoned=True)
            for key in listed
        ]

    def resolve(self, epoch: int | str = "latest", rewind_to: int | None = None) -> ManifestReader:
        """The manifest of ``epoch``; "latest" is the newest of the line, not after ``rewind_to``.

        NotFound when there is none; IntegrityError or FormatError when the record that would be
        it, or could hide it, cannot be read.
        """
        for _, open_epoch in self.candidates(epoch, rewind_to):
            manifest = open_epoch()
            if manifest is not None:
                return manifest
        raise self.not_found(epoch, rewind_to)

    def candidates(
        self, epoch: int | str = "latest", rewind_to: int | None = None, *, older: bool = False
    ) -> list[tuple[int, Callable[[], ManifestReader | None]]]:
        """What may be ``epoch``, best first: numbers, each with a call that opens its manifest.

        The call returns None when the epoch was aborted only. With ``older`` the older epochs of
        the line follow a numbered one too.
        """
        keys, lineages = self.keys(), self.lineages()
        if epoch == "latest":
            found = list(order.newest_first(keys, lineages, rewind_to))
        else:
            assert isinstance(epoch, int)
            found = [(epoch, order.of_epoch(keys, lineages, epoch))]
            if older and epoch > 0:
                found += order.newest_first(keys, lineages, epoch - 1)
        return [(number, _opener(self, tuple(group))) for number, group in found]

    def not_found(self, epoch: int | str, rewind_to: int | None = None) -> NotFound:
        """The error that says which epochs there are instead of ``epoch``."""
        known = sorted({key.epoch for key in read_decisions(self.backend).committed})
        what = "no epoch" if epoch == "latest" else f"no epoch {epoch}"
        if epoch == "latest" and rewind_to is not None:
            what += f" up to {rewind_to}"
        newest = ", ".join(map(str, known[-8:]))
        if not known:
            there = "nothing is committed yet"
        elif len(known) > 8:
            there = f"{len(known)} epochs are committed, the newest are {newest}"
        else:
            there = f"committed are {newest}"
        return NotFound(
            f"there is {what} in {self.path}; {there}",
            path=self.path,
            epoch=None if isinstance(epoch, str) else epoch,
        )

    # -- items -----------------------------------------------------------------------------------

    def read_items(
        self,
        manifest: ManifestReader,
        rank: int,
        names: Iterable[str] | None = None,
        into: Mapping[str, Any] | None = None,
        *,
        deadline: float | None = None,
        threads: int | None = None,
    ) -> dict[str, Any]:
        """The items of member ``rank``, every chunk verified before use, in the saved order.

        ``names`` picks some of them (None: all); ``into`` gives buffers of the same size and
        dtype to be filled in place. ``deadline`` and ``threads`` are as in :meth:`read_wants`.
        After an error the buffers have undefined content. NotFound for a member or name that there
        is not, InvalidInput for a buffer that does not fit (nothing has been read then).
        """
        planned = self.plan_items(manifest, rank, names, into)
        self.read_wants(manifest, planned.wants, deadline=deadline, threads=threads)
        return planned.finish()

    def plan_items(
        self,
        manifest: ManifestReader,
        rank: int,
        names: Iterable[str] | None = None,
        into: Mapping[str, Any] | None = None,
    ) -> PlannedItems:
        """The first half of :meth:`read_items`: all checks, nothing is read or filled."""
        member = manifest.member(rank)
        chosen = _choose(manifest, member, names, into)
        layout = member_layout(manifest, member)
        specs = {member.items[index].name: member.items[index] for index in chosen}
        made = destinations(specs, into)
        views = [destination.view for destination in made.values()]
        return PlannedItems(made, _wants(layout, member, chosen, views))

    def read_wants(
        self,
        manifest: ManifestReader,
        wants: Wants,
        *,
        deadline: float | None = None,
        threads: int | None = None,
        on_damage: Callable[[Sequence[bytes]], None] | None = None,
        fetch: Fetch = read_chunks,
    ) -> None:
        """Bring all chunks that are wanted to their places, each verified before use.

        ``deadline`` is a reading of ``time.monotonic``. ``on_damage`` gets the digests of all
        damaged chunks met, before IntegrityError names the first. ``fetch`` does the work in one
        call: :func:`groupio.client.chunk_reader.read_chunks`, one that asks the node's agent, or
        one that shares it among the ranks of a node, which all have to call it, also for nothing.
        After an error the places have undefined content.
        """
        bad = fetch(
            self.backend,
            manifest.segments,
            manifest.chunks,
            wants,
            deadline=time.monotonic() + 1e9 if deadline is None else deadline,
            threads=default_threads() if threads is None else threads,
            epoch=manifest.header.epoch,
        )
        if bad:
            if on_damage is not None:
                on_damage(bad)
            raise self._damage(manifest, bad)

    def _damage(self, manifest: ManifestReader, bad: Sequence[bytes]) -> IntegrityError:
        table = manifest.chunks
        first = np.frombuffer(bad[0], np.uint8)
        row = int(np.flatnonzero((table.digests == first).all(axis=1))[0])
        name = manifest.segments[int(table.segments[row])].name
        path = f"{self.path}/segments/{name}"
        return damage(path, bad[0], len(bad), manifest.header.epoch)


def check_is_store(backend: PosixBackend) -> None:
    """NotFound when there is no store; InvalidInput when a checkpoint of torch is there."""
    try:
        backend.store_record()
    except (NotFound, FormatError, IntegrityError):
        refuse_checkpoint(backend.path)
        raise


def member_layout(manifest: ManifestReader, member: MemberTable) -> Layout:
    """Where the chunks of a member's items are; IntegrityError when the manifest contradicts
    itself. ``member.refs[c]`` is the row of chunk ``c`` in the manifest's table."""
    try:
        layout = lay_out(member.items)
    except InvalidInput as error:
        raise _contradiction(manifest, member, error.message) from None
    check_refs(manifest, member, layout)
    return layout


def check_refs(manifest: ManifestReader, member: MemberTable, layout: Layout) -> None:
    """IntegrityError unless the chunks of ``member`` are those that ``layout`` asks for."""
    if len(layout.chunk_start) != len(member.refs):
        raise _contradiction(
            manifest, member, f"its items have {len(layout.chunk_start)} chunks, not as listed"
        )
    if not np.array_equal(manifest.chunks.lengths[member.refs], layout.chunk_length):
        raise _contradiction(manifest, member, "its items and their chunks differ in size")


def _contradiction(manifest: ManifestReader, member: MemberTable, why: str) -> IntegrityError:
    return IntegrityError(
        f"the manifest {manifest.path} contradicts itself about rank {member.rank}: {why}; load "
        "an older epoch (fallback=True)",
        path=manifest.path,
        epoch=manifest.header.epoch,
    )


def _choose(
    manifest: ManifestReader,
    member: MemberTable,
    names: Iterable[str] | None,
    into: Mapping[str, Any] | None,
) -> list[int]:
    """Indices of the items to read, in their order; NotFound names those that are not there."""
    rows = {spec.name: index for index, spec in enumerate(member.items)}
    if names is None:
        wanted = set(rows)
    else:
        wanted = {names} if isinstance(names, str) else set(names)
        extra = [] if into is None else [name for name in into if name not in wanted]
        if extra:
            raise InvalidInput(f"`into` has {extra[0]!r}, which is not among `names`")
    asked = wanted if into is None else wanted | set(into)
    missing = sorted(str(name) for name in asked if name not in rows)
    if missing:
        close = difflib.get_close_matches(missing[0], rows, n=3) if len(rows) < 20_000 else []
        hint = f"; close to it: {', '.join(map(repr, close))}" if close else ""
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise NotFound(
            f"rank {member.rank} saved no item {missing[0]!r}{more} in epoch "
            f"{manifest.header.epoch} (it saved {len(rows)} items){hint}",
            path=manifest.path,
            epoch=manifest.header.epoch,
            member=member.rank,
            items=tuple(missing[:100]),
        )
    return sorted(rows[name] for name in wanted)


def _wants(
    layout: Layout, member: MemberTable, chosen: Sequence[int], views: Sequence[memoryview]
) -> Wants:
    """All chunks of the chosen items, each with the view and the place in it."""
    items = np.array(chosen, np.int64)
    counts = layout.item_chunks[items]
    views_index = np.repeat(np.arange(len(items)), counts)
    # Numbers 0, 1, ... within each item, behind the item's first chunk.
    within = np.arange(len(views_index)) - np.repeat(np.cumsum(counts) - counts, counts)
    chunks = layout.item_chunk[items][views_index] + within
    offsets = layout.chunk_start[chunks] - layout.item_start[items][views_index]
    return Wants(member.refs[chunks], views_index, offsets, views)


def _opener(
    reader: StoreReader, keys: tuple[DecisionKey, ...]
) -> Callable[[], ManifestReader | None]:
    def open_first() -> ManifestReader | None:
        for key in keys:
            manifest = reader.manifest(key)
            if manifest is not None:
                return manifest
        return None

    return open_first


def _info(header: EpochHeader) -> EpochInfo:
    return EpochInfo(
        epoch=header.epoch,
        members=header.world_size,
        bytes_logical=header.bytes_logical,
        bytes_unique=header.bytes_unique,
        bytes_stored=header.bytes_stored,
        committed_at=header.created_at,
        lineage=header.lineage,
        metadata=header.metadata,
    )
