"""A store as the protocol sees it: records that are created if absent, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from groupio.errors import Outcome, StorageError, StorageFull
from groupio.model import DecisionKey, Lineage
from groupio.protocol import effects as fx
from groupio.protocol import events as ev


@dataclass(frozen=True)
class Record:
    """What stands under a decision key."""

    commit: bool
    content: bytes
    incarnation: int
    ours: bool
    """False: another controller made it, without our prepared record."""


@dataclass
class ModelStore:
    """Executes store effects one at a time; ``fault`` says what goes wrong with the next one.

    "before": an error, nothing was done; "after": done, but the answer is an error; "full": there
    is no room; "stranger": another controller decides first, and completes what is prepared;
    "stranger-abort": another controller aborts first.
    """

    fault: Callable[[Any], str] = lambda effect: ""
    node_local: bool = True
    records: dict[DecisionKey, Record] = field(default_factory=dict)
    prepared: dict[DecisionKey, Record] = field(default_factory=dict)
    inflight: dict[DecisionKey, int] = field(default_factory=dict)
    announced: dict[DecisionKey, fx.PublishInflight] = field(default_factory=dict)
    lineages: dict[int, Lineage] = field(default_factory=dict)
    dropped: set[DecisionKey] = field(default_factory=set)
    """Attempts whose segments were deleted to make room for their abort records."""
    decided: list[tuple[DecisionKey, bool]] = field(default_factory=list)
    """All decisions in the order in which they were made."""

    def execute(self, effect: fx.Effect) -> Any:
        """The answer to a store effect, as an event."""
        fault = self.fault(effect)
        if fault.startswith("stranger"):
            self._stranger(effect, complete=fault == "stranger")
        if fault == "full" and isinstance(effect, fx.Decide) and effect.drop_segments_if_full:
            self.dropped.add(effect.key)
        elif fault in ("before", "full"):
            return self._failed(effect, StorageFull if fault == "full" else StorageError)
        answer = self._do(effect)
        return self._failed(effect, StorageError) if fault == "after" else answer

    def _failed(self, effect: fx.Effect, kind: type[StorageError | StorageFull]) -> Any:
        error = kind("the disk does not answer", path="/store")
        match effect:
            case fx.OpenStore():
                return ev.StoreUnavailable(error)
            case fx.CreateLineage():
                return ev.LineageCreated(None, error)
            case fx.PublishInflight(group=group):
                return ev.InflightPublished(group, error)
            case fx.PrepareEpoch(group=group):
                return ev.Prepared(group, error=error)
            case fx.CompareEpoch(group=group):
                return ev.Compared(group, False, error)
            case fx.Decide(group=group):
                return ev.Decided(group, False, False, error)
        return None

    def _do(self, effect: fx.Effect) -> Any:
        match effect:
            case fx.OpenStore(held=held, resume=resume):
                return ev.StoreOpened(self._recover(set(held), resume=resume))
            case fx.CreateLineage(lineage=line):
                if line.number in self.lineages:
                    return self._failed(effect, StorageError)
                self.lineages[line.number] = line
                return ev.LineageCreated(line)
            case fx.PublishInflight(group=group, key=key):
                self._check_attempt(key)
                self.inflight[key] = effect.incarnation
                self.announced[key] = effect
                return ev.InflightPublished(group)
            case fx.PrepareEpoch(group=group, key=key):
                content = content_of(effect.reports)
                self.prepared[key] = Record(True, content, effect.incarnation, True)
                return ev.Prepared(group, content)
            case fx.CompareEpoch(group=group, key=key):
                equal = content_of(effect.reports) == self.records[key].content
                return ev.Compared(group, equal)
            case fx.Decide(group=group, key=key):
                record = self._decide(effect)
                mine = record.commit == effect.commit and record.ours
                return ev.Decided(group, record.commit, mine)
            case fx.ForgetInflight(key=key):
                assert key in self.records or key not in self.prepared
                self.inflight.pop(key, None)
        return None

    def _decide(self, effect: fx.Decide) -> Record:
        key = effect.key
        abort = Record(False, b"", effect.incarnation, True)
        if key in self.records or not effect.commit:
            return self._create(key, abort)
        return self._create(key, self.prepared[key])

    def _create(self, key: DecisionKey, new: Record) -> Record:
        self._check_attempt(key)
        if key not in self.records:
            assert not (new.commit and key in self.dropped), f"{key} has no segments any more"
            self.records[key] = new
            self.decided.append((key, new.commit))
        self.prepared.pop(key, None)
        return self.records[key]

    def _check_attempt(self, key: DecisionKey) -> None:
        for attempt in range(1, key.attempt):
            earlier = self.records.get(DecisionKey(key.lineage, key.epoch, attempt))
            assert earlier is not None, f"{key} exists before attempt {attempt} is decided"
            assert not earlier.commit, f"{key} exists after attempt {attempt} is committed"

    def _stranger(self, effect: fx.Effect, *, complete: bool) -> None:
        """Another controller looks after what it takes for abandoned."""
        assert isinstance(effect, fx.Decide)
        found = self.prepared.get(effect.key) if complete else None
        self._create(effect.key, found or Record(False, b"", 0, False))

    def _recover(self, held: set[DecisionKey], *, resume: bool) -> ev.StoreState:
        undecided = []
        for key in sorted(set(self.inflight) | set(self.prepared)):
            if key in held:
                continue
            if resume and key not in self.prepared and key not in self.records:
                made = self.announced[key]
                undecided.append(
                    ev.UndecidedAttempt(key, made.incarnation, made.world_size, made.nodes)
                )
            else:
                incarnation = self.inflight.get(key, 0)
                self._create(key, self.prepared.get(key) or Record(False, b"", incarnation, False))
                self.inflight.pop(key, None)
        known = [*self.inflight.values(), *(r.incarnation for r in self.records.values())]
        return ev.StoreState(
            job="job",
            lineages=tuple(self.lineages.values()),
            committed=tuple(
                ev.CommittedEpoch(key, r.incarnation, r.content)
                for key, r in self.records.items()
                if r.commit
            ),
            aborted=tuple(key for key, r in self.records.items() if not r.commit),
            incarnation=max(known, default=0),
            node_local=self.node_local,
            undecided=tuple(undecided),
        )

    def check_told(self, key: DecisionKey, outcome: Outcome) -> None:
        """What a member was told of its attempt is not contradicted by the store."""
        record = self.records.get(key)
        if outcome is Outcome.NOT_COMMITTED:
            assert record is None or not record.commit, f"{key} stands, but was told lost"
        elif outcome is Outcome.COMMITTED:
            assert record is not None, f"{key} does not stand, but was told committed"
            assert record.commit, f"{key} is aborted, but was told committed"


def content_of(reports: tuple[Any, ...]) -> bytes:
    """Content of a group: what all its members saved."""
    members = {m.rank: m.items_id for report in reports for m in report.members}
    return repr(sorted(members.items())).encode()
