"""Nodes take more room for copies when others are lost, as far as they have any."""

from __future__ import annotations

from typing import Any

import numpy as np
from protocol_help import layout_of, report_of

from groupio.model import CHUNK_BYTES, DecisionKey, NodeLink
from groupio.plan.grouped import GroupPlan
from groupio.plan.orders import NodeOrder
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol.agent import AgentMachine
from groupio.protocol.ledger import EXTENT_ALIGN, Ledger, Use
from groupio.protocol.nodes import Nodes
from groupio.protocol.storing import ROOM_ASKS_MAX, ROUNDS_MAX, Storing

KEY = DecisionKey(1, 5, 1)
MIB = 1 << 20
NOTHING = NodeOrder(np.zeros(0, np.int64), (), False)


def agent(budget: int, replica_bytes: int = 0, size: int = 2 * MIB) -> AgentMachine:
    """A node with one planned group, all of whose members are hashed."""
    machine = AgentMachine("n0", Ledger(budget))
    machine.handle(ev.LeaseAsked("c0", 1, 0, layout_of(size)))
    seat = fx.MemberSeat(0, "c0", 1)
    machine.handle(
        fx.AdmitGroup(
            "n0", 1, KEY, (seat,), True, "wait", planned=True, replica_bytes=replica_bytes
        )
    )
    machine.handle(fx.StartCopy("n0", 1))
    machine.handle(ev.WaveCopied("c0", 1, 0))
    machine.handle(ev.JobHashed(1, report_of("n0", {0: "x"})))
    return machine


def said(effects: list[Any]) -> list[Any]:
    """The last event that was reported, if any."""
    return [e.event for e in effects if isinstance(e, fx.Report)]


def test_a_node_takes_room_once_and_says_how_much_it_has() -> None:
    machine = agent(32 * MIB, replica_bytes=3 * MIB)
    # What its extent is larger than was asked for is room too.
    assert said(machine.handle(fx.TakeRoom("n0", 1, 4 * MIB))) == [ev.NodeRoom(1, "n0", 4 * MIB)]
    assert machine.ledger.total(Use.LEASED) == 6 * MIB
    wanted = fx.TakeRoom("n0", 1, 9 * MIB)
    answer = said(machine.handle(wanted))
    assert answer == [ev.NodeRoom(1, "n0", 10 * MIB)]
    held = machine.ledger.total(Use.LEASED)
    assert held == 6 * MIB + 6 * MIB + CHUNK_BYTES  # each extent may end with a gap of one chunk
    assert said(machine.handle(wanted)) == answer
    assert machine.ledger.total(Use.LEASED) == held
    (order,) = machine.handle(fx.StoreChunks("n0", 1, 1, NOTHING, {}))
    assert order.room == ((0, 4 * MIB), (4 * MIB, 10 * MIB))
    assert machine.held((1,))[0].replica_bytes == 10 * MIB
    again = machine.handle(fx.AdoptGroup("n0", KEY, 7))
    assert said(again)[-1] == ev.NodeRoom(7, "n0", 10 * MIB)
    assert sum(isinstance(e, ev.NodeRoom) for e in said(again)) == 1
    machine.handle(ev.JobStored(1, report_of("n0", {0: "x"}), 1))
    machine.handle(fx.CloseGroup("n0", 7, True, True))
    machine.handle(ev.JobIdle(1))
    assert machine.ledger.total(Use.LEASED) == 0


def test_without_memory_a_node_says_so_and_nobody_waits() -> None:
    machine = agent(3 * MIB)
    assert said(machine.handle(fx.TakeRoom("n0", 1, MIB))) == [ev.NodeRoom(1, "n0", 0)]
    # A gap is all that there is memory for.
    machine = agent(8 * MIB, replica_bytes=2 * MIB)
    assert said(machine.handle(fx.TakeRoom("n0", 1, 9 * MIB))) == [ev.NodeRoom(1, "n0", 2 * MIB)]
    # Some of it is better than nothing.
    machine = agent(10 * MIB, replica_bytes=2 * MIB)
    assert said(machine.handle(fx.TakeRoom("n0", 1, 9 * MIB))) == [ev.NodeRoom(1, "n0", 4 * MIB)]
    assert machine.ledger.total() == 10 * MIB


def test_memory_that_serves_readers_gives_way() -> None:
    machine = agent(8 * MIB)
    machine.ledger.free(machine.ledger.lease(5, 6 * MIB))
    effects = machine.handle(fx.TakeRoom("n0", 1, 3 * MIB))
    assert fx.OpenArena(0, "") in effects
    assert fx.Punch(5, 0, 6 * MIB) in effects
    assert said(effects) == [ev.NodeRoom(1, "n0", 4 * MIB)]
    assert machine.ledger.total() <= machine.ledger.budget


def test_a_group_that_is_over_takes_no_room() -> None:
    machine = agent(32 * MIB)
    assert machine.handle(fx.TakeRoom("n0", 2, MIB)) == []
    machine.handle(fx.AbortGroup("n0", 1))
    assert machine.handle(fx.TakeRoom("n0", 1, MIB)) == []
    assert machine.ledger.total(Use.LEASED) == EXTENT_ALIGN


def test_a_round_that_falls_short_says_what_is_kept_all_the_same() -> None:
    """Else the next plan would take its memory for free."""
    machine = agent(32 * MIB, replica_bytes=2 * MIB)
    machine.handle(fx.StoreChunks("n0", 1, 1, NOTHING, {}))
    kept, missing = np.ones((1, 32), np.uint8), np.zeros((1, 32), np.uint8)
    (short,) = said(machine.handle(ev.JobShort(1, 1, missing, (), (), kept)))
    assert short.copies is kept
    assert machine.held((1,))[0].copies is kept


# -- the controller's side ---------------------------------------------------------


def storing() -> tuple[Storing, Nodes]:
    """A group on two nodes whose first plan is to be made."""
    table = Nodes()
    for name in ("n0", "n1"):
        link = NodeLink(name, 1e9, 1e9, name)
        table.join(ev.NodeJoined(name, "1", f"tcp://{name}", link, "s"))
    found = Storing(1, 5, ("n0", "n1"), 2, False, {"n0", "n1"})
    found.hashed = {name: report_of(name, {0: "x"}) for name in found.members}
    return found, table


def short_plan(room: dict[str, int]) -> GroupPlan:
    return GroupPlan({}, 0.0, 0, 0, 70, ("a note",), False, room)


def test_room_is_asked_for_a_few_times_only() -> None:
    found, table = storing()
    for number in range(1, ROOM_ASKS_MAX + 1):
        found.next_round(table, counted=False)
        asked = found.take_plan(short_plan({"n0": number * 100, "n9": 5}), table)
        assert [e for e in asked if isinstance(e, fx.TakeRoom)] == [
            fx.TakeRoom("n0", 1, number * 100)
        ]
        assert not found.thin
        assert found.on_room(ev.NodeRoom(1, "n0", number * 100))
        assert found.gained
    found.next_round(table, counted=False)
    found.take_plan(short_plan({"n0": 99_999}), table)
    assert "70 bytes cannot be copied" in found.thin
    assert found.notes == ["a note"]
    # None of these plans was one that a lost node might still need.
    for _ in range(ROUNDS_MAX):
        assert isinstance(found.next_round(table), list)


def test_answers_that_nobody_waits_for_only_say_what_there_is() -> None:
    found, table = storing()
    found.next_round(table)
    assert not found.on_room(ev.NodeRoom(1, "n7", 50))
    assert not found.on_room(ev.NodeRoom(1, "n0", 50))
    found.take_plan(short_plan({"n0": 60, "n1": 60}), table)
    assert not found.complete
    assert not found.on_room(ev.NodeRoom(1, "n0", 50))
    assert found.again("n1")[0] == fx.TakeRoom("n1", 1, 60)
    assert found.on_room(ev.NodeRoom(1, "n1", 0))
    assert not found.gained
    found.stay_short()
    assert found.thin
    assert found.shares == {"n0": 50, "n1": 0}


def test_what_a_short_node_keeps_counts_in_the_next_plan() -> None:
    found, table = storing()
    found.next_round(table)
    keeping = NodeOrder(np.zeros(0, np.int64), (), True)
    found.take_plan(GroupPlan({"n1": keeping}, 0.0, 0, 0, 0, (), False), table)
    kept, missing = np.ones((1, 32), np.uint8), np.zeros((1, 32), np.uint8)
    assert found.on_short(ev.NodeShort(1, "n1", 1, missing, (), (), kept), table)
    (plan,) = found.next_round(table)  # type: ignore[misc]
    assert plan.copies["n1"] is kept


def test_a_later_plan_forgets_what_was_asked_for_the_one_before() -> None:
    found, table = storing()
    found.next_round(table)
    found.take_plan(short_plan({"n1": 60}), table)
    found.lose("n1")
    assert found.again("n1") == []
    found.holders.add("n1")
    found.lost.clear()
    found.next_round(table)
    found.take_plan(short_plan({"n0": 60}), table)
    found.next_round(table)
    assert not found.on_room(ev.NodeRoom(1, "n0", 60))
