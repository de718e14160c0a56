"""The store of a job as its controller uses it: blocking calls for one worker thread."""

from __future__ import annotations

import errno
import logging
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

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
    Retry,
    StorageError,
)
from groupio.format.blocks import PackedTables
from groupio.format.manifest import ManifestReader, encode_manifest
from groupio.format.records import (
    AbortRecord,
    InflightRecord,
    RecordKind,
    StoreRecord,
    decode_inflight,
    decode_record_kind,
    encode_abort,
    encode_inflight,
    encode_lineage,
)
from groupio.model import DecisionKey, Lineage, Manifest, SegmentRef
from groupio.plan import dedup
from groupio.plan.layout import lease_bytes
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol import lineage as lines
from groupio.protocol import reasons
from groupio.protocol.reasons import is_away
from groupio.store.catalogue import RECENT, read_decisions, write_catalogue

log = logging.getLogger(__name__)

_P = ParamSpec("_P")
_T = TypeVar("_T")

TEMPORARY_AGE_S = 24 * 3600.0
"""Unfinished records older than this belong to writers that are long dead."""

MARK_BYTES = 32
"""Random bytes in a mark."""

LOOK_S = 10.0
"""A segment that another node has just written is looked for so long."""

LOOK_FIRST_S, LOOK_LAST_S = 0.05, 1.0
"""The first wait between two looks, and the longest."""


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


def _asking(
    call: Callable[Concatenate[JobStore, _P], _T],
) -> Callable[Concatenate[JobStore, _P], _T]:
    """A call after whose failure the next one may need new descriptors."""

    @wraps(call)
    def asking(self: JobStore, /, *args: _P.args, **named: _P.kwargs) -> _T:
        try:
            return call(self, *args, **named)
        except GroupIOError as error:
            self.doubt(error)
            raise

    return asking


@dataclass(slots=True)
class JobStore:
    """One job's store, open for writing.

    A store that was away may come back as another mount, for which the descriptors of the one
    before are of no use. After an error that says so the next call opens the store anew by its
    path, and goes on only if its record still names the same store. Whoever took the backend
    before that fails with it.
    """

    path: str
    job: str
    node: str
    writer: Writer
    file_mode: int | None = None
    umask: int | None = None
    """Of the client that the store was opened for; None: of this process."""
    io_mode: str = ""
    expected: str = ""
    """The id (hex) of the store that must be at the path; "" where any will do."""
    indexes: bool = True
    """Whether saves go through this object: only they use what is known of older epochs."""
    store_id: str = ""
    """Hex, known since the store was opened: nobody has to read it where reading may fail."""
    known: KnownChunks = field(default_factory=KnownChunks)
    lease_bytes: dict[int, int] = field(default_factory=dict)
    """What each rank's lease took in the newest epoch found at opening."""
    saved: Saved = field(default_factory=Saved)
    views: int = 0
    """How often the store was opened by its path, which may have led to another one each time."""
    _backend: PosixBackend | None = None
    _complete: bool = False
    """The backend was opened to write: all its folders are there."""
    _unheard: dict[DecisionKey, str] = field(default_factory=dict)
    """The write ids of attempts that may be visible although the store did not say so."""
    _prepared: dict[DecisionKey, Manifest] = field(default_factory=dict)
    _packed_tables: PackedTables = field(default_factory=dict)
    _doubted: bool = False
    """A call failed as it does when the store is away."""
    _shown: str = ""
    """The mark that this node left for its controller, which removes it."""
    _prepared_before: set[DecisionKey] = field(default_factory=set)
    """Prepared through a backend before this one, which does not know their records."""
    _decided_since: int = 0
    """Decisions since the catalogue was looked at."""
    _renewing: threading.Lock = field(default_factory=threading.Lock)

    def for_controller(self) -> JobStore:
        """The same store anew, for a controller through which nobody saves."""
        modes = (self.file_mode, self.umask)
        return JobStore(
            self.path,
            self.job,
            self.node,
            self.writer,
            *modes,
            expected=self.expected,
            indexes=False,
        )

    @property
    def backend(self) -> PosixBackend:
        """The open backend."""
        assert self._backend is not None
        return self._backend

    def current(self) -> PosixBackend:
        """The backend to begin something with, opened anew if the store has come back since.

        Whatever is made through it becomes durable through it too, or is made again. Any thread;
        StorageError while the store is away or another one is in its place.
        """
        self.renew()
        self.check_identity()
        return self.backend

    def after(self, error: GroupIOError) -> PosixBackend:
        """The backend to go on with after a call through an earlier one failed with ``error``."""
        self.doubt(error)
        self.renew()
        return self.backend

    def doubt(self, error: GroupIOError) -> None:
        """Note that a call through the open backend failed with ``error``."""
        if is_away(error):
            self._doubted = True

    @_asking
    def open(
        self, held: Sequence[DecisionKey], *, create: bool = True, resume: bool = False
    ) -> ev.StoreState:
        """Open (and with ``create`` make) the store, decide what is undecided, list the rest.

        NotFound, and nothing is written, when there is no store and ``create`` is not set.
        """
        if self._backend is not None:
            try:
                self.current()
            except GroupIOError as error:
                # A store that is away is not made anew in what may be a bare mount point.
                if held or is_away(error):
                    raise
                log.warning("opening %s anew: %s", self.path, error)
                self.close()
        if create and not self._complete and not held:
            self.close()
        backend, record = self._enter(create)
        backend.remove_temporary(TEMPORARY_AGE_S)
        state = recover(
            backend, self.writer, record.job, frozenset(held), fence=create, resume=resume
        )
        info = backend.info()
        self.io_mode = info.io_mode
        self._learn(state)
        return replace(state, node_local=info.node_local, store_id=self.store_id)

    @_asking
    def follow(self, *, create: bool) -> str:
        """Open the store to write segments for a controller elsewhere; its id (hex).

        Nothing is decided: that is the controller's. NotFound when there is no store and
        ``create`` is not set. After a save that failed, :meth:`renew`.
        """
        self.renew()
        backend, record = self._enter(create)
        self.io_mode = backend.info().io_mode
        self._learn(listed(backend, record.job))
        return record.store_id

    def _enter(self, create: bool) -> tuple[PosixBackend, StoreRecord]:
        """Open the store if it is not; nothing stays open of one that was never seen."""
        first = self._backend is None
        if self._backend is None:
            if self.expected:
                self._check_expected()
            self._backend = PosixBackend.open(
                self.path, create=create, file_mode=self.file_mode, umask=self.umask
            )
            self._complete, self._doubted = create, False
            self.views += 1
        backend = self._backend
        try:
            record = backend.ensure_store_record(self.job) if create else backend.store_record()
        except GroupIOError as error:
            if first or isinstance(error, NotFound):
                self.close()
            raise
        self.job, self.store_id = record.job, record.store_id
        return backend, record

    def _check_expected(self) -> None:
        """StorageError unless the store that clients have used so far is at the path."""
        try:
            with PosixBackend.open(self.path, create=False) as backend:
                now = backend.store_record().store_id
        except NotFound as error:
            raise reasons.store_gone(self.path) from error
        if now != self.expected:
            raise reasons.other_store(self.path, now, self.expected)

    def learn(self, key: DecisionKey) -> None:
        """Index the chunks of an epoch that a controller elsewhere committed."""
        try:
            self.renew()
            with self._manifest(key) as manifest:
                self.known.add_epoch(manifest)
        except GroupIOError as error:
            self.doubt(error)
            log.warning("epoch %d is not used for deduplication: %s", key.epoch, error)

    def forget_chunks(self) -> None:
        """Refer to no chunk of an older epoch until the next one is committed."""
        self.known = KnownChunks()

    def check_identity(self) -> None:
        """Raise StorageError unless the very store that was opened is at the path.

        Where it was mounted anew, it is opened anew.
        """
        backend = self.backend
        try:
            backend.check_identity()
        except StorageError as error:
            # The mount point of a store that is away may not have its directory.
            if not is_away(error) and error.errno != errno.ENOENT:
                raise
            with self._renewing:
                if self._backend is backend:
                    self._open_anew(error.message)

    def renew(self) -> None:
        """Go on with new descriptors after a failed flush of a directory, or an absence.

        Whoever still writes through the old ones fails, as it must; they are closed with their
        last user.
        """
        with self._renewing:
            backend = self._backend
            if backend is None or (backend.is_sound and not self._doubted):
                return
            self._open_anew("after calls that failed")

    def _open_anew(self, why: str) -> None:
        self._doubted = False  # what fails from now on says something of the new descriptors
        try:
            self._backend = self.backend.anew()
        except GroupIOError:
            self._doubted = True
            raise
        self.views += 1
        log.warning("opened %s anew: %s", self.path, why)
        self._prepared_before.update(self._prepared)

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

    @_asking
    def create_lineage(self, lineage: Lineage) -> Lineage:
        """Create-if-absent the lineage record."""
        self.renew()
        made = Lineage(lineage.number, lineage.parent, lineage.after_epoch, time.time())
        if not self.backend.put_if_absent("lineages", f"{made.number:08d}", encode_lineage(made)):
            raise IntegrityError(
                f"Another job started lineage {made.number} of {self.path} at the same time; end "
                "one of the two jobs and start again.",
                path=f"{self.path}/lineages/{made.number:08d}",
            )
        return made

    @_asking
    def publish(self, effect: fx.PublishInflight) -> None:
        """Make the attempt visible; StorageError when one of this number is there already.

        The own record is none: the answer to an earlier try was lost on the way.
        """
        self.current()
        tried = self._unheard.get(effect.key)
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
            pid_space=self.writer.pid_space,
        )
        try:
            self.backend.put("inflight", str(effect.key), encode_inflight(record), durable=False)
        except GroupIOError as error:
            self._unheard[effect.key] = record.write_id
            taken = isinstance(error, StorageError) and error.errno == errno.EEXIST
            if not (taken and self._is_there(record)):
                raise
        self._unheard.pop(effect.key, None)

    def _is_there(self, record: InflightRecord) -> bool:
        name = str(record.key)
        try:
            data = self.backend.read("inflight", name)
            found = decode_inflight(data, f"{self.path}/inflight/{name}")
        except (NotFound, IntegrityError, FormatError):
            return False
        return replace(found, at=record.at) == record

    @_asking
    def prepare(
        self,
        effect: fx.PrepareEpoch,
        see: See,
        paths: Mapping[str, str] | None = None,
        view: int | None = None,
    ) -> bytes:
        """Check, build and write the epoch record; returns its content id. Durable on return.

        ``see`` shows bytes of the members' leases, which last until the answer. ``paths`` are the
        paths of the store on other nodes, for messages. ``view`` is the number of the opened store
        that they see (None: there are no others); another one is ESTALE. IntegrityError when a
        segment that the epoch refers to is not whole in this store; StorageError when another node
        has just written it: that node's path leads to another store.
        """
        merged = dedup.merge(effect.reports)
        check_replicas(effect.key.epoch, effect.reports, merged, see)
        manifest = self._build(effect, merged)
        backend = self.current()
        self._check_view(view)
        self._check_segments(backend, effect, manifest, paths or {})
        data = encode_manifest(manifest, self._packed_tables)
        backend.sync_folder("segments")
        backend.prepare(effect.key, data)
        with self._renewing:
            self._prepared[effect.key] = manifest
            if self._backend is backend:
                self._prepared_before.discard(effect.key)
            else:
                # Another thread opened the store anew meanwhile.
                self._prepared_before.add(effect.key)
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

    def _check_segments(
        self,
        backend: PosixBackend,
        effect: fx.PrepareEpoch,
        manifest: Manifest,
        paths: Mapping[str, str],
    ) -> None:
        """Every segment that the epoch refers to must be in this store, whole.

        One may be in a copy of the store that a node takes for it, or a store that came back may
        be an older copy of itself. What another node has just made is looked for repeatedly:
        network file systems show it late.
        """
        writers = {s.name: r.node for r in effect.reports for s in r.segments if s.own}
        wanted = {s.name: s for s in manifest.segments}
        until = time.monotonic() + LOOK_S
        wait_s = LOOK_FIRST_S
        while True:
            sizes = backend.sizes("segments", wanted)
            wrong = [s for s in wanted.values() if sizes[s.name] != s.bytes]
            late = all(s.own and writers.get(s.name) != self.node for s in wrong)
            if not wrong or not late or time.monotonic() + wait_s > until:
                break
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, LOOK_LAST_S)
            wanted = {s.name: s for s in wrong}
        if wrong:
            segment = min(wrong, key=lambda s: s.own)
            raise self._missing(segment, sizes[segment.name], writers.get(segment.name, ""), paths)

    def _missing(
        self, segment: SegmentRef, there: int, writer: str, paths: Mapping[str, str]
    ) -> GroupIOError:
        gone = "is gone" if there < 0 else f"has {there} bytes instead of {segment.bytes}"
        path = f"{self.path}/segments/{segment.name}"
        if not segment.own or writer == self.node:
            self.forget_chunks()
            return IntegrityError(
                f"Segment {segment.name}, to which this epoch refers, {gone} in {self.path}; save "
                "again: its chunks are written anew.",
                path=path,
                retry=Retry.WHOLE,
            )
        return StorageError(
            f"Node {writer} wrote segment {segment.name} of this epoch to its store "
            f"{paths.get(writer, '')}, and in the store {self.path} of the controller on "
            f"node {self.node} it {gone}: one is a copy of the other, or another file system is "
            "mounted. Let all nodes use the same file system, then save again.",
            path=path,
        )

    # -- marks -----------------------------------------------------------------------------------

    @_asking
    def leave_mark(self, proof: int) -> ev.MarkLeft:
        """Leave a mark for an agent, in the folder of decisions, which the agent has to see."""
        content = secrets.token_bytes(MARK_BYTES)
        name = self._here().leave_mark("epochs", content)
        return ev.MarkLeft(proof, name, content, self.path)

    @_asking
    def find_mark(self, proof: int, name: str) -> ev.MarkFound:
        """Read the mark of an agent, in the folder of segments, which the agent writes."""
        return ev.MarkFound(proof, self._here().find_mark("segments", name) or b"")

    def remove_marks(self, own: Iterable[str], shown: Iterable[str]) -> None:
        """Remove marks of this controller and of agents; leftovers are removed by age."""
        try:
            for folder, names in (("epochs", own), ("segments", shown)):
                for name in names:
                    self._here().remove_mark(folder, name)
        except GroupIOError as error:
            self.doubt(error)
            log.info("marks in %s stay for a while: %s", self.path, error)

    @_asking
    def show(self, order: fx.ShowStore) -> ev.StoreShown:
        """What this node sees of the controller's mark; where it does, it leaves one of its own."""
        backend = self._here()
        found = backend.find_mark("epochs", order.name)
        if not found:
            return ev.StoreShown(order.node, order.name)
        self.hide()
        content = secrets.token_bytes(MARK_BYTES)
        self._shown = backend.leave_mark("segments", content)
        return ev.StoreShown(order.node, order.name, found, self._shown, content)

    def hide(self) -> None:
        """Remove the mark that this node left, if it is still there."""
        if self._shown:
            self.remove_marks((), (self._shown,))
            self._shown = ""

    def _here(self) -> PosixBackend:
        if self._backend is None:
            raise StorageError(
                f"the store {self.path} is closed; it is opened by the next save",
                path=self.path,
                errno=errno.ESTALE,
            )
        return self.current()

    def _check_view(self, view: int | None) -> None:
        if view is not None and self.views != view:
            raise StorageError(
                f"the store {self.path} was opened anew; the epoch goes on once all nodes have "
                "proved that they see it",
                path=self.path,
                errno=errno.ESTALE,
            )

    @_asking
    def compare(self, effect: fx.CompareEpoch) -> bool:
        """The members' content is that of the committed epoch, by its own record.

        IntegrityError or FormatError when that cannot be read.
        """
        self.renew()
        with self._manifest(effect.key) as manifest:
            committed = manifest.header.content_id
        return dedup.content_id(effect.reports, effect.world_size) == committed

    @_asking
    def decide(self, effect: fx.Decide, view: int | None = None) -> tuple[bool, bool]:
        """Make the decision, or learn the one that stands: (committed, ours). Durable on return.

        ``view`` as in :meth:`prepare`, for a commit.
        """
        key = effect.key
        self.renew()
        if effect.commit:
            self._check_view(view)
            manifest = self._prepared.get(key)
            if self.backend.commit_prepared(key) and key not in self._prepared_before:
                committed, ours = True, True
            else:
                committed, ours = self.standing(key)
            self._prepared.pop(key, None)
            self._prepared_before.discard(key)
            if committed and ours and manifest is not None:
                if self.indexes:
                    self.known.add_epoch(manifest)
                self.saved.add(manifest)
            return committed, ours
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
        self._decided_since += 1
        try:
            self.renew()
            self.backend.delete("inflight", str(key))
            if self._decided_since >= RECENT:
                # Its members know of the decision: this is on nobody's way.
                self._decided_since = 0
                write_catalogue(self.backend, read_decisions(self.backend))
        except GroupIOError as error:
            self.doubt(error)
            log.warning("what is left of attempt %s stays until recovery: %s", key, error)

    def close(self) -> None:
        """Close the store; a later open finds it again."""
        if self._backend is not None:
            self._backend.close()
            self._backend = None
        self.known = KnownChunks()
