"""Each statement over nodes, memory and time finds what breaks it, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from groupio.model import DecisionKey, NodeLink, NodeReport, SegmentRef
from groupio.plan.grouped import plan_group
from groupio.plan.orders import NodeOrder
from groupio.testing import node_invariants as nodes
from groupio.testing.node_invariants import Arena, ArenaStep, Fate
from groupio.testing.sim.content import Place, member, report_of

KEY = DecisionKey(1, 7, 1)
SIZE = 1 << 20


def test_staged_needs_all_copies() -> None:
    assert nodes.check_staged(KEY, {0: True, 1: True}) == []
    (found,) = nodes.check_staged(KEY, {0: True, 1: False})
    assert found.invariant == 2
    assert "rank 1" in found.detail


def test_replicated_needs_so_many_domains() -> None:
    wanted = {0: [b"a", b"b"], 1: [b"a"]}
    assert nodes.check_replicated(KEY, wanted, {b"a": {"x", "y"}, b"b": {"y", "z"}}, 2) == []
    (found,) = nodes.check_replicated(KEY, wanted, {b"a": {"x", "y"}, b"b": {"y"}}, 2)
    assert found.chunk == b"b".hex()
    assert found.invariant == 2


def reports(places: dict[bytes, Place] | None = None) -> list[NodeReport]:
    made = []
    for number in (0, 1):
        one = member(number, 1, 0, 3, SIZE)
        lengths = dict.fromkeys(one.chunks, SIZE)
        made.append(report_of(f"n{number}", [one], lengths, places or {}))
    return made


LINKS = [NodeLink(f"n{i}", 1e9, 1e9, f"d{i}") for i in range(3)]


def orders_of(found: list[NodeReport], replicas: int = 2) -> dict[str, NodeOrder]:
    shares = {"n0": 8 * SIZE, "n1": 8 * SIZE, "n2": 8 * SIZE}
    return plan_group(found, LINKS, replicas=replicas, shares=shares).orders


def test_a_plan_fits_its_epoch() -> None:
    found = reports()
    orders = orders_of(found)
    assert nodes.check_plan(found, orders) == []
    without = {name: replace(order, write=order.write[:0]) for name, order in orders.items()}
    missing = nodes.check_plan(found, without)
    assert {v.invariant for v in missing} == {4}
    assert any("nobody is to write" in v.detail for v in missing)


def test_a_plan_writes_no_chunk_twice_and_none_that_is_durable() -> None:
    found = reports()
    orders = orders_of(found)
    every = {
        node: NodeOrder(np.arange(3), order.fetch, order.record) for node, order in orders.items()
        if node != "n2"
    }  # fmt: skip
    assert any("2 times" in v.detail for v in nodes.check_plan(found, every))
    durable = {found[0].chunks.digests[0].tobytes(): Place(SegmentRef("old", 9, False), 0)}
    assert any("durable" in v.detail for v in nodes.check_plan(reports(durable), orders))


def test_a_plan_gets_chunks_from_where_they_are() -> None:
    found = reports()
    orders = orders_of(found)
    fetching = next(node for node, order in orders.items() if order.fetch)
    order = orders[fetching]
    wrong = replace(order.fetch[0], source="n9", others=())
    bad = {**orders, fetching: replace(order, fetch=(wrong, *order.fetch[1:]))}
    assert any("lacks" in v.detail for v in nodes.check_plan(found, bad))
    assert any("lost" in v.detail for v in nodes.check_plan(found, orders, lost=("n0",)))


def test_what_is_on_its_way_is_not_written_again() -> None:
    found = reports()
    orders = orders_of(found)
    assert any("on its way" in v.detail for v in nodes.check_plan(found, orders, earlier=[orders]))
    nothing: dict[str, NodeOrder] = {}
    assert nodes.check_plan(found, nothing, earlier=[orders]) == []


def test_a_segment_that_is_needed_stays() -> None:
    assert nodes.check_gc_safe(["a"], {KEY: ["b"]}) == []
    (found,) = nodes.check_gc_safe(["a", "b"], {KEY: ["b", "c"]})
    assert (found.invariant, found.path, found.key) == (9, "b", KEY)


def test_an_extent_is_granted_again_only_after_an_acknowledgement() -> None:
    one, other = ("c1", 1), ("c2", 1)
    grant = ArenaStep(Arena.GRANTED, one, 3, 0, 100)
    again = ArenaStep(Arena.GRANTED, other, 3, 50, 100)
    (found,) = nodes.check_arena_fence([grant, again])
    assert found.invariant == 12
    assert nodes.check_arena_fence([grant, replace(grant, what=Arena.COPIED), again]) == []
    assert nodes.check_arena_fence([grant, ArenaStep(Arena.STOPPED, one), again]) == []
    assert nodes.check_arena_fence([grant, ArenaStep(Arena.STOPPED, other), again]) != []
    assert nodes.check_arena_fence([grant, replace(again, arena=4)]) == []
    assert nodes.check_arena_fence([grant, replace(again, offset=100)]) == []


def test_everybody_is_told_in_time() -> None:
    fates = [Fate("r0", 1, True, 99.0), Fate("r1", 1, False, 5.0), Fate("r2", 1, False, 20.0)]
    (found,) = nodes.check_live(fates, 10.0)
    assert found.invariant == 13
    assert "r2" in found.detail
