"""Who fetches which chunk for many nodes, and from whom each node gets it."""

from __future__ import annotations

from dataclasses import replace as replaced
from typing import Any

import msgspec
import numpy as np
import pytest

from groupio.errors import InvalidInput
from groupio.model import NodeLink
from groupio.plan.distribute import (
    ASK_PART,
    ASK_WHOLE,
    NOT_ASKED,
    STORAGE,
    ReadPlan,
    plan_read,
)

MIB = 1 << 20


def links_of(count: int, uplink: float = 1e9, fabric: float = 2e9) -> list[NodeLink]:
    return [NodeLink(f"n{i}", uplink, fabric, f"n{i}") for i in range(count)]


def world(count: int, chunks: int, ask: int = ASK_WHOLE) -> tuple[Any, Any, Any]:
    """Equal chunks that nobody has and all ask for."""
    lengths = np.full(chunks, 4 * MIB, np.int64)
    has = np.zeros((count, chunks), np.bool_)
    return lengths, has, np.full((count, chunks), ask, np.uint8)


def check(plan: ReadPlan, has: Any, asks: Any, nodes: list[NodeLink]) -> np.ndarray:
    """Every asker gets its chunks from somebody that has them in the end; the depth of each."""
    wanted = np.where(has, 0, asks)
    rows = np.flatnonzero(wanted.any(axis=0))
    assert sorted(plan.order.tolist()) == rows.tolist()
    assert np.array_equal(np.flatnonzero(plan.lanes >= 0), rows)
    depths = np.zeros(wanted.shape, np.int64)
    for row in rows.tolist():
        way = plan.predecessors[plan.lanes[row]]
        able = [node.fabric_ok for node in nodes]
        readers = np.flatnonzero(way == STORAGE)
        anybody = (has[:, row] & able).any()
        assert sum(able[node] for node in readers) == (not anybody and wanted[able, row].any())
        for node in np.flatnonzero(wanted[:, row]).tolist():
            assert way[node] != NOT_ASKED
            at, steps = node, 0
            while way[at] >= 0 and not has[at, row]:
                assert able[at]
                at = int(way[at])
                # Only who gets the whole chunk passes it on.
                assert has[at, row] or asks[at, row] == ASK_WHOLE or way[at] == STORAGE
                steps += 1
                assert steps <= len(way)
            assert has[at, row] or way[at] == STORAGE
            depths[node, row] = steps
    return depths


@pytest.mark.parametrize("count", [1, 2, 3, 8, 13, 64])
def test_a_cold_chunk_leaves_the_store_once_and_all_uplinks_carry_it(count: int) -> None:
    lengths, has, asks = world(count, 20 * count)
    nodes = links_of(count)
    plan = plan_read(lengths, has, asks, nodes)
    depths = check(plan, has, asks, nodes)
    assert plan.uplink_bytes.tolist() == [20 * 4 * MIB] * count
    assert plan.uplink_bytes.sum() == lengths.sum()
    # No port carries more than the state, and no chunk passes through many nodes.
    assert plan.ingress_bytes.max() <= lengths.sum()
    assert plan.egress_bytes.max() <= lengths.sum() * 1.02
    assert depths.max() <= 1 + np.log2(count)


@pytest.mark.parametrize("count", [2, 3, 9, 65])
def test_one_copy_in_memory_goes_to_all_at_the_speed_of_one_port(count: int) -> None:
    lengths, has, asks = world(count, 200)
    has[0] = True
    nodes = links_of(count)
    plan = plan_read(lengths, has, asks, nodes)
    check(plan, has, asks, nodes)
    assert not plan.uplink_bytes.any()
    assert plan.egress_bytes.max() == plan.ingress_bytes.max() == lengths.sum()
    assert plan.makespan_s == lengths.sum() / 2e9


def test_several_copies_in_memory_share_the_sending() -> None:
    lengths, has, asks = world(4, 400)
    has[0] = has[1] = True
    plan = plan_read(lengths, has, asks, links_of(4), egress_loads=np.array([MIB * 800, 0, 0, 0]))
    first, second = plan.egress_bytes[:2]
    assert first + second == lengths.sum()
    assert second - first == 800 * MIB


def test_fast_uplinks_fetch_more() -> None:
    lengths, has, asks = world(2, 300)
    nodes = [NodeLink("a", 2e9, 9e9, "a"), NodeLink("b", 1e9, 9e9, "b")]
    plan = plan_read(lengths, has, asks, nodes)
    assert plan.uplink_bytes.tolist() == [200 * 4 * MIB, 100 * 4 * MIB]
    busy = plan_read(lengths, has, asks, nodes, uplink_loads=np.array([1 << 40, 0]))
    assert busy.uplink_bytes.tolist() == [0, lengths.sum()]


def test_idle_uplinks_help_where_that_is_faster() -> None:
    lengths, has, asks = world(4, 100)
    asks[1:] = 0
    nodes = links_of(4)
    assert plan_read(lengths, has, asks, nodes, helpers=False).uplink_bytes[1:].sum() == 0
    plan = plan_read(lengths, has, asks, nodes)
    check(plan, has, asks, nodes)
    assert plan.uplink_bytes.min() == 25 * 4 * MIB
    # Not where the backend is the bottleneck, nor where the fabric would be.
    slow = plan_read(lengths, has, asks, nodes, backend_bytes_per_s=1e9)
    assert slow.uplink_bytes[1:].sum() == 0
    narrow = plan_read(lengths, has, asks, links_of(4, fabric=0.7e9))
    assert narrow.uplink_bytes[1:].sum() == 0


def test_parts_hang_behind_nodes_with_the_whole_chunk() -> None:
    lengths, has, asks = world(6, 60)
    asks[3:] = ASK_PART
    nodes = links_of(6)
    plan = plan_read(lengths, has, asks, nodes)
    check(plan, has, asks, nodes)
    # Where all want parts the one that fetches the chunk serves them.
    asks[:] = ASK_PART
    plan = plan_read(lengths, has, asks, nodes)
    depths = check(plan, has, asks, nodes)
    assert depths.max() == 1
    assert plan.uplink_bytes.sum() == lengths.sum()


def test_nodes_without_a_fabric_read_for_themselves() -> None:
    lengths, has, asks = world(4, 40)
    nodes = links_of(4)
    nodes[2] = msgspec.structs.replace(nodes[2], fabric_ok=False)
    has[2, :10] = True  # what it has it cannot send
    plan = plan_read(lengths, has, asks, nodes)
    check(plan, has, asks, nodes)
    assert plan.uplink_bytes[2] == 30 * 4 * MIB
    assert plan.ingress_bytes[2] == plan.egress_bytes[2] == 0
    alone = [msgspec.structs.replace(node, fabric_ok=False) for node in nodes]
    plan = plan_read(lengths, np.zeros_like(has), asks, alone)
    assert plan.uplink_bytes.tolist() == [lengths.sum()] * 4


def test_long_and_short_chunks_take_both_trees_alike() -> None:
    lengths, has, asks = world(5, 400)
    lengths[::2] = 1000
    has[0] = True
    plan = plan_read(lengths, has, asks, links_of(5))
    assert plan.egress_bytes.max() <= lengths.sum() + 4 * MIB


def test_what_most_ask_for_comes_first_and_sources_start_in_different_places() -> None:
    lengths, has, asks = world(4, 80)
    asks[1:, :10] = 0
    plan = plan_read(lengths, has, asks, links_of(4), helpers=False)
    firsts = plan.order[:4]
    assert firsts.min() >= 10
    assert len(set(firsts.tolist())) == 4
    fetchers = [int(np.flatnonzero(plan.predecessors[plan.lanes[r]] == STORAGE)[0]) for r in firsts]
    assert sorted(fetchers) == [0, 1, 2, 3]


def test_nothing_wanted_is_an_empty_plan() -> None:
    lengths, has, asks = world(2, 3)
    for plan in (
        plan_read(lengths, ~has, asks, links_of(2)),
        plan_read(lengths[:0], has[:, :0], asks[:, :0], links_of(2)),
        plan_read(lengths[:0], has[:0, :0], asks[:0, :0], []),
    ):
        assert not len(plan.order)
        assert plan.makespan_s == 0.0
        assert (plan.lanes == -1).all()


def test_random_worlds_serve_every_asker() -> None:
    random = np.random.default_rng(7)
    for _ in range(150):
        count, chunks = int(random.integers(1, 9)), int(random.integers(0, 25))
        lengths = random.integers(1, 4 * MIB, chunks)
        has = random.random((count, chunks)) < random.choice([0.0, 0.1, 0.5])
        asks = random.integers(0, 3, (count, chunks)).astype(np.uint8)
        nodes = [
            NodeLink(
                f"n{i}",
                float(random.uniform(1e6, 1e9)),
                float(random.uniform(1e6, 1e9)),
                "d",
                bool(random.random() < 0.9),
            )
            for i in range(count)
        ]
        plan = plan_read(lengths, has, asks, nodes, backend_bytes_per_s=1e9)
        check(plan, has, asks, nodes)


def test_many_chunks_of_few_classes_are_planned_at_once() -> None:
    lengths, has, asks = world(64, 20_000)
    asks[::2, ::3] = 0
    plan = plan_read(lengths, has, asks, links_of(64))
    assert len(plan.predecessors) <= 2 * 64 * 2
    assert plan.uplink_bytes.max() - plan.uplink_bytes.min() <= 2 * 4 * MIB


def test_bad_input_is_named() -> None:
    lengths, has, asks = world(2, 3)
    with pytest.raises(InvalidInput, match=r"3 chunks on 2 nodes"):
        plan_read(lengths, has[:1], asks, links_of(2))
    with pytest.raises(InvalidInput, match=r"'n0' has a link of 0\.0 bytes/s"):
        plan_read(lengths, has, asks, links_of(2, uplink=0.0))


def test_a_plan_is_a_value() -> None:
    plan = plan_read(*world(1, 1), links_of(1))
    with pytest.raises(AttributeError):
        plan.makespan_s = 1.0  # type: ignore[misc]
    assert replaced(plan, makespan_s=1.0).makespan_s == 1.0
