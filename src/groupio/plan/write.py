"""Who writes which chunk, over which uplink.

The plan is made over *classes*: chunks with the same holders and the same exact length are one row
with a count. There are few classes whatever the number of chunks, and each is poured over the
links of its holders like water: first into the link that would finish first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from groupio.errors import InvalidInput
from groupio.plan.merge import Merged

ROUNDS_MAX = 8
"""Classes are poured again at most this often while that makes the plan faster."""


class Link(NamedTuple):
    """A path with a bandwidth: here the storage uplink of one node."""

    name: str
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class WriteClasses:
    """Chunks to write by what a plan can tell apart.

    Row ``c``: ``counts[c]`` (int64) chunks of exactly ``lengths[c]`` (int64) bytes, each held by
    the links ``holders[c]``. ``chunk_class`` int32[n] gives the row of each chunk, -1 for chunks
    that need no writing.
    """

    holders: tuple[tuple[int, ...], ...]
    lengths: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    chunk_class: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class WritePlan:
    """Row ``i``: link ``owners[i]`` (int32) writes ``counts[i]`` (int64) of class ``classes[i]``.

    ``classes`` is int32 and ascending. ``link_bytes`` int64[links] is what each link writes,
    ``makespan_s`` when the slowest is done.
    """

    classes: npt.NDArray[np.int32]
    owners: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int64]
    link_bytes: npt.NDArray[np.int64]
    makespan_s: float


def write_classes(merged: Merged, wanted: npt.NDArray[np.bool_] | None = None) -> WriteClasses:
    """The classes of the unique chunks where ``wanted`` (bool[n]; None: all) is set.

    The holders are report numbers of ``merged``: link ``r`` is the uplink of ``merged.nodes[r]``.
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


def plan_write(classes: WriteClasses, links: Sequence[Link]) -> WritePlan:
    """Split each class over the links of its holders so that the slowest link is done early.

    Classes with the fewest holders choose first, among those the longest chunks. Every chunk gets
    exactly one owner, which holds it. With the same holders throughout no link ends more than one
    chunk after the ideal. Raises InvalidInput for a link without a positive bandwidth and for a
    class without holders, with one that has no link or with one named twice.
    """
    speeds = np.array([link.bytes_per_s for link in links], np.float64)
    for link in links:
        if not (isfinite(link.bytes_per_s) and link.bytes_per_s > 0):
            raise InvalidInput(
                f"link {link.name!r} has a bandwidth of {link.bytes_per_s} bytes/s;"
                " it must be a positive number"
            )
    known = set(range(len(links)))
    for holders in classes.holders:
        if not holders or not set(holders) <= known or len(set(holders)) < len(holders):
            raise InvalidInput(
                f"chunks are held by links {holders}; that must be some of the links 0 to"
                f" {len(links) - 1}, each at most once"
            )
    holders_of = [np.array(holders, np.int64) for holders in classes.holders]
    order = sorted(
        range(len(holders_of)), key=lambda c: (len(holders_of[c]), -int(classes.lengths[c]), c)
    )
    split = [np.zeros(len(holders), np.int64) for holders in holders_of]
    poured = np.zeros(len(links), np.int64)
    best = list(split)
    best_s = np.inf
    for _ in range(ROUNDS_MAX):
        # In a later round a class finds the others where they ended up and makes room for those
        # that have no choice.
        for c in order:
            here, length = holders_of[c], int(classes.lengths[c])
            poured[here] -= split[c] * length
            split[c] = _pour(
                int(classes.counts[c]), length / speeds[here], poured[here] / speeds[here]
            )
            poured[here] += split[c] * length
        makespan = float(np.max(poured / speeds, initial=0.0))
        if makespan >= best_s:
            break
        best, best_s = list(split), makespan
    return _as_plan(classes, holders_of, best, speeds)


def assign(classes: WriteClasses, plan: WritePlan) -> npt.NDArray[np.int32]:
    """The owner of each chunk, int32[n]; -1 for chunks that need no writing.

    Chunks of a class go to its owners in runs, so that neighbours stay neighbours in a segment.
    """
    owners = np.full(len(classes.chunk_class), -1, np.int32)
    order = np.argsort(classes.chunk_class, kind="stable")
    skipped = int(np.count_nonzero(classes.chunk_class < 0))
    owners[order[skipped:]] = np.repeat(plan.owners, plan.counts)
    return owners


def _pour(
    count: int, seconds: npt.NDArray[np.float64], loads: npt.NDArray[np.float64]
) -> npt.NDArray[np.int64]:
    """How many of ``count`` equal chunks each link takes.

    ``seconds`` is what one chunk costs on each link, ``loads`` when each would be free.
    """
    # Only differences matter; without the common part they keep their precision.
    loads = loads - loads.min()
    order = np.argsort(loads, kind="stable")
    rate = np.cumsum(1 / seconds[order])
    level = (count + np.cumsum(loads[order] / seconds[order])) / rate
    # The water stands at the lowest of these levels: a link that starts above it stays dry.
    wanted = np.floor(np.maximum(level.min() - loads, 0) / seconds)
    # Rounding of huge loads must not hand out more than there is.
    handed = np.minimum(np.cumsum(wanted), count).astype(np.int64)
    taken: npt.NDArray[np.int64] = np.diff(handed, prepend=np.int64(0))
    while left := count - int(taken.sum()):
        soonest = np.argsort(loads + (taken + 1) * seconds, kind="stable")[:left]
        taken[soonest] += 1
    return taken


def _as_plan(
    classes: WriteClasses,
    holders_of: Sequence[npt.NDArray[np.int64]],
    split: Sequence[npt.NDArray[np.int64]],
    speeds: npt.NDArray[np.float64],
) -> WritePlan:
    none = np.empty(0, np.int64)
    rows = np.repeat(np.arange(len(split)), [len(taken) for taken in split])
    owners = np.concatenate([none, *holders_of])
    counts = np.concatenate([none, *split])
    used = counts > 0
    rows, owners, counts = rows[used], owners[used], counts[used]
    link_bytes = np.zeros(len(speeds), np.int64)
    np.add.at(link_bytes, owners, counts * classes.lengths[rows])
    return WritePlan(
        classes=rows.astype(np.int32),
        owners=owners.astype(np.int32),
        counts=counts,
        link_bytes=link_bytes,
        makespan_s=float(np.max(link_bytes / speeds, initial=0.0)),
    )
