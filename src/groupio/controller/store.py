"""What a job's controller asks of its store, as blocking calls for one worker thread."""

from __future__ import annotations

import errno
import logging
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from msgspec.structs import replace

from groupio.agent.identity import Writer
from groupio.agent.known import KnownChunks
from groupio.backend.posix import PosixBackend
from groupio.controller.differing import See, check_replicas
from groupio.controller.recovery import listed, recover
from groupio.errors import (
    FormatError,
    GroupIOError,
    IntegrityError,
    NotFound,
    StorageError,
)
from groupio.format.blocks import PackedTables
from groupio.format.manifest import ManifestReader, encode_manifest
from groupio.format.records import (
    AbortRecord,
    InflightRecord,
    RecordKind,
    decode_inflight,
    decode_record_kind,
    encode_abort,
    encode_inflight,
    encode_lineage,
)
from groupio.model import DecisionKey, Lineage, Manifest
from groupio.plan import dedup
from groupio.plan.layout import lease_bytes
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol import lineage as lines

log = logging.getLogger(__name__)

TEMPORARY_AGE_S = 24 * 3600.0
"""Unfinished records older than this belong to writers that are long dead."""


@dataclass(slots=True)
class Saved:
    """What this process committed to a store, for ``groupio status``; sizes in bytes."""

    epochs: int = 0
    logical: int = 0
    stored: int = 0

    def add(self, manifest: Manifest) -> None:
        """One more epoch."""
        self.epochs += 1
        self.logical += manifest.header.bytes_logical
        self.stored += manifest.header.bytes_stored

    def describe(self) -> dict[str, int]:
        """The numbers as plain values; ``bytes_deduplicated`` did not have to be written."""
        return {
            "epochs": self.epochs,
            "bytes_logical": self.logical,
            "bytes_stored": self.stored,
            "bytes_deduplicated": max(self.logical - self.stored, 0),
        }


@dataclass(slots=True)
class JobStore:
    """One job's store, open for writing."""

    path: str
    job: str
    node: str
    writer: Writer
    file_mode: int | None = None
    io_mode: str = ""
    indexes: bool = True
    """Whether saves go through this object: only they use what is known of older epochs."""
    store_id: str = ""
    """Hex, known since the store was opened: nobody has to read it where reading may fail."""
    known: KnownChunks = field(default_factory=KnownChunks)
    lease_bytes: dict[int, int] = field(default_factory=dict)
    """What each rank's lease took in the newest epoch found at opening."""
    saved: Saved = field(default_factory=Saved)
    _backend: PosixBackend | None = None
    _complete: bool = False
    """The backend was opened to write: all its folders are there."""
    _unheard: dict[DecisionKey, str] = field(default_factory=dict)
    """The write ids of attempts that may be visible although the store did not say so."""
    _prepared: dict[DecisionKey, Manifest] = field(default_factory=dict)
    _packed_tables: PackedTables = field(default_factory=dict)

    def for_controller(self) -> JobStore:
        """The same store anew, for a controller through which nobody saves."""
        return JobStore(self.path, self.job, self.node, self.writer, self.file_mode, indexes=False)

    @property
    def backend(self) -> PosixBackend:
        """The open backend."""
        assert self._backend is not None
        return self._backend

    def open(
        self, held: Sequence[DecisionKey], *, create: bool = True, resume: bool = False
    ) -> ev.StoreState:
        """Open (and with ``create`` make) the store, decide what is undecided, list the rest.

        NotFound, and nothing is written, when there is no store and ``create`` is not set.
        """
        if self._backend is not None:
            try:
                self._backend.check_identity()
            except GroupIOError as error:
                if held:
                    raise
                log.warning("opening %s anew: %s", self.path, error)
                self.close()
        if create and not self._complete and not held:
            self.close()
        self.renew()
        if self._backend is None:
            self._backend = PosixBackend.open(self.path, create=create, file_mode=self.file_mode)
            self._complete = create
        try:
            record = (
                self._backend.ensure_store_record(self.job)
                if create
                else self._backend.store_record()
            )
        except NotFound:
            self.close()
            raise
        self.job, self.store_id = record.job, record.store_id
        self._backend.remove_temporary(TEMPORARY_AGE_S)
        state = recover(
            self._backend, self.writer, record.job, frozenset(held), fence=create, resume=resume
        )
        info = self._backend.info()
        self.io_mode = info.io_mode
        self._learn(state)
        return replace(state, node_local=info.node_local, store_id=self.store_id)

    def follow(self, *, create: bool) -> str:
        """Open the store to write segments for a controller elsewhere; its id (hex).

        Nothing is decided: that is the controller's. NotFound when there is no store and
        ``create`` is not set. After a save that failed, :meth:`renew`.
        """
        if self._backend is None:
            self._backend = PosixBackend.open(self.path, create=create, file_mode=self.file_mode)
            self._complete = create
        try:
            record = (
                self._backend.ensure_store_record(self.job)
                if create
                else self._backend.store_record()
            )
        except NotFound:
            self.close()
            raise
        self.job, self.store_id = record.job, record.store_id
        self.io_mode = self._backend.info().io_mode
        self._learn(listed(self._backend, record.job))
        return record.store_id

    def learn(self, key: DecisionKey) -> None:
        """Index the chunks of an epoch that a controller elsewhere committed."""
        try:
            with self._manifest(key) as manifest:
                self.known.add_epoch(manifest)
        except GroupIOError as error:
            log.warning("epoch %d is not used for deduplication: %s", key.epoch, error)

    def forget_chunks(self) -> None:
        """Refer to no chunk of an older epoch until the next one is committed."""
        self.known = KnownChunks()

    def check_identity(self) -> None:
        """Raise StorageError when another file system or directory is at the path now."""
        self.backend.check_identity()

    def renew(self) -> None:
        """After a failed flush of a directory, go on with new descriptors.

        Whoever still writes through the old ones fails, as it must; they are closed with their
        last user.
        """
        if self._backend is None or self._backend.is_sound:
            return
        log.warning("opening %s anew after a failed flush", self.path)
        self._backend.check_identity()
        fresh = PosixBackend.open(self.path, create=self._complete, file_mode=self.file_mode)
        fresh.ensure_store_record(self.job)
        self._backend = fresh

    def _learn(self, state: ev.StoreState) -> None:
        """Index the chunks of the newest epoch, to which the next ones may refer."""
        lineages = lines.by_number(state.lineages)
        shown = lines.visible((c.key for c in state.committed), lineages, lines.current(lineages))
        self.known = KnownChunks()
        if not shown or not self.indexes:
            return
        key = shown[max(shown)]
        try:
            with self._manifest(key) as manifest:
                # Table by table: those of a whole job are large.
                self.lease_bytes = {
                    rank: lease_bytes(table.nbytes, table.replicated, table.alias)
                    for ranks, table in manifest.tables()
                    for rank in ranks
                }
                self.known.add_epoch(manifest)
        except GroupIOError as error:
            log.warning("epoch %d is not used for deduplication: %s", key.epoch, error)

    @contextmanager
    def _manifest(self, key: DecisionKey) -> Iterator[ManifestReader]:
        """The manifest of a committed epoch, to be read part by part."""
        with self.backend.reader("epochs", str(key)) as reader:
            yield ManifestReader(reader.read, reader.size, reader.path)

    # -- effects ---------------------------------------------------------------------------------

    def create_lineage(self, lineage: Lineage) -> Lineage:
        """Create-if-absent the lineage record."""
        made = Lineage(lineage.number, lineage.parent, lineage.after_epoch, time.time())
        if not self.backend.put_if_absent("lineages", f"{made.number:08d}", encode_lineage(made)):
            raise IntegrityError(
                f"Another job started lineage {made.number} of {self.path} at the same time; end "
                "one of the two jobs and start again.",
                path=f"{self.path}/lineages/{made.number:08d}",
            )
        return made

    def publish(self, effect: fx.PublishInflight) -> None:
        """Make the attempt visible; StorageError when one of this number is there already.

        The own record is none: the answer to an earlier try was lost on the way.
        """
        self.renew()
        self.check_identity()
        tried = self._unheard.pop(effect.key, None)
        record = InflightRecord(
            key=effect.key,
            incarnation=effect.incarnation,
            world_size=effect.world_size,
            write_id=tried or uuid.uuid4().hex,
            at=time.time(),
            boot_id=self.writer.boot_id,
            pid=self.writer.pid,
            pid_start=self.writer.pid_start,
            host=self.writer.host,
            segments=(),
            nodes=effect.nodes,
        )
        try:
            self.backend.put("inflight", str(effect.key), encode_inflight(record), durable=False)
        except GroupIOError as error:
            taken = isinstance(error, StorageError) and error.errno == errno.EEXIST
            if taken and self._is_there(record):
                return
            self._unheard[effect.key] = record.write_id
            raise

    def _is_there(self, record: InflightRecord) -> bool:
        name = str(record.key)
        try:
            data = self.backend.read("inflight", name)
            found = decode_inflight(data, f"{self.path}/inflight/{name}")
        except (NotFound, IntegrityError, FormatError):
            return False
        return replace(found, at=record.at) == record

    def prepare(self, effect: fx.PrepareEpoch, see: See) -> bytes:
        """Check, build and write the epoch record; returns its content id. Durable on return.

        ``see`` shows bytes of the members' leases, which last until the answer.
        """
        merged = dedup.merge(effect.reports)
        check_replicas(effect.key.epoch, effect.reports, merged, see)
        manifest = self._build(effect, merged)
        for segment in manifest.segments:
            if not segment.own:
                self._check_segment(segment.name, segment.bytes)
        data = encode_manifest(manifest, self._packed_tables)
        self.check_identity()
        self.backend.sync_folder("segments")
        self.backend.prepare(effect.key, data)
        self._prepared[effect.key] = manifest
        return manifest.header.content_id

    def _build(self, effect: fx.PrepareEpoch, merged: dedup.Merged) -> Manifest:
        reports = effect.reports
        topology = {r.node: [m.rank for m in r.members] for r in reports}
        ids = {m.rank: m.items_id for r in reports for m in r.members}
        return dedup.build_manifest(
            reports,
            store_id=self.store_id,
            job=self.job,
            key=effect.key,
            incarnation=effect.incarnation,
            world_size=effect.world_size,
            fingerprint=dedup.fingerprint(ids, topology),
            write_id=uuid.uuid4().hex,
            created_at=time.time(),
            metadata=effect.metadata,
            replicated=effect.replicated,
            door=effect.door,
            merged=merged,
        )

    def _check_segment(self, name: str, size: int) -> None:
        """A segment that the epoch refers to must still be there, whole."""
        try:
            there = self.backend.size("segments", name)
        except (NotFound, IntegrityError):
            there = -1
        if there != size:
            self.forget_chunks()
            raise IntegrityError(
                f"Segment {name}, to which this epoch refers, {_gone(there, size)}; save again: "
                "its chunks are written anew.",
                path=f"{self.path}/segments/{name}",
            )

    def compare(self, effect: fx.CompareEpoch, committed: bytes) -> bool:
        """The members' content is that of the committed epoch."""
        return dedup.content_id(effect.reports, effect.world_size) == committed

    def decide(self, effect: fx.Decide) -> tuple[bool, bool]:
        """Make the decision, or learn the one that stands: (committed, ours). Durable on return."""
        key = effect.key
        self.renew()
        if effect.commit:
            if self.backend.commit_prepared(key):
                manifest = self._prepared.pop(key, None)
                if manifest is not None:
                    if self.indexes:
                        self.known.add_epoch(manifest)
                    self.saved.add(manifest)
                return True, True
            return self.standing(key)
        record = AbortRecord(
            key=key,
            incarnation=effect.incarnation,
            reason=effect.reason,
            members=effect.members,
            write_id=uuid.uuid4().hex,
            at=time.time(),
        )
        if self.backend.put_if_absent("epochs", str(key), encode_abort(record)):
            self._prepared.pop(key, None)
            self.backend.delete("prepared", str(key))
            return False, True
        return self.standing(key)

    def standing(self, key: DecisionKey) -> tuple[bool, bool]:
        """The decision under ``key``: (committed, written by this object)."""
        with self.backend.reader("epochs", str(key)) as reader:
            if decode_record_kind(reader.read(0, min(reader.size, 64))) is not RecordKind.COMMIT:
                return False, False
            header = ManifestReader(reader.read, reader.size, reader.path).header
        mine = self._prepared.pop(key, None)
        return True, mine is not None and mine.header.write_id == header.write_id

    def forget(self, key: DecisionKey) -> None:
        """Remove the in-flight record of a decided attempt; not urgent, so never an error."""
        self._unheard.pop(key, None)
        try:
            self.backend.delete("inflight", str(key))
        except GroupIOError as error:
            log.warning("the in-flight record of %s stays until recovery: %s", key, error)

    def close(self) -> None:
        """Close the store; a later open finds it again."""
        if self._backend is not None:
            self._backend.close()
            self._backend = None
        self.known = KnownChunks()


def _gone(there: int, size: int) -> str:
    return "is gone" if there < 0 else f"has {there} bytes instead of {size}"
