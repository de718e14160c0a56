"""The decisions of a store: the newest from their own files, older ones from the catalogue.

A decision is made by the appearance of its file, and only a listing of the directory says which
there are. The catalogue (:mod:`groupio.format.catalogue`) is derived from these files, to save
opening thousands of them: it may be absent, old, damaged or wrong, and nothing that is committed,
deleted or loaded may depend on it. So every decision that a new save can meet is read from its
file: the newest ones of each lineage, down to a commit. Where an older one matters by itself
(its segments are to be deleted, its content is compared), its file is read too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from groupio.backend.base import CATALOGUE, EPOCHS, ROOT, Backend, is_no_record, read_record
from groupio.errors import FormatError, GroupIOError, NotFound
from groupio.format.catalogue import Entry, decode_catalogue, encode_catalogue
from groupio.format.envelope import HEADER_BYTES
from groupio.format.limits import CATALOGUE_BYTES_MAX, CATALOGUE_ENTRY_BYTES_MAX
from groupio.format.manifest import ManifestReader
from groupio.format.records import (
    AbortRecord,
    RecordKind,
    decode_abort,
    decode_record_kind,
    parse_key,
)
from groupio.model import EPOCH_MAX, DecisionKey, EpochHeader, Lineage

log = logging.getLogger(__name__)

RECENT = 64
"""So many newest decisions of each lineage are read from their files, whatever the catalogue says.

No group that may still be under way is older: a few epochs are in flight at once. The catalogue is
written again when it lacks so many.
"""


@dataclass(slots=True)
class Decisions:
    """What is decided in a store. ``entries`` are commits and aborts, ``damaged`` are decisions
    that cannot be read, and why; together they are all whose files are there."""

    store_id: str
    entries: dict[DecisionKey, Entry] = field(default_factory=dict)
    damaged: dict[DecisionKey, GroupIOError] = field(default_factory=dict)
    aborts: dict[DecisionKey, AbortRecord] = field(default_factory=dict)
    """The records of the aborts that were read from their files."""
    read: dict[DecisionKey, EpochHeader] = field(default_factory=dict)
    """The headers of the commits that were read from their files."""
    damaged_aborts: set[DecisionKey] = field(default_factory=set)
    """Those of ``damaged`` that are aborts all the same."""
    flaw: GroupIOError | None = None
    """Why there is no use in the catalogue that is there."""
    _missing: int = 0
    """Decisions that a new catalogue would have, and this one has not."""

    @property
    def committed(self) -> list[DecisionKey]:
        """The keys of the commits, ascending."""
        return [key for key, entry in self.entries.items() if entry.content is not None]

    @property
    def aborted(self) -> list[DecisionKey]:
        """The keys of the aborts, ascending."""
        return [key for key, entry in self.entries.items() if entry.content is None]

    @property
    def incarnation(self) -> int:
        """The highest incarnation of a decision that was read; older ones have lower numbers."""
        of_commits = (header.incarnation for header in self.read.values())
        # A life of the job that only ever aborted counts too.
        return max([0, *of_commits, *(abort.incarnation for abort in self.aborts.values())])

    def headers(self) -> dict[DecisionKey, EpochHeader]:
        """The headers of all commits."""
        path = CATALOGUE
        return {
            key: self.read.get(key) or self.entries[key].header(self.store_id, path)
            for key in self.committed
        }


def read_decisions(
    backend: Backend,
    lineages: Iterable[Lineage] = (),
    *,
    use_catalogue: bool = True,
    is_damage: Callable[[GroupIOError], bool] = is_no_record,
) -> Decisions:
    """The decisions of the store, from one listing, its catalogue and the newest files.

    ``lineages`` are those that the store records: with them the newest commit of every line is
    read from its file. Without ``use_catalogue`` all files are read. An error of reading a file
    for which ``is_damage`` is true is that of one decision; every other is raised, such as
    StorageError when the store cannot be read. NotFound when it is no store.
    """
    store_id = backend.store_record().store_id
    inodes = backend.identities(EPOCHS)
    keys = [key for name in inodes if (key := parse_key(name)) is not None]
    found = Decisions(store_id)
    known: dict[DecisionKey, Entry] = {}

    def read(key: DecisionKey) -> bool:
        if key not in found.entries and key not in found.damaged:
            _read(backend, key, inodes, found, is_damage)
        return key in found.read

    if use_catalogue:
        for entry in _catalogue(backend, found):
            if inodes.get(str(entry.key)) == entry.inode:
                known[entry.key] = entry
        _read_recent(keys, lineages, read)
    for key in keys:
        if key in known and key not in found.damaged:
            found.entries.setdefault(key, known[key])
        else:
            read(key)
    found.entries = dict(sorted(found.entries.items()))
    found._missing = sum(
        len(msgspec.msgpack.encode(entry)) <= CATALOGUE_ENTRY_BYTES_MAX
        for key, entry in found.entries.items()
        if key not in known
    )
    return found


def read_decision(backend: Backend, key: DecisionKey) -> EpochHeader | AbortRecord:
    """What the decision of ``key`` says, from its own file: the header of a commit, or an abort.

    NotFound when there is none, IntegrityError or FormatError when it cannot be read.
    """
    with backend.reader(EPOCHS, str(key)) as reader:
        kind = decode_record_kind(reader.read(0, min(reader.size, HEADER_BYTES)), reader.path)
        if kind is RecordKind.COMMIT:
            return ManifestReader(reader.read, reader.size, reader.path).header
        if kind is RecordKind.ABORT:
            return decode_abort(read_record(reader), reader.path)
        raise FormatError(
            f"{reader.path} is a record of kind {kind.name.lower()}, not a decision",
            path=reader.path,
        )


def write_catalogue(backend: Backend, decisions: Decisions) -> None:
    """Write the catalogue again where it lacks too much, or is of no use.

    Never raises what a reader could live with: without a catalogue files are opened instead.
    """
    newer = isinstance(decisions.flaw, FormatError)
    if newer or (decisions._missing < RECENT and decisions.flaw is None):
        return
    try:
        data = encode_catalogue(decisions.store_id, decisions.entries.values())
        backend.replace(ROOT, CATALOGUE, data)
    except GroupIOError as error:
        log.info("the catalogue of %s stays as it is: %s", backend.path, error.message)


def check_catalogue(backend: Backend, decisions: Decisions) -> str:
    """What is wrong with the catalogue, "" if nothing is or there is none.

    ``decisions`` were all read from their files.
    """
    looked = Decisions(decisions.store_id)
    inodes = backend.identities(EPOCHS)
    wrong = [
        entry.key
        for entry in _catalogue(backend, looked)
        if inodes.get(str(entry.key)) == entry.inode and decisions.entries.get(entry.key) != entry
    ]
    if looked.flaw is not None:
        return looked.flaw.message
    # What cannot be read any more may be told by the catalogue as it was.
    wrong = [key for key in wrong if key not in decisions.damaged]
    if not wrong:
        return ""
    return f"it says of {len(wrong)} decision(s) what their records do not, first of {wrong[0]}"


def _catalogue(backend: Backend, found: Decisions) -> Sequence[Entry]:
    """The entries of the catalogue, none when it is absent or of no use."""
    try:
        with backend.reader(ROOT, CATALOGUE) as reader:
            data = read_record(reader, CATALOGUE_BYTES_MAX)
            return decode_catalogue(data, found.store_id, reader.path)
    except NotFound:
        return ()
    except GroupIOError as error:
        log.info("the catalogue is not used: %s", error.message)
        found.flaw = error
        return ()


def _read_recent(
    keys: Sequence[DecisionKey],
    lineages: Iterable[Lineage],
    read: Callable[[DecisionKey], bool],
) -> None:
    """Read the newest decisions of each lineage, and before each rewind, down to a commit.

    ``read`` tells whether the decision is a commit.
    """
    by_lineage: dict[int, list[DecisionKey]] = {}
    for key in keys:
        by_lineage.setdefault(key.lineage, []).append(key)
    starts = [(number, EPOCH_MAX) for number in by_lineage]
    starts += [(line.parent, line.after_epoch) for line in lineages]
    for number, last in starts:
        newest_first = (k for k in reversed(by_lineage.get(number, ())) if k.epoch <= last)
        has_commit = False
        for count, key in enumerate(newest_first):
            if count >= RECENT and has_commit:
                break
            has_commit |= read(key)


def _read(
    backend: Backend,
    key: DecisionKey,
    inodes: dict[str, int],
    found: Decisions,
    is_damage: Callable[[GroupIOError], bool],
) -> None:
    try:
        decision = read_decision(backend, key)
    except NotFound:
        return  # retention took it after it was listed
    except GroupIOError as error:
        if not is_damage(error):
            raise
        found.damaged[key] = error
        if _is_abort(backend, key):
            found.damaged_aborts.add(key)
        return
    inode = inodes[str(key)]
    if isinstance(decision, AbortRecord):
        found.aborts[key] = decision
        found.entries[key] = Entry.of(key, inode, None)
    else:
        found.read[key] = decision
        found.entries[key] = Entry.of(key, inode, decision)


def _is_abort(backend: Backend, key: DecisionKey) -> bool:
    try:
        with backend.reader(EPOCHS, str(key)) as reader:
            first = reader.read(0, min(reader.size, HEADER_BYTES))
            return decode_record_kind(first, reader.path) is RecordKind.ABORT
    except GroupIOError:
        return False
