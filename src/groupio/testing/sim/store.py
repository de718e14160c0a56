"""The store as a controller's driver uses it, in steps of one system call each.

The procedures are those of :mod:`groupio.controller.store` and of its recovery, over the backend
for file systems; between two steps anything may happen. Faults strike single steps.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

from groupio.errors import (
    GroupIOError,
    IntegrityError,
    NotFound,
    Outcome,
    StorageError,
    StorageFull,
)
from groupio.format.records import parse_key, parse_segment_name
from groupio.model import DecisionKey, Lineage, Manifest
from groupio.plan import dedup
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.testing.sim.disk import TORN, Disk, File
from groupio.testing.sim.engine import Process

if TYPE_CHECKING:
    from groupio.testing.sim.world import Sim

STORE_ID = "0" * 32
_PATH = "/store"

Procedure = Generator[str, str, Any]
"""Yields the name of the next step; is sent the fault that strikes it, or an error is thrown in."""


@dataclass(slots=True)
class Commit:
    """A prepared or committed epoch record."""

    manifest: Manifest
    write_id: str


@dataclass(slots=True)
class Abort:
    """An abort record."""

    key: DecisionKey
    incarnation: int
    write_id: str


@dataclass(slots=True)
class Inflight:
    """An in-flight record."""

    key: DecisionKey
    incarnation: int
    world_size: int
    nodes: tuple[str, ...]


@dataclass(slots=True)
class Segment:
    """The chunks of a segment in the order of their offsets; ``bad`` are damaged ones."""

    key: DecisionKey
    offsets: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    bad: set[bytes] = field(default_factory=set)


def failed(step: str, row: str, *, unknown: bool = False) -> GroupIOError:
    """The typed error of a fault in a step."""
    outcome = Outcome.UNKNOWN if unknown else Outcome.NOT_COMMITTED
    if row == "enospc":
        return StorageFull(f"no room in {_PATH} for {step}", path=_PATH)
    errno = 107 if row == "unavailable" else 5
    return StorageError(f"{step} in {_PATH}: {row}", path=_PATH, errno=errno, outcome=outcome)


READS = ("eio", "unavailable", "truncated_read", "slow_down")
STRIKES = {
    "look": READS,
    "read": READS,
    "list": ("eio", "unavailable", "stale_list", "slow_down"),
    "write": ("eio", "enospc", "short_write", "misdirected_write", "unavailable", "slow_down"),
    "fsync": ("fsync_error", "slow_down"),
    "link": ("eio", "lost_success", "unavailable", "slow_down"),
    "unlink": ("eio", "unavailable"),
    "dirsync": ("fsync_error", "slow_down"),
}
"""Which faults may strike a step."""

GOES_ON = frozenset(
    {"short_write", "misdirected_write", "lost_success", "stale_list", "fsync_error"}
)
"""Faults that the procedure itself lets happen."""

UNKNOWN_AFTER = frozenset({"link", "dirsync"})


class Steps:
    """Runs procedures of one process, each step in its own time."""

    def __init__(self, sim: Sim, process: Process, host: str) -> None:
        self.sim = sim
        self.process = process
        self.host = host

    def start(self, procedure: Procedure, done: Callable[[Any, GroupIOError | None], None]) -> None:
        """Run a procedure; ``done`` takes its result or its error."""
        self._step(procedure, done, None, None)

    def _step(
        self,
        procedure: Procedure,
        done: Callable[[Any, GroupIOError | None], None],
        fault: str | None,
        error: GroupIOError | None,
    ) -> None:
        try:
            step = (
                procedure.send(fault)  # type: ignore[arg-type]
                if error is None
                else procedure.throw(error)
            )
        except StopIteration as end:
            done(end.value, None)
        except GroupIOError as raised:
            done(None, raised)
        else:
            sim = self.sim
            row = sim.store_fault(step)
            delay = sim.options.store_s * (0.5 + sim.rng.random()) * self.process.slow
            error = None
            if row == "slow_down":
                delay *= 100
                row = ""
            elif row and row not in GOES_ON:
                error = failed(step, row, unknown=step in UNKNOWN_AFTER)
            sim.engine.post(delay, self.process, self._step, procedure, done, row, error)


class Records:
    """Small files that are created whole or not at all, by one process on one node."""

    def __init__(self, sim: Sim, host: str) -> None:
        self.sim = sim
        self.disk = sim.disk
        self.host = host
        self.guards = sim.guards
        self._numbers = count()

    def sync(self, folder: str) -> Procedure:
        """Make the names of a folder durable."""
        if "directory fsync" in self.guards:
            return
        fault = yield "dirsync"
        if fault:
            raise failed("dirsync", fault, unknown=True)
        self.disk.sync_folder(folder)

    def temporary(self, content: Any, size: int, *, durable: bool) -> Generator[str, str, File]:
        """Write a new file under a name that nobody reads."""
        fault = yield "write"
        name = f"{self.host}-{next(self._numbers)}"
        file = self.disk.create(self.host, "temporary", name, content, size)
        self.disk.unlink(self.host, "temporary", name)
        if fault == "short_write":
            yield "write"
        if durable and "fsync" not in self.guards:
            yield from self.flush(file)
        return file

    def flush(self, file: File) -> Procedure:
        """Flush a file once; never again after an error."""
        fault = yield "fsync"
        if fault:
            self.disk.fsync_fails(file)
            raise failed("fsync", fault)
        self.disk.fsync(file)

    def put(self, folder: str, name: str, content: Any, *, durable: bool = True) -> Procedure:
        """Create a record unless the name is taken; True when it is ours."""
        file = yield from self.temporary(content, 100, durable=durable)
        fault = yield "link"
        if "decision key" in self.guards:
            self.disk.replace(self.host, folder, name, file)
            placed = True
        else:
            placed = self.disk.link(self.host, folder, name, file)
        if fault:
            raise failed("link", fault, unknown=True)
        if durable:
            yield from self.sync(folder)
        return placed


class Marks:
    """The marks by which nodes and controllers find out whether they see one store."""

    def __init__(self, sim: Sim, disk: Disk, host: str) -> None:
        self.sim = sim
        self.disk = disk
        self.host = host

    def leave(self) -> Generator[str, str, tuple[str, bytes]]:
        """A mark under a new name; its name and its content."""
        name = f"mark-{next(self.sim.marks)}"
        if (yield "write"):
            yield "write"
        self.disk.create(self.host, "temporary", name, name.encode(), 32)
        return name, name.encode()

    def find(self, name: str) -> Generator[str, str, bytes]:
        """What is there under the name, b"" when there is nothing."""
        yield "look"
        file = self.disk.get("temporary", name)
        return b"" if file is None or file.content is TORN else file.content

    def remove(self, names: Sequence[str]) -> Procedure:
        """Remove marks; never an error."""
        try:
            yield "unlink"
        except GroupIOError:
            return None
        for name in names:
            self.disk.unlink(self.host, "temporary", name)
        return None


class JobStore(Records):
    """What a controller asks of its store: each effect as a procedure that returns the answer."""

    def __init__(self, sim: Sim, host: str, writer: str) -> None:
        super().__init__(sim, host)
        self.writer = writer
        self.marks = Marks(sim, sim.disk, host)
        self._prepared: dict[DecisionKey, File] = {}
        self._writes = count(1)

    def _write_id(self) -> str:
        return f"{self.writer}-{next(self._writes)}"

    # -- effects -------------------------------------------------

    def create_lineage(self, line: Lineage) -> Procedure:
        """Create-if-absent the lineage record."""
        if not (yield from self.put("lineages", f"{line.number:08d}", line)):
            raise IntegrityError("another job made this lineage", path=_PATH)
        return ev.LineageCreated(line)

    def publish(self, effect: fx.PublishInflight) -> Procedure:
        """Make the attempt visible."""
        record = Inflight(
            effect.key, effect.incarnation, effect.world_size, getattr(effect, "nodes", ())
        )
        if not (yield from self.put("inflight", str(effect.key), record, durable=False)):
            self.sim.oracle.taken(effect.key, effect.group)
            raise StorageError(f"{effect.key} is taken", path=_PATH, errno=17)
        self.sim.oracle.published(effect.key)
        return ev.InflightPublished(effect.group)

    def prepare(self, effect: fx.PrepareEpoch) -> Procedure:
        """Build and write the epoch record."""
        merged = dedup.merge(effect.reports)
        ids = {m.rank: m.items_id for r in effect.reports for m in r.members}
        topology = {r.node: [m.rank for m in r.members] for r in effect.reports}
        manifest = dedup.build_manifest(
            effect.reports,
            store_id=STORE_ID,
            job="job",
            key=effect.key,
            incarnation=effect.incarnation,
            world_size=effect.world_size,
            fingerprint=dedup.fingerprint(ids, topology),
            write_id=self._write_id(),
            created_at=1e9 + self.sim.engine.now,
            merged=merged,
        )
        self.sim.oracle.preparing(effect, manifest)
        for ref in manifest.segments:
            if not ref.own or "store proof" not in self.guards:
                yield "look"
                there = self.disk.get("segments", ref.name)
                if there is None or there.size != ref.bytes:
                    raise IntegrityError(f"segment {ref.name} is gone", path=ref.name)
        yield from self.sync("segments")
        record = Commit(manifest, manifest.header.write_id)
        file = yield from self.temporary(record, 1000, durable=True)
        fault = yield "link"
        self.disk.replace(self.host, "prepared", str(effect.key), file)
        if fault:
            raise failed("rename", fault)
        if not self.sim.options.node_local:
            yield from self.sync("prepared")
        self._prepared[effect.key] = file
        return ev.Prepared(effect.group, manifest.header.content_id)

    def leave_mark(self, proof: int) -> Procedure:
        """Leave a mark for an agent."""
        name, content = yield from self.marks.leave()
        return ev.MarkLeft(proof, name, content, _PATH)

    def find_mark(self, proof: int, name: str) -> Procedure:
        """Look for the mark of an agent."""
        return ev.MarkFound(proof, (yield from self.marks.find(name)))

    def compare(self, effect: fx.CompareEpoch, committed: bytes) -> Procedure:
        """The members' content is that of the committed epoch."""
        yield "look"
        equal = dedup.content_id(effect.reports, effect.world_size) == committed
        return ev.Compared(effect.group, equal)

    def decide(self, effect: fx.Decide) -> Procedure:
        """Make the decision, or learn the one that stands."""
        room = 2 if effect.drop_segments_if_full else 0
        while True:
            try:
                committed, ours = yield from self._decide(effect)
                return ev.Decided(effect.group, committed, ours)
            except StorageFull:
                if not room:
                    raise
                room -= 1
                self.sim.oracle.dropping(effect.key)
                for name in self._segments_of(effect.key):
                    self.disk.unlink(self.host, "segments", name)

    def _decide(self, effect: fx.Decide) -> Procedure:
        key, name = effect.key, str(effect.key)
        if effect.commit:
            if (yield from self._commit(key)):
                self._prepared.pop(key, None)
                return True, True
            return (yield from self._standing(key))
        abort = Abort(key, effect.incarnation, self._write_id())
        if (yield from self.put("epochs", name, abort)):
            self._prepared.pop(key, None)
            self.disk.unlink(self.host, "prepared", name)
            return False, True
        return (yield from self._standing(key))

    def _commit(self, key: DecisionKey) -> Generator[str, str, bool]:
        name = str(key)
        mine = self._prepared.get(key)
        yield "look"
        found = self.disk.get("prepared", name)
        if found is not None:
            fault = yield "link"
            if "decision key" in self.guards:
                self.disk.replace(self.host, "epochs", name, found)
            else:
                self.disk.link(self.host, "epochs", name, found)
            if fault:
                raise failed("link", fault, unknown=True)
        yield from self.sync("epochs")
        yield "look"
        decision = self.disk.get("epochs", name)
        if decision is None:
            raise NotFound(f"{key} has no record", outcome=Outcome.UNKNOWN)
        self.disk.unlink(self.host, "prepared", name)
        return decision is (mine or found)

    def _standing(self, key: DecisionKey) -> Procedure:
        yield "read"
        file = self.disk.get("epochs", str(key))
        if file is None or file.content is TORN:
            raise IntegrityError(f"the decision of {key} cannot be read", path=_PATH)
        if isinstance(file.content, Abort):
            return False, False
        return True, self._prepared.pop(key, None) is file

    def forget(self, key: DecisionKey) -> Procedure:
        """Remove the in-flight record; never an error."""
        try:
            yield "unlink"
        except GroupIOError:
            return None
        self.disk.unlink(self.host, "inflight", str(key))
        return None

    # -- recovery -------------------------------------------------

    def open(self, effect: fx.OpenStore) -> Procedure:
        """Open and recover the store."""
        self.sim.store_made |= effect.create
        if not self.sim.store_made:
            yield "look"
            raise NotFound("there is no store yet")
        yield from self.sync("epochs")
        yield from self.sync("lineages")
        held = set(effect.held)
        names = yield from self._list("epochs")
        committed: list[ev.CommittedEpoch] = []
        aborted: list[DecisionKey] = []
        incarnation = 0
        for name in names:
            content = self.disk.folders["epochs"][name].content
            key = parse_key(name)
            assert key is not None
            if isinstance(content, Commit):
                header = content.manifest.header
                committed.append(ev.CommittedEpoch(key, header.incarnation, header.content_id))
                incarnation = max(incarnation, header.incarnation)
            elif isinstance(content, Abort):
                aborted.append(key)
                incarnation = max(incarnation, content.incarnation)
            else:
                committed.append(ev.CommittedEpoch(key, 0, b""))
        state = _Found(committed, aborted, incarnation, [])
        yield from self._recover(held, state, resume=getattr(effect, "resume", False))
        lineages = tuple(
            f.content
            for _, f in sorted(self.disk.folders["lineages"].items())
            if f.content is not TORN
        )
        extra: dict[str, Any] = {"undecided": tuple(state.undecided)} if state.undecided else {}
        if "store_id" in ev.StoreState.__struct_fields__:
            extra["store_id"] = STORE_ID
        return ev.StoreOpened(
            ev.StoreState(
                "job",
                lineages,
                tuple(committed),
                tuple(aborted),
                state.incarnation,
                self.sim.options.node_local,
                **extra,
            )
        )

    def _list(self, folder: str) -> Generator[str, str, list[str]]:
        fault = yield "list"
        names = self.disk.names(folder)
        if fault == "stale_list" and names and folder != "epochs":
            names = names[:-1]
        return names

    def _segments_of(self, key: DecisionKey) -> list[str]:
        prefix = f"{key}-"
        return [n for n in self.disk.folders["segments"] if n.startswith(prefix)]

    def _recover(self, held: set[DecisionKey], state: _Found, *, resume: bool) -> Procedure:
        decided = {c.key for c in state.committed} | set(state.aborted)
        inflight = yield from self._list("inflight")
        prepared = yield from self._list("prepared")
        segments = yield from self._list("segments")
        keys = {key for n in (*inflight, *prepared) if (key := parse_key(n)) is not None}
        keys |= {owner[0] for n in segments if (owner := parse_segment_name(n)) is not None}
        for key in sorted(keys):
            if key in held:
                continue
            name = str(key)
            there = self.disk.get("inflight", name)
            record = there.content if there is not None and there.content is not TORN else None
            if record is not None:
                state.incarnation = max(state.incarnation, record.incarnation)
            if key not in decided:
                found = yield from self._complete(key)
                if found is None and resume and record is not None and record.nodes:
                    state.undecided.append(
                        ev.UndecidedAttempt(
                            key, record.incarnation, record.world_size, record.nodes
                        )
                    )
                    continue
                if found is None:
                    abort = Abort(key, record.incarnation if record else 0, self._write_id())
                    if (yield from self.put("epochs", name, abort)):
                        state.aborted.append(key)
                    else:
                        committed, _ = yield from self._standing(key)
                        if committed:
                            content = self.disk.folders["epochs"][name].content
                            header = content.manifest.header
                            found = ev.CommittedEpoch(key, header.incarnation, header.content_id)
                        else:
                            state.aborted.append(key)
                if found is not None:
                    state.committed.append(found)
            self.disk.unlink(self.host, "prepared", name)
            yield "unlink"
            self.disk.unlink(self.host, "inflight", name)
        yield from self._drop_segments(state, segments)

    def _complete(self, key: DecisionKey) -> Generator[str, str, ev.CommittedEpoch | None]:
        yield "read"
        file = self.disk.get("prepared", str(key))
        if file is None or not isinstance(file.content, Commit):
            return None
        manifest = file.content.manifest
        for ref in manifest.segments:
            there = self.disk.get("segments", ref.name)
            if there is None or there.size != ref.bytes or there.content is TORN:
                return None
        yield from self.sync("segments")
        try:
            mine = yield from self._commit(key)
        except NotFound:
            return None
        if not mine:
            return None
        return ev.CommittedEpoch(key, manifest.header.incarnation, manifest.header.content_id)

    def _drop_segments(self, state: _Found, names: Sequence[str]) -> Procedure:
        aborted = set(state.aborted)
        doomed = [n for n in names if (p := parse_segment_name(n)) is not None and p[0] in aborted]
        if not doomed:
            return
        used: set[str] = set()
        for found in state.committed:
            there = self.disk.get("epochs", str(found.key))
            if there is None or not isinstance(there.content, Commit):
                return
            used.update(ref.name for ref in there.content.manifest.segments)
        yield "unlink"
        for name in doomed:
            if name not in used:
                self.disk.unlink(self.host, "segments", name)


@dataclass(slots=True)
class _Found:
    committed: list[ev.CommittedEpoch]
    aborted: list[DecisionKey]
    incarnation: int
    undecided: list[Any]
