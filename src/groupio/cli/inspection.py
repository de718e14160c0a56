"""Finding damage in a store: what ``groupio verify`` and the crash tests ask.

Reading is done here; what must hold is said by :mod:`groupio.testing.invariants`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from groupio.backend.base import (
    CATALOGUE,
    EPOCHS,
    FOLDERS,
    INFLIGHT,
    PREPARED,
    ROOT,
    SEGMENTS,
    RandomReader,
)
from groupio.backend.posix import PosixBackend
from groupio.cli.catalog import Catalog, Unreadable, read_catalog
from groupio.door.check import check_door
from groupio.errors import (
    FormatError,
    GroupIOError,
    IntegrityError,
    NotFound,
    StorageError,
)
from groupio.format.checks import check_manifest
from groupio.format.envelope import HEADER_BYTES, read_envelope
from groupio.format.manifest import ManifestReader, SharedTables
from groupio.format.records import parse_key, parse_segment_name
from groupio.format.segment import SEGMENT_HEADER_BYTES, SegmentReader, decode_header
from groupio.model import DecisionKey, Manifest
from groupio.store.catalogue import check_catalogue
from groupio.testing import invariants
from groupio.testing.invariants import Decision, Observed, SegmentSummary, Violation

READ_ERRORS = (FormatError, IntegrityError, NotFound, StorageError)

WHOLE_BYTES = 1 << 20
"""A manifest of up to this size is read at once."""

UNFINISHED = (
    "a record that is being written, or whose writer died; the next client removes it once it is a "
    "day old"
)

STRANGER = "not a name of groupio"

Progress = Callable[[int], None]
"""Told how many more bytes of data have been checked."""


@dataclass(frozen=True, slots=True)
class Damage:
    """One thing that is wrong.

    ``kind`` is "missing", "unreadable", "truncated", "swapped", "corrupt" or "inconsistent";
    ``epochs`` are the committed epochs that it hurts: none for damage of a door.
    """

    kind: str
    path: str
    detail: str
    chunk: str | None = None
    epochs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Leftover:
    """A file that no committed epoch needs.

    ``state`` is "undecided" (a save is in flight, or was interrupted and will be decided by the
    next one), "garbage" (nothing will ever use it), or "unsealed" (the record of a door in use
    that an earlier release made, without a digest of the record itself).
    """

    state: str
    path: str
    detail: str


@dataclass(slots=True)
class Inspection:
    """All that was found."""

    store: Observed
    damage: list[Damage] = field(default_factory=list)
    leftovers: list[Leftover] = field(default_factory=list)
    epochs_checked: tuple[int, ...] = ()
    segments_checked: int = 0
    chunks_checked: int = 0
    doors_checked: int = 0
    bytes_read: int = 0
    """Bytes of data whose digests were compared; 0 unless data was read."""


class Inspector:
    """Looks through a store, or at one epoch of it."""

    def __init__(self, backend: PosixBackend, only: DecisionKey | None = None) -> None:
        self._backend = backend
        self._only = only
        self._catalog: Catalog = read_catalog(backend, from_files=True)
        self._aborted = set(self._catalog.decisions.aborted)
        self._found: list[Damage] = []
        self._manifests: dict[DecisionKey, Manifest] = {}
        self._users: dict[str, set[int]] = {}
        self._sizes: dict[str, int] = {}
        self._read_manifests()

    @property
    def data_bytes(self) -> int:
        """About how many bytes of data the looked-at epochs have; for a progress bar."""
        return sum(self._sizes.values())

    def inspect(self, *, read_data: bool, progress: Progress | None = None) -> Inspection:
        """Check everything; with ``read_data`` every byte of the segments too."""
        result = Inspection(self._observed({}))
        summaries = {}
        for name in sorted(self._users):
            summary = self._segment(name, result, read_data, progress)
            if summary is not None:
                summaries[name] = summary
        result.store = self._observed(summaries)
        result.segments_checked = len(summaries)
        result.chunks_checked = sum(len(s.offsets) for s in summaries.values())
        result.epochs_checked = tuple(sorted({key.epoch for key in self._manifests}))
        if self._only is None:
            result.leftovers = self._leftovers()
            self._check_catalogue()
        self._doors(result, read_data, progress)
        self._found += map(self._of_violation, self._violations(result.store))
        result.damage = _joined(self._found)
        return result

    # -- records -------------------------------------------------------------------------------

    def _read_manifests(self) -> None:
        for bad in self._catalog.unreadable:
            if self._only in (None, bad.key):
                self._found.append(self._of_record(bad))
        shared = SharedTables()
        for key in self._catalog.committed:
            if self._only not in (None, key):
                continue
            path = f"{self._backend.path}/{EPOCHS}/{key}"
            try:
                with self._backend.reader(EPOCHS, str(key)) as reader:
                    opened = ManifestReader(_at_once(reader), reader.size, reader.path, shared)
                    manifest = opened.manifest()
                    check_manifest(manifest, reader.path, shared.chunk_lengths)
            except READ_ERRORS as error:
                self._found.append(self._of_record(Unreadable(path, error, key)))
                continue
            self._manifests[key] = manifest
            for segment in manifest.segments:
                self._users.setdefault(segment.name, set()).add(key.epoch)
                self._sizes[segment.name] = segment.bytes

    def _of_record(self, bad: Unreadable) -> Damage:
        epochs = (bad.key.epoch,) if bad.key is not None else ()
        return Damage(self._record_kind(bad), bad.path, bad.error.message, None, epochs)

    def _check_catalogue(self) -> None:
        wrong = check_catalogue(self._backend, self._catalog.decisions)
        if wrong:
            detail = f"{wrong}; no epoch is hurt, and it is made again once it is removed"
            self._found.append(Damage("corrupt", f"{self._backend.path}/{CATALOGUE}", detail))

    def _record_kind(self, bad: Unreadable) -> str:
        if isinstance(bad.error, NotFound):
            return "missing"
        if isinstance(bad.error, StorageError):
            return "unreadable"
        folder, _, name = bad.path.removeprefix(self._backend.path + "/").partition("/")
        try:
            size = self._backend.size(folder, name)
            if size < HEADER_BYTES:
                return "truncated"
            first = self._backend.read(folder, name, 0, HEADER_BYTES)
            if size < read_envelope(first, bad.path).total_length:
                return "truncated"
            if bad.key is not None and not self._is_own(bad.key, bad.path):
                return "swapped"
        except GroupIOError:
            pass  # the header itself is damaged
        return "corrupt"

    def _is_own(self, key: DecisionKey, path: str) -> bool:
        """False when the record is sound but belongs under another name."""
        with self._backend.reader(EPOCHS, str(key)) as reader:
            header = ManifestReader(reader.read, reader.size, "record").header
        return DecisionKey(header.lineage, header.epoch, header.attempt) == key

    # -- segments ------------------------------------------------------------------------------

    def _segment(
        self, name: str, result: Inspection, read_data: bool, progress: Progress | None
    ) -> SegmentSummary | None:
        path = f"{self._backend.path}/{SEGMENTS}/{name}"
        try:
            with self._backend.reader(SEGMENTS, name) as reader:
                segment = SegmentReader(reader.read, reader.size, reader.path)
                segment.verify_structure()
                bad = self._read_data(segment, result, progress) if read_data else frozenset()
                size = reader.size
        except READ_ERRORS as error:
            kind = self._segment_kind(name, error)
            self._add(kind, path, error.message, name, error)
            return None
        return SegmentSummary(
            name=name,
            store_id=segment.header.store_id,
            key=segment.header.key,
            total_bytes=size,
            digests=segment.index.digests,
            offsets=segment.index.offsets,
            lengths=segment.index.lengths,
            bad=bad,
        )

    def _segment_kind(self, name: str, error: GroupIOError) -> str:
        if isinstance(error, StorageError):
            return "unreadable"
        try:
            if not self._backend.exists(SEGMENTS, name):
                return "missing"
            if self._backend.size(SEGMENTS, name) < self._sizes[name]:
                return "truncated"
            first = self._backend.read(SEGMENTS, name, 0, SEGMENT_HEADER_BYTES)
            header = decode_header(first, "the header")
        except GroupIOError:
            return "corrupt"
        named = parse_segment_name(name)
        return "corrupt" if named == (header.key, header.node, header.seq) else "swapped"

    def _read_data(
        self, segment: SegmentReader, result: Inspection, progress: Progress | None
    ) -> frozenset[bytes]:
        """Digests of damaged chunks; damage between chunks is reported at once."""
        bad = set()
        name = segment.path.rpartition("/")[2]

        def count(read: int) -> None:
            result.bytes_read += read
            if progress is not None:
                progress(read)

        for error in segment.find_damage(count):
            self._add("corrupt", segment.path, error.message, name, error)
            if error.chunk is not None:
                bad.add(bytes.fromhex(error.chunk))
        return frozenset(bad)

    def _add(self, kind: str, path: str, detail: str, name: str, error: GroupIOError) -> None:
        chunk = error.chunk if isinstance(error, IntegrityError) else None
        epochs = self._users.get(name, set())
        if chunk is not None:
            epochs = {key.epoch for key, m in self._manifests.items() if _has_chunk(m, chunk)}
        self._found.append(Damage(kind, path, detail, chunk, tuple(sorted(epochs))))

    # -- doors ---------------------------------------------------------------------------------

    def _doors(self, result: Inspection, read_data: bool, progress: Progress | None) -> None:
        """Damage of a door is that of the door alone; those of the dead are leftovers."""

        def count(read: int) -> None:
            result.bytes_read += read
            if progress is not None:
                progress(read)

        with self._backend.doors() as doors:
            try:
                names = doors.list()
                unfinished = doors.unfinished() if self._only is None else []
            except StorageError as error:
                self._found.append(Damage("unreadable", doors.path, error.message))
                return
            for name in unfinished:
                detail = "a door that was not finished; a later one removes it"
                result.leftovers.append(Leftover("garbage", f"{doors.path}/{name}", detail))
            shown, unreadable = self._shown(), {bad.key for bad in self._catalog.unreadable}
            for name in names:
                path, number = f"{doors.path}/{name}", int(name) if name.isdecimal() else -1
                key = shown.get(number)
                if self._only is not None:
                    if key != self._only:
                        continue
                elif str(number) != name:
                    result.leftovers.append(Leftover("garbage", path, STRANGER))
                    continue
                elif key is None and all(bad is None or bad.epoch != number for bad in unreadable):
                    detail = f"epoch {name} is not committed, so this door leads nowhere: remove it"
                    self._found.append(Damage("inconsistent", path, detail))
                    continue
                header = None if key is None else self._catalog.committed.get(key)
                result.doors_checked += 1
                for flaw in check_door(doors, name, header, read_data=read_data, progress=count):
                    hurt = "" if flaw.kind == "unsealed" else "only the door is hurt, "
                    detail = (
                        f"{flaw.detail}; {hurt}make it anew with: groupio export "
                        f"{self._backend.path} --dcp --epoch {name}"
                    )
                    if flaw.kind == "unsealed":
                        result.leftovers.append(Leftover(flaw.kind, flaw.path, detail))
                    else:
                        self._found.append(Damage(flaw.kind, flaw.path, detail))

    def _shown(self) -> dict[int, DecisionKey]:
        """The commit that the door of an epoch's number shows: that of the line, else the newest
        that a rewind abandoned."""
        return {key.epoch: key for key in sorted(self._catalog.committed)} | self._catalog.visible

    # -- the whole -----------------------------------------------------------------------------

    def _observed(self, summaries: dict[str, SegmentSummary]) -> Observed:
        catalog = self._catalog
        decisions = [
            Decision(key, True, header.incarnation, header.write_id)
            for key, header in catalog.committed.items()
        ]
        decisions += [
            Decision(key, False, record.incarnation, record.write_id)
            for key, record in catalog.decisions.aborts.items()
        ]
        return Observed(
            decisions=tuple(sorted(decisions, key=lambda d: d.key)),
            manifests=self._manifests,
            segments=summaries,
            lineages=catalog.lineages,
        )

    def _violations(self, store: Observed) -> list[Violation]:
        """Broken invariants that are not told already by what could not be read."""
        told = {damage.path for damage in self._found}
        violations = [
            *invariants.check_atomic(store, self._manifests),
            *invariants.check_no_mixing(store),
            *invariants.check_no_downgrade(store),
            *invariants.check_idempotent(store),
            *invariants.check_one_decision(store),
        ]
        return [v for v in violations if self._path_of(v) not in told]

    def _path_of(self, violation: Violation) -> str:
        if violation.path is not None:
            return f"{self._backend.path}/{SEGMENTS}/{violation.path}"
        return f"{self._backend.path}/{EPOCHS}/{violation.key}"

    def _of_violation(self, violation: Violation) -> Damage:
        key = violation.key
        epochs = (key.epoch,) if key is not None else ()
        return Damage(
            "inconsistent",
            self._path_of(violation),
            f"{violation.detail} (invariant {violation.invariant})",
            violation.chunk,
            epochs,
        )

    # -- what nobody needs ---------------------------------------------------------------------

    def _leftovers(self) -> list[Leftover]:
        decided = {*self._catalog.committed, *self._aborted}
        decided |= {bad.key for bad in self._catalog.unreadable if bad.key is not None}
        announced = {
            key
            for folder in (PREPARED, INFLIGHT)
            for name in self._backend.list(folder)
            if (key := parse_key(name)) is not None
        }
        found = [Leftover("garbage", path, STRANGER) for path in self._catalog.foreign]
        for folder in (ROOT, *FOLDERS):
            for name in self._backend.unfinished(folder):
                path = os.path.join(self._backend.path, folder, name)
                found.append(Leftover("garbage", path, UNFINISHED))
        for folder in (PREPARED, INFLIGHT):
            for name in self._backend.list(folder):
                path = f"{self._backend.path}/{folder}/{name}"
                key = parse_key(name)
                if key is None:
                    found.append(Leftover("garbage", path, STRANGER))
                elif key in decided:
                    found.append(Leftover("garbage", path, "its attempt is decided"))
                else:
                    detail = f"epoch {key.epoch}, attempt {key.attempt} is not decided"
                    found.append(Leftover("undecided", path, detail))
        for name in self._backend.list(SEGMENTS):
            if name not in self._users:
                found += self._spare_segment(name, decided, announced)
            else:
                self._check_owner(name, decided)
        return found

    def _spare_segment(
        self, name: str, decided: set[DecisionKey], announced: set[DecisionKey]
    ) -> list[Leftover]:
        path = f"{self._backend.path}/{SEGMENTS}/{name}"
        parsed = parse_segment_name(name)
        if parsed is None:
            return [Leftover("garbage", path, STRANGER)]
        key = parsed[0]
        if key in self._aborted:
            return [Leftover("garbage", path, f"epoch {key.epoch} was aborted")]
        if key in decided:
            return [Leftover("garbage", path, f"epoch {key.epoch} does not use it")]
        if key in announced or not self._is_whole(name):
            return [Leftover("undecided", path, f"epoch {key.epoch} is not decided")]
        # A save announces itself before it writes, and its announcement stays until it is decided.
        detail = (
            f"its segments are whole, but epoch {key.epoch} has no decision: its record was "
            "removed, or the power failed before its commit (the next save cleans that up)"
        )
        record = f"{self._backend.path}/{EPOCHS}/{key}"
        if all(damage.path != record for damage in self._found):
            self._found.append(Damage("missing", record, detail))
        return []

    def _check_owner(self, name: str, decided: set[DecisionKey]) -> None:
        """A segment in use belongs to a committed epoch, whose record must be there."""
        parsed = parse_segment_name(name)
        if parsed is None:
            return
        if parsed[0] in self._aborted:
            path = f"{self._backend.path}/{SEGMENTS}/{name}"
            detail = f"committed epochs use it, but epoch {parsed[0].epoch} is decided aborted"
            epochs = tuple(sorted(self._users[name]))
            self._found.append(Damage("inconsistent", path, detail, None, epochs))
            return
        if parsed[0] in decided:
            return
        record = f"{self._backend.path}/{EPOCHS}/{parsed[0]}"
        if all(damage.path != record for damage in self._found):
            detail = f"the record of epoch {parsed[0].epoch} is gone; newer epochs use its segments"
            self._found.append(Damage("missing", record, detail, None, (parsed[0].epoch,)))

    def _is_whole(self, name: str) -> bool:
        try:
            with self._backend.reader(SEGMENTS, name) as reader:
                SegmentReader(reader.read, reader.size, reader.path).verify_structure()
        except READ_ERRORS:
            return False
        return True


def _at_once(reader: RandomReader) -> Callable[[int, int], bytes]:
    """Reads parts of a small file with one call of the system for all; of a large one, each."""
    if reader.size > WHOLE_BYTES:
        return reader.read
    data = reader.read(0, reader.size)
    return lambda offset, length: data[offset : offset + length]


def _joined(found: list[Damage]) -> list[Damage]:
    """The same damage of several epochs as one, in the order of paths."""
    epochs: dict[Damage, set[int]] = {}
    for damage in found:
        epochs.setdefault(replace(damage, epochs=()), set()).update(damage.epochs)
    joined = [replace(damage, epochs=tuple(sorted(hurt))) for damage, hurt in epochs.items()]
    return sorted(joined, key=lambda d: (d.path, d.detail, d.chunk or ""))


def _has_chunk(manifest: Manifest, chunk: str) -> bool:
    digest = np.frombuffer(bytes.fromhex(chunk), np.uint8)
    return bool((manifest.chunks.digests == digest).all(axis=1).any())
