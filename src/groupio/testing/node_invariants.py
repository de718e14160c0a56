"""The invariants that need several nodes, memory or time, as pure functions over what was seen.

They go on with the list of :mod:`groupio.testing.invariants`; the simulator asks them all the time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from groupio.model import DecisionKey, NodeReport
from groupio.testing.invariants import Violation

if TYPE_CHECKING:
    from groupio.plan.orders import Fetch, NodeOrder

Orders = Mapping[str, "NodeOrder"]

# -- 2: what a level promises when it is told ------------------------------------------------------


def check_staged(key: DecisionKey, copied: Mapping[int, bool]) -> list[Violation]:
    """2: STAGED is told when every rank (with whether it has) has copied its items."""
    return [
        Violation(2, f"STAGED is told, and rank {rank} has not copied", key)
        for rank, done in sorted(copied.items())
        if not done
    ]


def check_replicated(
    key: DecisionKey,
    wanted: Mapping[int, Iterable[bytes]],
    domains: Mapping[bytes, Set[str]],
    replicas: int,
) -> list[Violation]:
    """2: REPLICATED is told when each chunk is in memory in ``replicas`` failure domains.

    ``wanted`` are digests by rank, ``domains`` where live nodes hold each of them.
    """
    found = []
    for rank, names in sorted(wanted.items()):
        for name in names:
            have = len(domains.get(name, ()))
            if have < replicas:
                detail = f"REPLICATED is told, a chunk of rank {rank} is in {have} of {replicas}"
                found.append(Violation(2, f"{detail} domains", key, chunk=name.hex()))
    return found


# -- 4: plans --------------------------------------------------------------------------------------


def check_plan(
    reports: Sequence[NodeReport],
    orders: Orders,
    *,
    lost: Collection[str] = (),
    done: Sequence[NodeReport] = (),
    copies: Mapping[str, Any] | None = None,
    earlier: Sequence[Orders] = (),
) -> list[Violation]:
    """4: a plan, new or reused, fits the digests of this very epoch.

    Every chunk that is not durable or on its way is written once, by a node that has it or gets
    it from one that has it. Arguments as for :func:`groupio.plan.grouped.plan_group`.
    """
    tables = {report.node: _digests(report.chunks.digests) for report in reports}
    stored = {name for report in reports for name in _stored(report, report.node in lost)}
    stored.update(name for report in done for name in _stored(report, False))
    holds = {node: set(names) for node, names in tables.items()}
    for node, table in (copies or {}).items():
        holds.setdefault(node, set()).update(_digests(table))
    under_way: Counter[bytes] = Counter()
    for one in earlier:
        alive = {node: order for node, order in one.items() if node not in lost}
        under_way += _writes(alive, tables, lost)
        _keep(alive, holds, lost)
    _keep(orders, holds)
    found = []
    for node, order in sorted(orders.items()):
        if node in lost:
            found.append(Violation(4, f"node {node} is lost and gets an order"))
        for fetch in order.fetch:
            gone = set(_digests(fetch.digests)) - holds.get(fetch.source, set())
            if gone or fetch.source in lost:
                detail = f"{node} is to get {len(fetch.digests)} chunks from {fetch.source}"
                found.append(Violation(4, f"{detail}, which lacks {len(gone)} of them"))
    writes = _writes(orders, tables)
    for name, times in writes.items():
        if times > 1 or name in stored or name in under_way:
            before = "durable" if name in stored else "on its way" if name in under_way else "new"
            detail = f"a chunk that is {before} is to be written {times} times"
            found.append(Violation(4, detail, chunk=name.hex()))
    wanted = {name for names in tables.values() for name in names}
    for name in sorted(wanted - stored - writes.keys() - under_way.keys()):
        found.append(Violation(4, "nobody is to write a chunk", chunk=name.hex()))
    return found


def _digests(table: Any) -> list[bytes]:
    data = table.tobytes()
    return [data[at : at + 32] for at in range(0, len(data), 32)]


def _stored(report: NodeReport, lost: bool) -> list[bytes]:
    """The chunks of a report that are in segments; own ones of a lost node may be unfinished."""
    names = _digests(report.chunks.digests)
    numbers = report.chunks.segments.tolist()
    fine = [not (lost and ref.own) for ref in report.segments]
    return [name for name, i in zip(names, numbers, strict=True) if i >= 0 and fine[i]]


def _writes(
    orders: Orders, tables: Mapping[str, Sequence[bytes]], lost: Collection[str] = ()
) -> Counter[bytes]:
    counts: Counter[bytes] = Counter()
    for node, order in orders.items():
        counts.update(tables[node][row] for row in order.write.tolist())
        for fetch in _possible(order, lost):
            names = _digests(fetch.digests)
            counts.update(n for n, w in zip(names, fetch.write.tolist(), strict=True) if w)
    return counts


def _possible(order: NodeOrder, lost: Collection[str]) -> list[Fetch]:
    """What is to be got from a node that is not lost."""
    return [f for f in order.fetch if not {f.source, *f.others} <= set(lost)]


def _keep(orders: Orders, holds: dict[str, set[bytes]], lost: Collection[str] = ()) -> None:
    for node, order in orders.items():
        for fetch in _possible(order, lost):
            names = _digests(fetch.digests)
            kept = (n for n, k in zip(names, fetch.keep.tolist(), strict=True) if k)
            holds.setdefault(node, set()).update(kept)


# -- 9: what is deleted ----------------------------------------------------------------------------


def check_gc_safe(
    deleted: Iterable[str], needed: Mapping[DecisionKey, Collection[str]]
) -> list[Violation]:
    """9: no segment is deleted that a committed, pinned or in-flight epoch refers to.

    ``needed`` are the names of segments by epoch, at the moment of the deletion.
    """
    return [
        Violation(9, "a segment is deleted that the epoch refers to", key, name)
        for name in deleted
        for key, names in sorted(needed.items())
        if name in names
    ]


# -- 12: memory that others write to ---------------------------------------------------------------


class Arena(StrEnum):
    """What may happen to an extent of an arena."""

    GRANTED = "granted"
    """A writer may write there from now on."""
    COPIED = "copied"
    """The writer acknowledged that it has written all and will not again."""
    STOPPED = "stopped"
    """The writer acknowledged that it writes nowhere any more, or its process is gone."""


@dataclass(frozen=True, slots=True)
class ArenaStep:
    """One thing that an agent did or learned, in its order; places are in bytes."""

    what: Arena
    writer: tuple[str, int]
    """The client and its save."""
    arena: int = 0
    offset: int = 0
    length: int = 0


def check_arena_fence(steps: Iterable[ArenaStep]) -> list[Violation]:
    """12: an extent is granted again only after its writer acknowledged, or its process is gone."""
    writing: dict[tuple[int, int], tuple[int, tuple[str, int]]] = {}
    found = []
    for step in steps:
        if step.what is Arena.GRANTED:
            end = step.offset + step.length
            for (arena, offset), (length, writer) in writing.items():
                if arena == step.arena and offset < end and step.offset < offset + length:
                    detail = f"{step.writer} gets bytes {step.offset} to {end} of arena {arena}"
                    found.append(Violation(12, f"{detail}, to which {writer} may still write"))
            writing[step.arena, step.offset] = (step.length, step.writer)
        elif step.what is Arena.COPIED:
            writing.pop((step.arena, step.offset), None)
        else:
            for place in [p for p, (_, writer) in writing.items() if writer == step.writer]:
                del writing[place]
    return found


# -- 13: an end for everything ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fate:
    """How long one member has waited for the end of one epoch, in seconds."""

    member: str
    epoch: int
    told: bool
    """It was told DURABLE, or a typed error; or there is nobody left to tell."""
    waited_s: float


def check_live(fates: Iterable[Fate], bound_s: float) -> list[Violation]:
    """13: when faults stop, every member is told how its epoch ended within ``bound_s``."""
    return [
        Violation(13, f"{fate.member} was never told of epoch {fate.epoch}, {fate.waited_s:.0f} s")
        for fate in fates
        if not fate.told and fate.waited_s >= bound_s
    ]
