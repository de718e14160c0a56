"""What a flush plan does in worlds small enough to know the answer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from flush_worlds import CHUNK, Row, World, check, classes_of, node
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_help import raw, report

from groupio.errors import InvalidInput
from groupio.model import NodeLink
from groupio.plan.merge import merge
from groupio.plan.write import FlushPlan, WriteClasses, assign_flush, plan_flush, write_classes


def planned(
    rows: Sequence[Row], nodes: list[NodeLink], backend_bytes_per_s: float | None = None
) -> FlushPlan:
    world = World(classes_of(rows), nodes, backend_bytes_per_s)
    plan = plan_flush(world.classes, nodes, backend_bytes_per_s=backend_bytes_per_s)
    check(world, plan)
    return plan


@st.composite
def worlds(draw: st.DrawFn) -> World:
    nodes = [
        node(i, draw(st.floats(1e3, 1e12)), draw(st.floats(1e3, 1e12)), ok=draw(st.booleans()))
        for i in range(draw(st.integers(1, 5)))
    ]
    some = st.sets(st.integers(0, len(nodes) - 1), min_size=1).map(lambda s: tuple(sorted(s)))
    rows = draw(st.lists(st.tuples(some, st.integers(1, CHUNK), st.integers(0, 3000)), max_size=8))
    backend = draw(st.none() | st.floats(1e3, 1e12))
    return World(classes_of(rows), nodes, backend)


@given(world=worlds())
@settings(deadline=None)
def test_plans_are_complete(world: World) -> None:
    check(world, plan_flush(world.classes, world.nodes, backend_bytes_per_s=world[2]))


def test_those_without_a_choice_go_first() -> None:
    plan = planned([((0, 1), CHUNK, 100), ((0,), CHUNK, 60), ((1,), CHUNK, 40)], [node(0), node(1)])
    assert plan.uplink_bytes.tolist() == [100 * CHUNK, 100 * CHUNK]
    assert not plan.egress_bytes.any()


def test_work_goes_down_a_long_chain_of_holders() -> None:
    """Without a fabric the first node's chunks can only push those of the others aside."""
    chain = [((i, i + 1), CHUNK - i, 12_000 if i == 0 else 10_000) for i in range(9)]
    plan = planned(chain, [node(i, ok=False) for i in range(10)])
    assert plan.bound_s == pytest.approx(sum(length * n for _, length, n in chain) / 10e9)
    assert plan.makespan_s <= plan.bound_s + CHUNK / 1e9


def test_one_node_has_everything_and_all_uplinks_carry_it() -> None:
    plan = planned([((0,), CHUNK, 1000), ((0,), 1000, 10)], [node(i) for i in range(5)])
    assert plan.bound_s == pytest.approx((1000 * CHUNK + 10_000) / 5e9)
    assert plan.makespan_s <= plan.bound_s + CHUNK / 1e9
    assert (plan.uplink_bytes >= 199 * CHUNK).all()
    assert plan.egress_bytes[1:].tolist() == [0, 0, 0, 0]
    assert plan.ingress_bytes.tolist() == [0, *plan.uplink_bytes[1:].tolist()]


def test_the_source_port_limits_what_moves() -> None:
    """Egress at half the uplink: two thirds are written at home whatever the others could take."""
    nodes = [node(0, 1e9, 5e8), *(node(i, 1e9, 1e11) for i in (1, 2, 3))]
    plan = planned([((0,), CHUNK, 300)], nodes)
    assert plan.uplink_bytes[0] == 200 * CHUNK
    assert plan.egress_bytes[0] == 100 * CHUNK


def test_the_taking_port_limits_what_moves() -> None:
    nodes = [node(0, 1e9, 1e11), node(1, 1e9, 2e8), node(2, 1e9, 3e8)]
    plan = planned([((0,), CHUNK, 300)], nodes)
    assert plan.ingress_bytes.tolist() == [0, 40 * CHUNK, 60 * CHUNK]


def test_the_escape_path_leaves_ports_alone() -> None:
    """Node 1 is idle but its port may not be used; with two such nodes nothing moves at all."""
    three = [node(0), node(1, ok=False), node(2)]
    assert planned([((0,), CHUNK, 100)], three).uplink_bytes.tolist() == [50 * CHUNK, 0, 50 * CHUNK]
    two = [node(0), node(1, ok=False)]
    assert planned([((0,), CHUNK, 100)], two).uplink_bytes.tolist() == [100 * CHUNK, 0]


def test_a_port_that_may_not_be_used_needs_no_bandwidth() -> None:
    assert planned([((0,), 10, 1)], [node(0, fabric=0.0, ok=False)]).makespan_s == 1e-8


def test_a_slow_store_makes_moves_useless() -> None:
    """100 chunks at 1e9 over one uplink; the store takes 1e9 in sum: idle uplinks do not help."""
    nodes = [node(0), node(1)]
    plan = planned([((0,), CHUNK, 100)], nodes, backend_bytes_per_s=1e9)
    assert not plan.egress_bytes.any()
    assert plan.makespan_s == plan.bound_s == 100 * CHUNK / 1e9
    # At 1.25e9 only a fifth need move.
    plan = planned([((0,), CHUNK, 100)], nodes, backend_bytes_per_s=1.25e9)
    assert plan.egress_bytes.tolist() == [20 * CHUNK, 0]
    assert plan.makespan_s == pytest.approx(80 * CHUNK / 1e9)


def test_one_chunk_goes_over_the_fastest_way() -> None:
    assert planned([((0,), CHUNK, 1)], [node(0), node(1, 1.5e9)]).writers.tolist() == [1]
    assert planned([((0,), CHUNK, 1)], [node(0), node(1, 1e9)]).writers.tolist() == [0]


def test_a_chunk_that_does_not_fit_pushes_small_ones_aside() -> None:
    """What a link has too much fits on another only after that one gave small chunks away."""
    nodes = [node(i, 2.5e9, 1e8, ok=i != 3) for i in range(7)]
    rows = [((0, 1, 2, 3), 2650, 77), ((0, 1, 2, 3, 4), 33452, 74), ((2,), 525, 66)]
    plan = planned(rows, nodes)
    assert plan.makespan_s <= plan.bound_s + 33452 / 2.5e9


def test_small_gains_of_slow_links_are_taken() -> None:
    """Each of the slow uplinks carries some chunks, though that is less than one percent."""
    nodes = [node(0, 1e10), *(node(i, 2e7) for i in (1, 2, 3))]
    plan = planned([((0,), CHUNK, 14632)], nodes)
    assert plan.makespan_s < 14632 * CHUNK / 1e10
    assert plan.egress_bytes[0] > 0


def test_huge_loads_keep_the_counts_exact() -> None:
    """Chunks that cost next to nothing beside the load: rounding must not lose or invent any."""
    counts = [1 << 40, 1001, 7]
    classes = WriteClasses(
        ((0,), (0, 1), (0, 1, 2)),
        np.array([CHUNK, 1, 3], np.int64),
        np.array(counts, np.int64),
        np.empty(0, np.int32),
    )
    plan = plan_flush(classes, [node(0, 1e3), node(1, 1e15), node(2, 7e8)])
    for c, count in enumerate(counts):
        assert int(plan.counts[plan.classes == c].sum()) == count


def test_one_node_writes_everything() -> None:
    items = [raw(f"i{i}", 64 + i % 2) for i in range(4)]
    merged = merge([report("n0", {0: (items, ["a0", "b1", "c0", "d1"])})])
    classes = write_classes(merged)
    assert classes.holders == ((0,), (0,))
    assert classes.lengths.tolist() == [64, 65]
    assert classes.counts.tolist() == [2, 2]
    sources, writers = assign_flush(classes, plan_flush(classes, [node(0)]))
    assert sources.tolist() == writers.tolist() == [0, 0, 0, 0]


def test_replicas_are_split_over_their_nodes_and_known_chunks_stay() -> None:
    items = [raw(f"i{i}", 64) for i in range(4)]
    reports = [
        report("n0", {0: (items, "abcd")}),
        report("n1", {1: (items, "abcd")}),
        report("n2", {2: (items, "xxxx")}),
    ]
    merged = merge(reports)
    wanted = np.array([True, True, True, True, False])
    classes = write_classes(merged, wanted)
    nodes = [node(i, ok=False) for i in range(3)]
    sources, writers = assign_flush(classes, plan_flush(classes, nodes))
    assert sources.tolist() == writers.tolist() == [0, 0, 1, 1, -1]
    assert write_classes(merged).holders == ((0, 1), (2,))


def test_moved_chunks_come_in_runs() -> None:
    classes = classes_of([((0,), CHUNK, 6)])
    sources, writers = assign_flush(classes, plan_flush(classes, [node(i) for i in range(3)]))
    assert sources.tolist() == [0] * 6
    assert writers.tolist() == [0, 0, 1, 1, 2, 2]


def test_nothing_to_write() -> None:
    classes = write_classes(merge([]))
    for nodes in ([], [node(0), node(1)]):
        plan = plan_flush(classes, nodes)
        assert plan.makespan_s == plan.bound_s == 0.0
        assert [column.tolist() for column in assign_flush(classes, plan)] == [[], []]
    none_wanted = classes_of([((0,), CHUNK, 0), ((0, 1), CHUNK, 0)])
    assert plan_flush(none_wanted, [node(0), node(1)]).counts.tolist() == []


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_links_need_a_bandwidth(rate: float) -> None:
    with pytest.raises(InvalidInput, match="uplink of node 'n0'"):
        plan_flush(classes_of([]), [node(0, rate)])
    with pytest.raises(InvalidInput, match="fabric port of node 'n0'"):
        plan_flush(classes_of([]), [node(0, 1e9, rate)])
    with pytest.raises(InvalidInput, match="the backend"):
        plan_flush(classes_of([]), [node(0)], backend_bytes_per_s=rate)


@pytest.mark.parametrize("holders", [(), (1,), (-1,), (0, 0)])
def test_holders_must_be_nodes(holders: tuple[int, ...]) -> None:
    with pytest.raises(InvalidInput, match="held by"):
        plan_flush(classes_of([(holders, 10, 1)]), [node(0)])


def test_chunks_must_have_bytes() -> None:
    with pytest.raises(InvalidInput, match="0 bytes"):
        plan_flush(classes_of([((0,), 0, 1)]), [node(0)])
