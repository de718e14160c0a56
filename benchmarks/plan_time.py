"""Measures how long the plan of a group takes: ``python benchmarks/plan_time.py [--json FILE]``.

The input is what the controller gets: one list of chunks per node, duplicates inside a node merged.
Nothing else happens in the measured time: equal chunks are found over all nodes, copies are placed,
the flush is spread over the links, and every node's order is made. Prints JSON: per world the
median and the best of the runs in milliseconds, without a plan cache and with one that fits, for
one and for two copies. Half of each member's chunks are equal on all members of its data-parallel
group, half are its own.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from groupio.model import CHUNK_BYTES, ChunkTable, MemberTable, NodeLink, NodeReport
from groupio.plan.cache import PlanCache
from groupio.plan.copies import replica_shares
from groupio.plan.grouped import GroupPlan, plan_group

RANKS_PER_NODE = 8


class World(NamedTuple):
    """``members`` on nodes of eight; each has ``chunks``, of which ``shared`` are not its own.

    ``sharded``: every rank of a node shares other chunks with its peers on the other nodes (hybrid
    sharding), else all ranks have the same ones. ``longest`` None: whole chunks, else the lengths
    are random up to that. ``helpers`` more nodes have no members.
    """

    name: str
    members: int
    chunks: int
    shared: int
    sharded: bool
    longest: int | None
    helpers: int
    limit_ms: float


WORLDS = (
    World("64 x 2,000", 64, 2000, 1000, False, None, 0, 20),
    World("64 x 2,000, 8 helper nodes", 64, 2000, 1000, False, None, 8, 20),
    World("64 x 2,000, hybrid sharding", 64, 2000, 1000, True, None, 0, 20),
    World("1,024 x 1,000", 1024, 1000, 500, False, None, 0, 250),
    World("1,024 x 1,000, 16 helper nodes", 1024, 1000, 500, False, None, 16, 250),
    World("1,024 x 1,000, hybrid sharding", 1024, 1000, 500, True, None, 0, 250),
    World("64 x 20,000 items of 64 bytes, all their own", 64, 20000, 0, False, 64, 0, 200),
    World("64 x 20,000 items of up to 4 KiB", 64, 20000, 10000, False, 4096, 0, 200),
)


def make_reports(world: World) -> list[NodeReport]:
    """The nodes' reports: random digests in an order of their own."""
    rng = np.random.default_rng(1)

    def some(count: int) -> tuple[np.ndarray, np.ndarray]:
        digests = rng.integers(0, 256, (count, 32), dtype=np.uint8)
        if world.longest is None:
            return digests, np.full(count, CHUNK_BYTES, np.int64)
        low = 64 if world.longest == 64 else 1
        return digests, rng.integers(low, world.longest + 1, count)

    shared = some(world.shared * (RANKS_PER_NODE if world.sharded else 1))
    own = (world.chunks - world.shared) * RANKS_PER_NODE
    reports = []
    for node in range(world.members // RANKS_PER_NODE):
        mine = some(own)
        digests, lengths = (np.concatenate(parts) for parts in zip(shared, mine, strict=True))
        n = len(lengths)
        order = rng.permutation(n)
        members = tuple(
            MemberTable(
                rank=node * RANKS_PER_NODE + rank,
                items=(),
                items_id=rng.bytes(32),
                refs=rng.permutation(n)[: world.chunks],
                bytes_logical=int(lengths.sum()) // RANKS_PER_NODE + 1,
            )
            for rank in range(RANKS_PER_NODE)
        )
        table = ChunkTable(
            digests[order], lengths[order], np.full(n, -1, np.int32), np.zeros(n, np.int64)
        )
        reports.append(NodeReport(f"n{node}", (), table, members))
    return reports


def measure(world: World, runs: int) -> dict[str, Any]:
    """The plan times of one world."""
    reports = make_reports(world)
    rng = np.random.default_rng(2)
    nodes = [
        NodeLink(f"n{i}", float(rng.choice([1.0e9, 1.1e9, 1.25e9])), 1e10, f"rack-{i // 2}")
        for i in range(len(reports) + world.helpers)
    ]
    saved = {r.node: sum(m.bytes_logical for m in r.members) for r in reports}
    found: dict[str, Any] = {
        "members": world.members,
        "chunks_per_member": world.chunks,
        "nodes": len(reports),
        "helper_nodes": world.helpers,
        "rows": sum(len(r.chunks) for r in reports),
        "limit_ms": world.limit_ms,
    }
    for replicas in (1, 2):
        shares = replica_shares(saved, nodes, replicas)
        plan = functools.partial(plan_group, reports, nodes, replicas=replicas, shares=shares)
        cached = functools.partial(plan, cache=PlanCache(1))
        made = cached()
        found[f"copies_{replicas}"] = {
            "no_cache": timed(plan, runs),
            "cached": timed(cached, runs),
            "moved_bytes": made.moved_bytes,
            "replica_bytes": made.replica_bytes,
            "flush_s": made.makespan_s,
        }
    return found


def timed(call: Callable[[], GroupPlan], runs: int) -> dict[str, float]:
    """Milliseconds of ``runs`` calls after one that does not count.

    ``cpu_ms`` is the median of what the one thread used: the time on a machine that is idle
    otherwise.
    """
    call()
    times, used = [], []
    for _ in range(runs):
        started, worked = time.perf_counter(), time.process_time()
        call()
        times.append((time.perf_counter() - started) * 1000)
        used.append((time.process_time() - worked) * 1000)
    return {
        "median_ms": round(statistics.median(times), 2),
        "best_ms": round(min(times), 2),
        "cpu_ms": round(statistics.median(used), 2),
    }


def main() -> int:
    """Measure all worlds; exit code 1 when one copy without a cache takes too long in a median."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    worlds = {world.name: measure(world, args.runs) for world in WORLDS}
    reached = all(w["copies_1"]["no_cache"]["median_ms"] <= w["limit_ms"] for w in worlds.values())
    text = json.dumps(
        {
            "conditions": {
                "python": platform.python_version(),
                "numpy": np.__version__,
                "cpus": os.cpu_count(),
                "load_1min": round(os.getloadavg()[0], 2),
                "runs": args.runs,
            },
            "worlds": worlds,
            "within_limits": reached,
        },
        indent=1,
    )
    if args.json:
        args.json.write_text(text + "\n")
    print(text)
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
