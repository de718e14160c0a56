"""Plans a flush: the writer and uplink of each chunk, and what moves over the fabric for that.

The plan is made over *classes*: chunks with the same holders and the same exact length are one row
with a count. There are few classes whatever the number of chunks. First the best flush of
splittable bytes is found (:mod:`groupio.plan.moves`), then it is made one of whole chunks
(:mod:`groupio.plan.whole`, :mod:`groupio.plan.improve`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite

import numpy as np
import numpy.typing as npt

from groupio.errors import InvalidInput
from groupio.model import NodeLink
from groupio.plan.improve import Loads, improved
from groupio.plan.merge import Merged
from groupio.plan.moves import Floats, Fluid, best_local, best_moved
from groupio.plan.ordering import stable_order
from groupio.plan.whole import Rows, whole_chunks

GOOD_ENOUGH = 1.01
"""A makespan within this factor of the bound is not worth a search for a shorter one."""


@dataclass(frozen=True, slots=True)
class WriteClasses:
    """Chunks to write by what a plan can tell apart.

    Row ``c``: ``counts[c]`` (int64) chunks of exactly ``lengths[c]`` (int64) bytes, each held by
    the nodes ``holders[c]``. ``chunk_class`` int32[n] gives the row of each chunk, -1 for chunks
    that need no writing.
    """

    holders: tuple[tuple[int, ...], ...]
    lengths: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    chunk_class: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class FlushPlan:
    """Row ``i``: ``counts[i]`` (int64) chunks of class ``classes[i]`` (int32, ascending) go from
    the memory of node ``sources[i]`` (int32), a holder, over the uplink of node ``writers[i]``
    (int32). Where the two differ the chunks move over the fabric in between.

    ``uplink_bytes``, ``egress_bytes`` and ``ingress_bytes`` (int64[nodes]) are what the links
    carry. ``makespan_s`` is when the slowest link (the backend in sum is one) is done. ``bound_s``
    is when it could be if chunks could be split: no plan ends earlier.
    """

    classes: npt.NDArray[np.int32]
    sources: npt.NDArray[np.int32]
    writers: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int64]
    uplink_bytes: npt.NDArray[np.int64]
    egress_bytes: npt.NDArray[np.int64]
    ingress_bytes: npt.NDArray[np.int64]
    makespan_s: float
    bound_s: float


def write_classes(merged: Merged, wanted: npt.NDArray[np.bool_] | None = None) -> WriteClasses:
    """The classes of the unique chunks where ``wanted`` (bool[n]; None: all) is set.

    The holders are report numbers of ``merged``: number ``r`` is node ``merged.nodes[r]``.
    """
    n = len(merged.lengths)
    picked = np.arange(n) if wanted is None else np.flatnonzero(wanted)
    sets = merged.holder_set[picked].astype(np.int64)
    lengths, length_number = np.unique(merged.lengths[picked], return_inverse=True)
    pairs = sets * len(lengths) + length_number
    kinds, row, counts = np.unique(pairs, return_inverse=True, return_counts=True)
    chunk_class = np.full(n, -1, np.int32)
    chunk_class[picked] = row
    width = max(len(lengths), 1)
    return WriteClasses(
        holders=tuple(merged.holder_sets[s] for s in (kinds // width).tolist()),
        lengths=lengths[kinds % width],
        counts=counts.astype(np.int64),
        chunk_class=chunk_class,
    )


def plan_flush(
    classes: WriteClasses,
    nodes: Sequence[NodeLink],
    *,
    backend_bytes_per_s: float | None = None,
) -> FlushPlan:
    """Spread the chunks over the uplinks of all ``nodes`` so that the last link is done early.

    ``classes.holders`` index ``nodes``; nodes that hold nothing may be among them. Chunks move
    only if that makes the flush shorter, and then as few bytes as that takes. A fabric port sends
    and receives ``fabric_bytes_per_s`` each at the same time; nodes without ``fabric_ok`` do
    neither. ``backend_bytes_per_s`` None: the store takes all that the uplinks bring.

    The makespan is at most ``bound_s`` and the time of one largest chunk on the slowest link that
    is used, unless the bound needs links on which a single chunk takes longer than that.

    Raises InvalidInput for a link without a positive bandwidth, for a class without holders, with
    one that is no node or with one named twice, and for chunks without bytes.
    """
    _check(classes, nodes, backend_bytes_per_s)
    task = _Task.of(classes, nodes, backend_bytes_per_s)
    rows, bound_s = _rows(task)
    loads = Loads(rows, task.lengths, task.uplinks, task.ports)
    return FlushPlan(
        classes=rows.classes.astype(np.int32),
        sources=rows.sources.astype(np.int32),
        writers=rows.writers.astype(np.int32),
        counts=rows.counts,
        uplink_bytes=loads.bytes[0],
        egress_bytes=loads.bytes[1],
        ingress_bytes=loads.bytes[2],
        makespan_s=max(loads.seconds(), task.backend_s),
        bound_s=bound_s,
    )


def assign_flush(
    classes: WriteClasses, plan: FlushPlan
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """The source and the writer of each chunk, int32[n] both; -1 for chunks not to be written.

    Chunks of a class go to its rows in runs, so that neighbours stay neighbours in a segment.
    """
    sources = np.full(len(classes.chunk_class), -1, np.int32)
    writers = sources.copy()
    order = stable_order(classes.chunk_class)
    order = order[int(np.count_nonzero(classes.chunk_class < 0)) :]
    sources[order] = np.repeat(plan.sources, plan.counts)
    writers[order] = np.repeat(plan.writers, plan.counts)
    return sources, writers


def _check(
    classes: WriteClasses, nodes: Sequence[NodeLink], backend_bytes_per_s: float | None
) -> None:
    rates = [(f"the uplink of node {node.node!r}", node.uplink_bytes_per_s) for node in nodes]
    rates += [
        (f"the fabric port of node {node.node!r}", node.fabric_bytes_per_s)
        for node in nodes
        if node.fabric_ok
    ]
    if backend_bytes_per_s is not None:
        rates.append(("the backend", backend_bytes_per_s))
    for name, rate in rates:
        if not (isfinite(rate) and rate > 0):
            raise InvalidInput(
                f"{name} has a bandwidth of {rate} bytes/s; it must be a positive number"
            )
    if int(classes.lengths.min(initial=1)) < 1:
        raise InvalidInput(f"chunks of {int(classes.lengths.min())} bytes cannot be planned")


def _holder_sets(
    classes: WriteClasses, n: int
) -> tuple[list[tuple[int, ...]], npt.NDArray[np.int64]]:
    """The different holder sets, and which one each class has (int64); there are ``n`` nodes."""
    # Most classes share the very same tuple: comparing those would hash long tuples over and over.
    ids = np.fromiter(map(id, classes.holders), np.int64, len(classes.holders))
    _, example, which = np.unique(ids, return_index=True, return_inverse=True)
    numbers: dict[tuple[int, ...], int] = {}
    of_id = np.empty(len(example), np.int64)
    for i in np.argsort(example).tolist():  # by first appearance, whatever the ids are
        of_id[i] = numbers.setdefault(classes.holders[example[i]], len(numbers))
    for holders in numbers:
        if not holders or not set(holders) <= set(range(n)) or len(set(holders)) < len(holders):
            raise InvalidInput(
                f"chunks are held by nodes {holders}; that must be some of the nodes 0 to"
                f" {n - 1}, each at most once"
            )
    return list(numbers), of_id[which]


@dataclass(frozen=True, slots=True)
class _Task:
    """What is to be written, over what: ``backend_s`` is the time that the store alone needs."""

    sets: list[tuple[int, ...]]
    set_of: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    uplinks: Floats
    ports: Floats
    backend_s: float

    @classmethod
    def of(
        cls, classes: WriteClasses, nodes: Sequence[NodeLink], backend_bytes_per_s: float | None
    ) -> _Task:
        sets, set_of = _holder_sets(classes, len(nodes))
        total = float((classes.lengths * classes.counts).sum())
        return cls(
            sets=sets,
            set_of=set_of,
            lengths=classes.lengths,
            counts=classes.counts,
            uplinks=np.array([node.uplink_bytes_per_s for node in nodes], np.float64),
            ports=np.array(
                [node.fabric_bytes_per_s if node.fabric_ok else 0.0 for node in nodes], np.float64
            ),
            backend_s=total / (backend_bytes_per_s or inf),
        )

    def whole(self, fluid: Fluid, ports: Floats, enough_s: float) -> Rows:
        rows = whole_chunks(
            self.sets, self.set_of, self.lengths, self.counts, fluid, self.uplinks, ports
        )
        return self.improved(rows, ports, max(fluid.seconds, self.backend_s), enough_s)

    def improved(self, rows: Rows, ports: Floats, bound_s: float, enough_s: float) -> Rows:
        def holders(c: int) -> tuple[int, ...]:
            return self.sets[int(self.set_of[c])]

        return improved(rows, holders, self.lengths, self.uplinks, ports, bound_s, enough_s)

    def seconds(self, rows: Rows) -> float:
        return Loads(rows, self.lengths, self.uplinks, self.ports).seconds()


def _rows(task: _Task) -> tuple[Rows, float]:
    """The plan's rows, by class, and its bound in seconds."""
    still = np.zeros(len(task.uplinks))
    nbytes = np.zeros(len(task.sets), np.int64)
    np.add.at(nbytes, task.set_of, task.counts * task.lengths)
    local = best_local(task.sets, nbytes.tolist(), task.uplinks)
    local_s = max(local.seconds, task.backend_s)
    if local_s == task.backend_s or np.count_nonzero(task.ports) < 2:
        return task.whole(local, still, GOOD_ENOUGH * local_s), local_s
    moved = best_moved(task.sets, nbytes.tolist(), task.uplinks, task.ports, task.backend_s)
    if not moved.exports.any():
        return task.whole(local, still, GOOD_ENOUGH * local_s), local_s
    bound_s = moved.seconds
    # Where moves gain little the plan has to be near the bound, or it gains nothing.
    rows = task.whole(moved, task.ports, min(GOOD_ENOUGH * bound_s, (bound_s + local_s) / 2))
    if task.seconds(rows) >= local_s * (1 - 1e-9):
        there = task.whole(local, still, GOOD_ENOUGH * local_s)
        if task.seconds(there) <= task.seconds(rows) * (1 + 1e-9):
            # Near the bound without moves may still be too far from the one with moves.
            rows = task.improved(there, task.ports, bound_s, inf)
    return rows, bound_s
