"""Over random worlds the flush plan ends as early as a linear program allows, or nearly so."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from flush_worlds import CHUNK, World, check, classes_of, node, random_world
from lp import best_whole_seconds, least_moved_bytes, least_seconds

from groupio.plan.write import plan_flush

WORLDS = 130  # in each of the parts that run side by side
PARTS = 8


@pytest.mark.parametrize("part", range(PARTS))
def test_near_the_linear_program(part: int) -> None:
    """At most one largest chunk on the slowest used link over what no plan can beat.

    Where that is not so, no plan of whole chunks is better: then the program splits chunks over
    links on which one whole chunk would take longer than the whole flush.
    """
    seen: Counter[str] = Counter()
    for seed in range(part * WORLDS, (part + 1) * WORLDS):
        world = random_world(seed)
        plan = plan_flush(world.classes, world.nodes, backend_bytes_per_s=world.backend_bytes_per_s)
        links = check(world, plan)
        least = least_seconds(*world)
        assert plan.bound_s == pytest.approx(least, rel=1e-6), seed
        one_chunk = int(world.classes.lengths.max()) / links.slowest_used()
        if plan.makespan_s > (least + one_chunk) * (1 + 1e-9):
            seen["best of whole chunks"] += 1
            assert plan.makespan_s <= best_whole_seconds(*world) * (1 + 1e-6), seed
        if links.chunks[links.chunks > 0].min() >= 40:
            seen["40 chunks on each link"] += 1
            assert plan.makespan_s <= 1.05 * least, seed
        seen["moves"] += bool(plan.egress_bytes.any())
    assert seen["best of whole chunks"] <= 2
    assert seen["40 chunks on each link"] >= WORLDS // 4
    assert seen["moves"] >= WORLDS // 3


def test_one_chunk_over_the_program_may_be_out_of_reach() -> None:
    """The program spreads a chunk over links too slow for a whole one; the best plan uses none."""
    uplinks = (5e8, 1e9, 5e8, 1.25e10, 2.5e9, 2.5e9, 5e8, 2.5e9)
    ports = (1e8, 1e9, 1e9, 5e8, 1.25e10, 1e9, 2.5e9, 2.5e9)
    nodes = [node(i, *rates) for i, rates in enumerate(zip(uplinks, ports, strict=True))]
    rows = [
        ((1, 3), CHUNK, 1),
        ((0, 2, 3), CHUNK // 2, 1),
        ((3,), CHUNK, 2),
        ((3,), 1541315, 1),
    ]
    world = World(classes_of(rows), nodes, None)
    plan = plan_flush(world.classes, nodes)
    links = check(world, plan)
    assert plan.makespan_s > least_seconds(*world) + CHUNK / links.slowest_used()
    assert plan.makespan_s == pytest.approx(best_whole_seconds(*world), rel=1e-6)


@pytest.mark.parametrize("part", range(2))
def test_nothing_moves_for_nothing(part: int) -> None:
    moving = 0
    for seed in range(10_000 + part * 100, 10_100 + part * 100):
        world = random_world(seed)
        plan = plan_flush(world.classes, world.nodes)
        if not plan.egress_bytes.any():
            continue
        moving += 1
        apart = [msgspec.structs.replace(node, fabric_ok=False) for node in world.nodes]
        assert plan.makespan_s < plan_flush(world.classes, apart).makespan_s, seed
        # No chunk that moves could be written by one of its holders as early.
        uplinks = np.array([node.uplink_bytes_per_s for node in world.nodes])
        spare = plan.makespan_s * (1 - 1e-9) * uplinks - plan.uplink_bytes
        for c in plan.classes[plan.sources != plan.writers].tolist():
            assert (spare[list(world.classes.holders[c])] < world.classes.lengths[c]).all(), seed
        longest = int(world.classes.lengths.max())
        slack = longest * np.count_nonzero(plan.egress_bytes)
        fewest = least_moved_bytes(world.classes, world.nodes, plan.bound_s)
        assert plan.egress_bytes.sum() <= fewest * (1 + 1e-6) + slack, seed
    assert moving >= 40


def test_equal_worlds_have_equal_plans() -> None:
    """Whatever the addresses of the holder tuples are."""
    for seed in range(30):
        world = random_world(seed)
        copies = replace(
            world.classes, holders=tuple((*holders,) for holders in world.classes.holders)
        )
        one, other = plan_flush(world.classes, world.nodes), plan_flush(copies, world.nodes)
        for name in ("classes", "sources", "writers", "counts"):
            assert getattr(one, name).tolist() == getattr(other, name).tolist()
