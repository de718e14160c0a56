"""Single steps of the reading machines that whole reads seldom take."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from groupio.model import NodeLink
from groupio.plan.distribute import NOT_ASKED, STORAGE
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol import reading_messages as rm
from groupio.protocol.reading import HOLD_S, NodeReader
from groupio.protocol.swarm import FAILURES_MAX, TOGETHER_S, Swarm

KEY = "k"
NAMES = ("n0", "n1", "n2")


def rows_of(*rows: int) -> Any:
    return np.array(rows, np.int32)


def reader_of(chunks: int = 4, **limits: int) -> NodeReader:
    return NodeReader(KEY, "n0", np.full(chunks, 10, np.int64), **limits)


def wants(client: str, spans: dict[int, tuple[int, int]], **rest: Any) -> rm.ClientWants:
    bounds = np.array(list(spans.values()), np.int64).reshape(-1, 2)
    return rm.ClientWants(client, 1, rows_of(*spans), bounds[:, 0], bounds[:, 1], **rest)


def assign(rows: tuple[int, ...], source: int, serves: int = 0, rate: float = 0.0) -> rm.Assign:
    same = np.full(len(rows), source, np.int32)
    return rm.Assign(KEY, "n0", rows_of(*rows), same, np.full_like(same, serves), NAMES, rate)


def kinds(effects: list[Any]) -> list[str]:
    return [
        type(effect.message if isinstance(effect, rm.Tell) else effect).__name__
        for effect in effects
    ]


def swarm_of(nodes: int, chunks: int = 4) -> Swarm:
    swarm = Swarm(KEY, np.full(chunks, 10, np.int64))
    for number in range(nodes):
        swarm.handle(rm.NodeKnown(KEY, NodeLink(f"n{number}", 1e9, 2e9, "d")))
    return swarm


def asks(node: str, *rows: int, whole: bool = True, **rest: Any) -> rm.NodeAsks:
    return rm.NodeAsks(KEY, node, rows_of(*rows), np.full(len(rows), whole), **rest)


def failed(node: str, source: str, *rows: int, why: str = "timeout") -> rm.NodeFailed:
    return rm.NodeFailed(KEY, node, source, rows_of(*rows), why)


# -- the reader ---------------------------------------------------------


def test_a_client_that_leaves_frees_its_memory() -> None:
    reader = reader_of()
    reader.handle(wants("a", {0: (0, 10), 1: (0, 10)}))
    reader.handle(wants("b", {0: (0, 10)}))
    reader.handle(assign((0, 1), STORAGE))
    assert kinds(reader.handle(rm.Arrived("", (0,)))) == ["Deliver", "Deliver"]
    assert reader.held_bytes == 20
    assert reader.handle(rm.ClientLeft("a")) == []
    assert kinds(reader.handle(rm.ClientTook("b", 1, (0,)))) == ["Release"]
    # What nobody wants any more still comes, and is let go at once.
    assert kinds(reader.handle(rm.Arrived("", (1,)))) == ["Release", "NodeHas"]
    assert reader.idle
    assert reader.held_bytes == 0


def test_a_chunk_that_came_twice_is_discarded() -> None:
    reader = reader_of()
    reader.handle(wants("a", {0: (0, 10)}))
    reader.handle(assign((0,), 1))
    reader.handle(assign((0,), 2))
    assert kinds(reader.handle(rm.Arrived("n1", (0,)))) == ["Deliver"]
    assert kinds(reader.handle(rm.Arrived("n2", (0,))))[0] == "Discard"
    assert kinds(reader.handle(rm.Arrived("n2", (0,)))) == ["Discard"]
    assert reader.held_bytes == 10


def test_damage_of_the_whole_leaves_a_part_that_is_being_copied() -> None:
    reader = reader_of()
    reader.handle(wants("a", {0: (0, 3)}))
    reader.handle(assign((0,), 1))
    assert kinds(reader.handle(rm.Arrived("n1", (0,)))) == ["Deliver", "NodeHas"]
    reader.handle(wants("b", {0: (5, 9)}))
    reader.handle(rm.PeerWants(7, 0))
    unreadable = rm.Unreadable(KEY, "n0", rows_of(0, 1), "storage")
    assert kinds(reader.handle(unreadable)) == ["Refuse", "Damaged"]
    assert reader.handle(unreadable) == []
    assert kinds(reader.handle(rm.ClientTook("a", 1, (0,)))) == ["Release"]
    # The chunk may be asked for again.
    assert kinds(reader.handle(wants("b", {0: (5, 9)}))) == ["NodeAsks"]


def test_an_order_for_a_part_that_is_here_is_answered() -> None:
    reader = reader_of()
    reader.handle(wants("a", {0: (0, 3)}))
    reader.handle(assign((0,), 1))
    reader.handle(rm.Arrived("n1", (0,)))
    reader.handle(rm.ClientTook("a", 1, (0,)))
    (told,) = reader.handle(assign((0,), 2))
    assert isinstance(told.message, rm.NodeHas)
    assert (told.message.rows.tolist(), told.message.parts.tolist()) == ([], [0])
    assert reader.idle


def test_the_whole_chunk_after_a_part_is_told_to_those_that_wait() -> None:
    reader = reader_of()
    reader.handle(wants("a", {0: (0, 3)}))
    reader.handle(assign((0,), 1))
    reader.handle(rm.Arrived("n1", (0,)))
    reader.handle(wants("b", {0: (5, 9)}))
    pull = reader.handle(assign((0,), 1))
    assert msgspec.structs.asdict(pull[0])["stops"] == (10,)
    delivered = reader.handle(rm.Arrived("n1", (0,)))
    assert [e.client for e in delivered if isinstance(e, rm.Deliver)] == ["b"]
    assert reader.held_bytes == 10


def test_a_delivered_chunk_that_is_gone_is_asked_for_again() -> None:
    reader = reader_of()
    reader.handle(rm.ChunksHere(rows_of(0)))
    assert kinds(reader.handle(wants("a", {0: (0, 10)}))) == ["Deliver"]
    assert kinds(reader.handle(rm.ChunksLost((0,)))) == ["NodeDrops", "NodeAsks"]
    assert reader.handle(rm.ChunksLost((0, 1))) == []
    reader.handle(assign((0,), STORAGE))
    assert kinds(reader.handle(rm.Arrived("", (0,))))[0] == "Deliver"


def test_a_request_before_the_order_waits_and_one_after_the_loss_is_refused() -> None:
    reader = reader_of()
    assert reader.handle(rm.PeerWants(1, 0)) == []
    assert reader.handle(rm.PeerWants(2, 0)) == []
    assert reader.handle(rm.PeerDone(2, ok=False)) == []
    reader.handle(assign((0,), STORAGE, serves=1))
    assert kinds(reader.handle(rm.Arrived("", (0,)))) == ["Serve", "NodeHas"]
    assert kinds(reader.handle(rm.PeerDone(1, ok=True))) == ["Release"]
    assert reader.handle(rm.PeerDone(1, ok=True)) == []
    reader.handle(rm.ChunksLost((0,)))
    assert kinds(reader.handle(rm.PeerWants(3, 0))) == ["Refuse"]
    reader.handle(rm.SwarmLost())
    assert kinds(reader.handle(rm.PeerWants(4, 1))) == ["Refuse"]


def test_what_peers_do_not_fetch_is_let_go_after_a_while() -> None:
    reader = reader_of()
    reader.handle(assign((0, 1), STORAGE, serves=1))
    effects = reader.handle(rm.Arrived("", (0, 1)))
    timer = effects[-1]
    assert timer == fx.StartTimer("hold k n0", HOLD_S)
    assert reader.handle(ev.TimerFired("another")) == []
    reader.handle(rm.PeerWants(1, 0))
    # A peer came meanwhile: the others may come too.
    reader.handle(rm.PeerDone(1, ok=True))
    assert kinds(reader.handle(ev.TimerFired(timer.name))) == ["StartTimer"]
    assert kinds(reader.handle(ev.TimerFired(timer.name))) == ["Release"]
    assert reader.held_bytes == 0


def test_the_share_of_the_store_bounds_what_is_read_ahead() -> None:
    reader = reader_of(store_bytes=40)
    assert reader.handle(assign((0, 1, 2, 3), STORAGE, rate=1000.0))[0].rows == (0, 1)
    assert reader.handle(assign((0,), NOT_ASKED, serves=1)) == []
    assert reader.handle(rm.Arrived("", (0,)))[0].rows == (2,)
    assert not reader.idle


def test_all_peers_together_have_a_limit_too() -> None:
    reader = reader_of(peer_bytes=20, peers_bytes=30)
    pulls = reader.handle(assign((0, 1, 2), 1)) + reader.handle(assign((3,), 2))
    assert [(p.peer, p.rows) for p in pulls] == [("n1", (0, 1)), ("n2", (3,))]
    assert reader.handle(assign((3,), 2)) == []


# -- the swarm ---------------------------------------------------------


def test_words_of_unknown_nodes_are_passed_over() -> None:
    swarm = swarm_of(1)
    assert swarm.handle(asks("stranger", 0)) == []
    assert swarm.handle(rm.NodeGone(KEY, "stranger")) == []
    assert swarm.handle(ev.TimerFired("another")) == []
    with pytest.raises(AssertionError, match="swarm got"):
        swarm.handle(rm.Yield(KEY, "n0", rows_of(0)))


def test_a_grouped_load_is_planned_when_all_have_asked() -> None:
    swarm = swarm_of(2)
    timer = fx.StartTimer("read k x", TOGETHER_S)
    assert swarm.handle(asks("n0", 0, 1, load="x", members=3)) == [timer]
    assert swarm.handle(asks("n1", load="x", members=3)) == []
    effects = swarm.handle(asks("n1", 0, 1, load="x", members=3))
    assert kinds(effects) == ["StopTimer", "Assign", "Assign"]
    assert swarm.handle(asks("n1", 0, load="x", members=3)) == []
    assert kinds(swarm.handle(asks("n1", 2, load="y"))) == ["Assign"]


def test_a_member_that_died_while_others_were_awaited_gets_nothing() -> None:
    swarm = swarm_of(2)
    swarm.handle(asks("n0", 0, load="x", members=2))
    swarm.handle(rm.NodeGone(KEY, "n0"))
    effects = swarm.handle(asks("n1", 0, load="x", members=2))
    assert [e.node for e in effects if isinstance(e, rm.Assign)] == ["n1"]


def test_a_node_that_comes_back_has_nothing() -> None:
    swarm = swarm_of(2)
    swarm.handle(rm.NodeHas(KEY, "n0", rows_of(0), rows_of()))
    swarm.handle(rm.NodeGone(KEY, "n0"))
    swarm.handle(rm.NodeKnown(KEY, NodeLink("n0", 1e9, 2e9, "d")))
    (order,) = swarm.handle(asks("n1", 0))
    assert order.sources.tolist() == [STORAGE]


def test_what_nobody_else_wants_stays_with_who_yielded_it() -> None:
    swarm = swarm_of(2)
    (first, _) = swarm.handle(asks("n0", 0, 1, 2, 3))
    assert first.node == "n0"
    mine = first.rows[first.sources == STORAGE]
    (again,) = swarm.handle(rm.Yielded(KEY, "n0", mine[:1]))
    assert again.sources.tolist() == [STORAGE]
    assert swarm.handle(rm.Yielded(KEY, "n1", mine[:1])) == []


def test_a_chunk_that_many_peers_did_not_give_is_read_from_the_store() -> None:
    swarm = swarm_of(FAILURES_MAX + 2)
    for number in range(1, FAILURES_MAX + 2):
        swarm.handle(rm.NodeHas(KEY, f"n{number}", rows_of(0), rows_of()))
    effects = swarm.handle(asks("n0", 0))
    sources = []
    for _ in range(FAILURES_MAX + 1):
        (order,) = [e for e in effects if isinstance(e, rm.Assign) and e.node == "n0"]
        sources.append(int(order.sources[0]))
        if sources[-1] == STORAGE:
            break
        effects = swarm.handle(failed("n0", order.names[sources[-1]], 0, why="absent"))
    assert len(sources) == FAILURES_MAX + 1
    assert sources[-1] == STORAGE
    # Only one node read it, and says it cannot: another one is tried, then all is lost.
    for number in range(1, FAILURES_MAX + 2):
        swarm.handle(rm.NodeDrops(KEY, f"n{number}", rows_of(0)))
    mine, other = sorted(swarm.handle(failed("n0", "", 0)), key=lambda e: e.node != "n0")
    assert mine.names[mine.sources[0]] == other.node
    assert other.sources.tolist() == [STORAGE]
    lost = swarm.handle(failed(other.node, "", 0, why="damaged"))
    assert {e.node for e in lost} == {"n0", other.node}
    assert {e.why for e in lost} == {"damaged"}


def test_failures_that_come_too_late_change_nothing() -> None:
    swarm = swarm_of(3)
    swarm.handle(rm.NodeHas(KEY, "n1", rows_of(0), rows_of()))
    swarm.handle(asks("n0", 0))
    assert swarm.handle(failed("n0", "n2", 0)) == []
    assert swarm.handle(failed("n0", "stranger", 0)) == []
    assert swarm.handle(failed("n0", "", 0)) == []
    # A node that still wants what it was thought to have is served.
    swarm.handle(rm.NodeHas(KEY, "n0", rows_of(), rows_of(1)))
    effects = swarm.handle(failed("n0", "n1", 2))
    assert [e.node for e in effects if isinstance(e, rm.Assign)]


def test_two_accusers_make_a_liar() -> None:
    swarm = swarm_of(4)
    for name in ("n2", "n3"):
        swarm.handle(rm.NodeHas(KEY, name, rows_of(0, 1), rows_of()))
    swarm.handle(failed("n0", "n3", 0))
    named = []
    for name in ("n0", "n1"):
        effects = swarm.handle(asks(name, 0, 1))
        (order,) = [e for e in effects if isinstance(e, rm.Assign) and e.node == name]
        liar = int(np.flatnonzero(order.sources == 2)[0]) if 2 in order.sources else None
        if liar is not None:
            effects = swarm.handle(failed(name, "n2", int(order.rows[liar]), why="digest"))
            named += [e.peer for e in effects if isinstance(e, rm.PeerLies)]
    assert named
    assert set(named) == {"n2"}
