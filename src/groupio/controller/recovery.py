"""Recovers a store: decides or keeps what earlier controllers left undecided.

An attempt is undecided when it has an in-flight record, a prepared record or segments, and no
decision. A whole prepared record is completed: everything that it names was durable before it was
written. Every other attempt is aborted, and its segments are deleted after the abort is decided.
"""

from __future__ import annotations

import logging
import os
import time
import uuid

from groupio.agent.identity import Writer, process_start
from groupio.backend.base import EPOCHS, LINEAGES, is_no_record
from groupio.backend.faults import storage_error
from groupio.backend.posix import PosixBackend
from groupio.errors import FormatError, GroupIOError, IntegrityError, NotFound, StorageError
from groupio.format.envelope import HEADER_BYTES
from groupio.format.manifest import ManifestReader
from groupio.format.records import (
    AbortRecord,
    InflightRecord,
    RecordKind,
    decode_inflight,
    decode_lineage,
    decode_record_kind,
    encode_abort,
    parse_key,
    parse_lineage_name,
    parse_segment_name,
)
from groupio.model import DecisionKey, Lineage
from groupio.protocol import events as ev
from groupio.store.catalogue import Decisions, read_decisions, write_catalogue

log = logging.getLogger(__name__)

OTHER_AGENT_WAIT_S = 30.0
"""How long an attempt of another living agent on this node may take to be decided."""

_POLL_S = 0.1


def recover(
    backend: PosixBackend,
    writer: Writer,
    job: str,
    held: frozenset[DecisionKey],
    *,
    fence: bool,
    resume: bool = False,
) -> ev.StoreState:
    """Decide every undecided attempt that is not ``held`` here, then list the store.

    With ``fence``, when a save begins, attempts of other hosts are aborted too: this job's life
    comes after theirs. Without, when somebody only connects, they may be alive and are left alone.
    With ``resume`` attempts that name nodes, and are not prepared, are left to those nodes: they
    stand in ``undecided``.
    Raises StorageError then, and when another living agent of this node does not decide in time.
    """
    # What a killed agent decided and did not flush could still be lost; others are about to act
    # on it.
    for folder in ("epochs", "lineages"):
        backend.sync_folder(folder, force=True)
    lineages = _lineages(backend)
    decisions = read_decisions(backend, lineages)
    write_catalogue(backend, decisions)
    committed, aborted = _committed(decisions), _aborted(decisions)
    incarnation = decisions.incarnation
    decided = {c.key for c in committed} | set(aborted)
    segments = _segments(backend)
    undecided: list[ev.UndecidedAttempt] = []
    # Of what is decided, and that may be thousands, only what has records left is looked at.
    for key in sorted(_attempts(backend) | (set(segments) - decided)):
        if key in held:
            continue
        inflight = _inflight(backend, key)
        incarnation = max(incarnation, inflight.incarnation if inflight is not None else 0)
        if key not in decided:
            theirs = resume and inflight is not None and bool(inflight.nodes)
            if not theirs and _await_owner(backend, key, inflight, writer):
                return recover(backend, writer, job, held, fence=fence, resume=resume)
            found = _complete(backend, key)
            if found is None and theirs:
                assert inflight is not None
                undecided.append(
                    ev.UndecidedAttempt(
                        key, inflight.incarnation, inflight.world_size, inflight.nodes
                    )
                )
                continue
            if found is None and not fence and (inflight is None or _is_hidden(inflight, writer)):
                raise _left_alone(backend, key, inflight)
            if found is None:
                if not _abort(backend, key, inflight):
                    # Another controller decided it meanwhile: what stands there counts.
                    return recover(backend, writer, job, held, fence=fence, resume=resume)
                aborted.append(key)
                if inflight is not None:  # announced until now, so no commit refers to it
                    _delete_segments(backend, segments.pop(key, []))
            else:
                committed.append(found)
        backend.delete("prepared", str(key))
        backend.delete("inflight", str(key))
    _drop_segments(backend, {key: segments[key] for key in aborted if key in segments})
    return ev.StoreState(
        job=job,
        lineages=lineages,
        committed=tuple(committed),
        aborted=tuple(aborted),
        incarnation=incarnation,
        undecided=tuple(undecided),
    )


def listed(backend: PosixBackend, job: str) -> ev.StoreState:
    """What is decided in the store, and nothing else; for those who decide nothing themselves."""
    lineages = _lineages(backend)
    decisions = read_decisions(backend, lineages)
    committed, aborted = _committed(decisions), _aborted(decisions)
    return ev.StoreState(job, lineages, tuple(committed), tuple(aborted), decisions.incarnation)


def _committed(decisions: Decisions) -> list[ev.CommittedEpoch]:
    committed = [
        ev.CommittedEpoch(key, entry.content.incarnation, entry.content.content_id)
        for key, entry in decisions.entries.items()
        if entry.content is not None
    ]
    for key, error in decisions.damaged.items():
        log.warning("the decision of %s cannot be read: %s", key, error)
        if key not in decisions.damaged_aborts:
            # The attempt is decided, whatever it was; its number is never used again.
            committed.append(ev.CommittedEpoch(key, 0, b""))
    return committed


def _aborted(decisions: Decisions) -> list[DecisionKey]:
    return [*decisions.aborted, *sorted(decisions.damaged_aborts)]


def _drop_segments(backend: PosixBackend, doomed: dict[DecisionKey, list[str]]) -> None:
    """Delete segments of aborted attempts, but never one that a committed epoch refers to.

    That happens when somebody removed a decision by hand. While a commit cannot be read, nobody
    knows what it refers to, and nothing is deleted. All decisions are read from their files.
    """
    if not doomed:
        return
    used: set[str] = set()
    for name in backend.list(EPOCHS):
        key = parse_key(name)
        if key is None:
            continue
        try:
            with backend.reader(EPOCHS, name) as reader:
                head = reader.read(0, min(reader.size, HEADER_BYTES))
                if decode_record_kind(head, reader.path) is RecordKind.ABORT:
                    continue
                doomed.pop(key, None)
                manifest = ManifestReader(reader.read, reader.size, reader.path)
                used.update(segment.name for segment in manifest.segments)
        except NotFound:
            continue  # retention took it after it was listed
        except GroupIOError as error:
            if not is_no_record(error):
                raise
            log.warning("segments of %d aborted epoch(s) are kept: %s", len(doomed), error)
            return
    for name in (name for names in doomed.values() for name in names):
        if name in used:
            log.error("segment %s is in use, but the decision of its epoch is gone", name)
        else:
            _delete_segments(backend, [name])


def _delete_segments(backend: PosixBackend, names: list[str]) -> None:
    for name in names:
        backend.delete("segments", name)


def _attempts(backend: PosixBackend) -> set[DecisionKey]:
    names = [*backend.list("inflight"), *backend.list("prepared")]
    return {key for name in names if (key := parse_key(name)) is not None}


def _segments(backend: PosixBackend) -> dict[DecisionKey, list[str]]:
    found: dict[DecisionKey, list[str]] = {}
    for name in backend.list("segments"):
        parsed = parse_segment_name(name)
        if parsed is not None:
            found.setdefault(parsed[0], []).append(name)
    return found


def _lineages(backend: PosixBackend) -> tuple[Lineage, ...]:
    return tuple(
        decode_lineage(backend.read(LINEAGES, name), f"{backend.path}/{LINEAGES}/{name}")
        for name in backend.list(LINEAGES)
        if parse_lineage_name(name) is not None
    )


def _inflight(backend: PosixBackend, key: DecisionKey) -> InflightRecord | None:
    try:
        data = backend.read("inflight", str(key))
        return decode_inflight(data, f"{backend.path}/inflight/{key}")
    except (NotFound, IntegrityError, FormatError):
        # Not durable by design: a power cut may leave it empty or take it away.
        return None


def _await_owner(
    backend: PosixBackend, key: DecisionKey, record: InflightRecord | None, writer: Writer
) -> bool:
    """Wait for another living agent of this node to decide; True when it did."""
    if record is None or not _lives(record, writer):
        return False
    deadline = time.monotonic() + OTHER_AGENT_WAIT_S
    while _lives(record, writer):
        if backend.exists("epochs", str(key)):
            return True
        if not backend.exists("inflight", str(key)):
            return False  # it never began
        if time.monotonic() > deadline:
            raise StorageError(
                f"Another agent (pid {record.pid}) has epoch {key.epoch} in flight in "
                f"{backend.path}; wait until it is done, or drain it with `groupio agent drain`.",
                path=backend.path,
            )
        time.sleep(_POLL_S)
    return backend.exists("epochs", str(key))


def _left_alone(
    backend: PosixBackend, key: DecisionKey, record: InflightRecord | None
) -> StorageError:
    host = "an unknown host" if record is None else f"host {record.host} (pid {record.pid})"
    return StorageError(
        f"Epoch {key.epoch} of {backend.path} is in flight on {host}; it is left alone until a "
        "save begins here.",
        path=backend.path,
    )


def _is_hidden(record: InflightRecord, writer: Writer) -> bool:
    """Whether the process of the record lives cannot be seen from here.

    It is on another machine, which may have this one's name, or in another container, where its
    pid is another process's.
    """
    if (record.boot_id, record.host) != (writer.boot_id, writer.host):
        return True
    return record.pid_space != writer.pid_space and 0 not in (record.pid_space, writer.pid_space)


def _lives(record: InflightRecord, writer: Writer) -> bool:
    if _is_hidden(record, writer):
        return False
    if (record.pid, record.pid_start) == (writer.pid, writer.pid_start) or not record.pid_start:
        return False
    path = f"/proc/{record.pid}"
    try:
        return os.path.exists(path) and process_start(record.pid) == record.pid_start
    except OSError as error:
        raise storage_error(error, path, "look at") from error


def _complete(backend: PosixBackend, key: DecisionKey) -> ev.CommittedEpoch | None:
    """Commit the attempt if its prepared record is whole; None when it is not."""
    if not backend.exists("prepared", str(key)):
        return None
    try:
        with backend.reader("prepared", str(key)) as reader:
            manifest = ManifestReader(reader.read, reader.size, reader.path)
            manifest.verify_structure()
            for segment in manifest.segments:
                if backend.size("segments", segment.name) != segment.bytes:
                    return None
            header = manifest.header
    except (IntegrityError, FormatError, NotFound) as error:
        log.warning("the prepared record of %s is refused: %s", key, error)
        return None
    backend.sync_folder("segments", force=True)
    if not backend.commit_prepared(key):
        return None
    log.info("completed epoch %d, prepared by an earlier agent", key.epoch)
    return ev.CommittedEpoch(key, header.incarnation, header.content_id)


def _abort(backend: PosixBackend, key: DecisionKey, record: InflightRecord | None) -> bool:
    """Decide abort; False when a decision stands there already."""
    abort = AbortRecord(
        key=key,
        incarnation=record.incarnation if record is not None else 0,
        reason="its agent ended before the epoch was prepared",
        members=(),
        write_id=uuid.uuid4().hex,
        at=time.time(),
    )
    try:
        return backend.put_if_absent("epochs", str(key), encode_abort(abort))
    except GroupIOError as error:
        log.error("the abort of %s could not be decided: %s", key, error)
        raise
