"""Random worlds for the flush plan, and what must hold of any plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest

from groupio.model import NodeLink
from groupio.plan.write import FlushPlan, WriteClasses, assign_flush

CHUNK = 1 << 22
RATES = (1e8, 5e8, 1e9, 2.5e9, 12.5e9)  # bytes/s

Row = tuple[tuple[int, ...], int, int]


class World(NamedTuple):
    classes: WriteClasses
    nodes: list[NodeLink]
    backend_bytes_per_s: float | None


def classes_of(rows: Sequence[Row]) -> WriteClasses:
    """Classes from (holders, length, count)."""
    counts = np.array([count for _, _, count in rows], np.int64)
    return WriteClasses(
        holders=tuple(holders for holders, _, _ in rows),
        lengths=np.array([length for _, length, _ in rows], np.int64),
        counts=counts,
        chunk_class=np.repeat(np.arange(len(rows)), counts).astype(np.int32),
    )


def node(i: int, uplink: float = 1e9, fabric: float = 1e10, *, ok: bool = True) -> NodeLink:
    return NodeLink(f"n{i}", uplink, fabric, f"n{i}", ok)


def random_world(seed: int) -> World:
    """1 to 8 nodes of which some only help, 1 to 11 classes, a few or thousands of chunks."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 9))
    wide = rng.random() < 0.3

    def rate() -> float:
        return float(10 ** rng.uniform(6, 11)) if wide else float(rng.choice(RATES))

    alike = rng.random() < 0.3
    uplink, fabric = rate(), rate()
    nodes = [
        node(
            i,
            uplink if alike else rate(),
            fabric if alike else rate(),
            ok=bool(rng.random() < 0.9),
        )
        for i in range(n)
    ]
    holding = int(rng.integers(1, n + 1))
    many = int(rng.choice([3, 90, 9000]))
    sizes = int(rng.integers(3))
    rows: dict[tuple[tuple[int, ...], int], int] = {}
    for _ in range(int(rng.integers(1, 12))):
        copies = int(rng.integers(1, holding + 1)) if rng.random() < 0.6 else 1
        holders = tuple(sorted(rng.choice(holding, copies, replace=False).tolist()))
        if sizes == 0:
            length = CHUNK
        elif sizes == 1:
            length = int(2 ** rng.uniform(0, 22))
        else:
            length = int(rng.choice([CHUNK, CHUNK // 2, rng.integers(1, CHUNK)]))
        rows[holders, length] = rows.get((holders, length), 0) + int(rng.integers(1, many))
    backend = float(rng.choice([1e9, 1e10])) if rng.random() < 0.2 else None
    return World(classes_of([(*key, count) for key, count in rows.items()]), nodes, backend)


class Links(NamedTuple):
    """Bytes, chunks and bytes per second: rows uplinks, egress, ingress; a column a node."""

    nbytes: np.ndarray
    chunks: np.ndarray
    rates: np.ndarray

    def slowest_used(self) -> float:
        return float(self.rates[self.chunks > 0].min())


def check(world: World, plan: FlushPlan) -> Links:
    """Every chunk once, from a holder, over ports that may be used, and the sums are right."""
    classes, nodes, backend = world
    n = len(nodes)
    nbytes, chunks = np.zeros((3, n), np.int64), np.zeros((3, n), np.int64)
    given_out = np.zeros(len(classes.counts), np.int64)
    columns = (plan.classes, plan.sources, plan.writers, plan.counts)
    for c, source, writer, count in zip(*(column.tolist() for column in columns), strict=True):
        assert count > 0
        assert source in classes.holders[c]
        given_out[c] += count
        used = [(0, writer)]
        if source != writer:
            assert nodes[source].fabric_ok
            assert nodes[writer].fabric_ok
            used += [(1, source), (2, writer)]
        for link in used:
            nbytes[link] += count * int(classes.lengths[c])
            chunks[link] += count
    assert given_out.tolist() == classes.counts.tolist()
    assert plan.uplink_bytes.tolist() == nbytes[0].tolist()
    assert plan.egress_bytes.tolist() == nbytes[1].tolist()
    assert plan.ingress_bytes.tolist() == nbytes[2].tolist()
    rates = np.array(
        [
            [node.uplink_bytes_per_s for node in nodes],
            *[[node.fabric_bytes_per_s for node in nodes]] * 2,
        ]
    ).reshape(3, n)
    total = int((classes.lengths * classes.counts).sum())
    links_s = float((nbytes[nbytes > 0] / rates[nbytes > 0]).max(initial=0))
    makespan = max(links_s, total / backend if backend else 0.0)
    assert plan.makespan_s == pytest.approx(makespan, rel=1e-9)
    assert plan.bound_s <= plan.makespan_s * (1 + 1e-9)
    assert (np.diff(plan.classes) >= 0).all()
    sources, writers = assign_flush(classes, plan)
    wanted = classes.chunk_class >= 0
    assert ((sources >= 0) == wanted).all()
    assert ((writers >= 0) == wanted).all()

    def number(c: np.ndarray, source: np.ndarray, writer: np.ndarray) -> np.ndarray:
        return (c.astype(np.int64) * n + source) * n + writer

    width = len(classes.counts) * n * n
    per_row = np.zeros(width, np.int64)
    per_row[number(*columns[:3])] = plan.counts
    per_chunk = number(classes.chunk_class[wanted], sources[wanted], writers[wanted])
    assert (np.bincount(per_chunk, minlength=width) == per_row).all()
    return Links(nbytes, chunks, rates)
