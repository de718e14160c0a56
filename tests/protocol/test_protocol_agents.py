"""Agents of a job, one step at a time: what comes twice, late, or from the wrong one."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from model_flush import PlannedJob, as_array, digest_of
from protocol_help import layout_of, opened

from groupio.errors import GroupAborted, InvalidInput, Outcome, StorageError
from groupio.model import DecisionKey, Level, NodeLink
from groupio.plan.grouped import GroupPlan, NodeOrder
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol import reasons
from groupio.protocol.agent import AgentMachine
from groupio.protocol.controller import Controller
from groupio.protocol.group import Phase
from groupio.protocol.ledger import EXTENT_ALIGN, Ledger
from groupio.protocol.nodes import Nodes
from groupio.protocol.resume import REFUSALS_REMEMBERED, Refusals
from groupio.protocol.storing import ROUNDS_MAX, Storing, make_plan

KEY = DecisionKey(1, 5, 1)


def link(node: str, domain: str = "") -> NodeLink:
    return NodeLink(node, 1e9, 1e10, domain or node)


def joins(node: str, **fields: Any) -> ev.NodeJoined:
    given: dict[str, Any] = {
        "node": node,
        "life": "1",
        "address": f"tcp://{node}",
        "link": link(node),
        "store_id": "s",
    }
    return ev.NodeJoined(**(given | fields))


def admit(node: str, group: int = 1, **fields: Any) -> fx.AdmitGroup:
    return fx.AdmitGroup(node, group, KEY, (), True, "wait", **fields)


def machine(budget: int = 8 * EXTENT_ALIGN) -> AgentMachine:
    return AgentMachine("n0", Ledger(budget))


def begun(agent: AgentMachine, group: int = 1, **fields: Any) -> AgentMachine:
    """The agent has admitted a group without members, begun, and hashed nothing."""
    agent.handle(admit("n0", group, planned=True, **fields))
    agent.handle(fx.StartCopy("n0", group))
    job = PlannedJob("n0", "1", KEY, True, True)
    agent.handle(ev.JobHashed(group, job.report()))
    return agent


def store(group: int, number: int) -> fx.StoreChunks:
    return fx.StoreChunks("n0", group, number, NodeOrder(np.zeros(0, np.int64), (), False), {})


# -- the table of nodes ---------------------------------------------------------


def test_a_node_is_alive_in_one_life_at_a_time() -> None:
    nodes = Nodes()
    assert not nodes.gone("n0"), "where nobody joins, nobody is lost"
    assert nodes.join(joins("n0"))
    assert not nodes.join(joins("n0"))
    assert "n0" in nodes
    assert nodes.gone("n1")
    assert isinstance(nodes.refuse(joins("n0", life="2"), "s"), InvalidInput)
    assert isinstance(nodes.refuse(joins("n1", store_id="t"), "s"), InvalidInput)
    assert not nodes.lose("n0", "2")
    assert not nodes.lose("n1", "")
    assert nodes.lose("n0", "1")


def test_liars_keep_out_of_the_fabric_for_the_rest_of_their_life() -> None:
    nodes = Nodes()
    nodes.join(joins("n0"))
    nodes.join(joins("n1"))
    nodes.liars.add("n0")
    assert [x.fabric_ok for x in nodes.links(("n0", "n1", "n9"))] == [False, True]
    assert [x.fabric_ok for x in nodes.links(("n0", "n1"), avoid=("n1",))] == [False, False]
    nodes.lose("n0", "1")
    nodes.join(joins("n0", life="2"))
    assert nodes.liars == set()
    nodes.measure(msgspec.structs.replace(link("n1"), fabric_ok=False))
    nodes.measure(link("n7"))
    assert not nodes.links(("n1",))[0].fabric_ok
    assert nodes.addresses(("n0", "n7")) == {"n0": "tcp://n0"}


# -- the agent ---------------------------------------------------------


def test_rounds_are_done_one_after_the_other_and_once() -> None:
    agent = begun(machine())
    ran = agent.handle(store(1, 1))
    assert [e.round for e in ran] == [1]
    assert agent.handle(store(1, 2)) == []
    assert agent.handle(store(1, 2)) == []
    assert agent.handle(store(9, 3)) == []
    job = PlannedJob("n0", "1", KEY, True, True)
    effects = agent.handle(ev.JobStored(1, job.report(), 1))
    assert [type(e).__name__ for e in effects] == ["Report", "RunOrder"]
    short = ev.JobShort(1, 2, as_array({digest_of("x")}), ("n1",))
    assert [type(e).__name__ for e in agent.handle(short)] == ["Report"]
    assert agent.handle(ev.JobStored(1, job.report(), 2)) != []


def test_what_is_left_of_a_group_that_is_over_says_nothing() -> None:
    agent = machine()
    none = np.zeros((0, 32), np.uint8)
    job = PlannedJob("n0", "1", KEY, True, True)
    for event in (
        ev.JobHashed(7, job.report()),
        ev.JobReplicated(7, 1, none),
        ev.JobStored(7, job.report(), 1),
        ev.JobShort(7, 1, none, ()),
        ev.JobFailed(7, StorageError("x")),
        ev.JobIdle(7),
        ev.ControllerLeft((7,)),
        fx.RetractGroup("n0", 7),
        fx.AdoptGroup("n0", KEY, 8),
        fx.DropHeld("n0", KEY, False, False),
        fx.CloseGroup("n0", 7, False, False),
        fx.StoreAgain("n0", 7),
    ):
        assert agent.handle(event) == []


def test_only_a_failed_job_of_a_sealed_group_that_writes_at_once_is_repeated() -> None:
    again, failed = fx.StoreAgain("n0", 1), ev.JobFailed(1, StorageError("x"))
    planned = begun(machine())
    planned.handle(failed)
    assert planned.handle(again) == []

    agent = machine()
    agent.handle(ev.LeaseAsked("c0", 1, 0, layout_of(1 << 20)))
    seat = fx.MemberSeat(0, "c0", 1)
    agent.handle(fx.AdmitGroup("n0", 1, KEY, (seat,), True, "wait"))
    agent.handle(fx.StartCopy("n0", 1))
    assert agent.handle(failed) == [fx.Report(ev.NodeFailed(1, "n0", failed.error, True), 1)]
    assert agent.handle(again) == []  # the member still copies
    agent.handle(ev.WaveCopied("c0", 1, 0))
    assert agent.handle(again) == [fx.RepeatJob(1)]
    assert agent.handle(again) == []
    agent.handle(failed)
    agent.handle(fx.AbortGroup("n0", 1))
    assert agent.handle(again) == []


def test_a_group_that_is_closed_while_its_job_works_ends_first() -> None:
    agent = begun(machine(), replica_bytes=1)
    agent.handle(store(1, 1))
    close = fx.CloseGroup("n0", 1, True, True)
    assert agent.handle(close) == [fx.CancelJob(1)]
    assert agent.handle(close) == []
    assert agent.handle(ev.JobFailed(1, StorageError("x"))) == []
    assert agent.held((1,)) == ()
    assert agent.handle(fx.AdoptGroup("n0", KEY, 2)) == []
    assert agent.handle(ev.JobIdle(1)) == [fx.EndJob(1, False)]
    assert agent.groups == {}


def test_memory_that_peers_may_be_sent_from_is_free_only_when_the_job_says_so() -> None:
    budget = 2 * EXTENT_ALIGN
    agent = begun(machine(budget), replica_bytes=budget)
    assert agent.ledger.available == 0
    assert agent.handle(fx.CloseGroup("n0", 1, True, False)) == [fx.CancelJob(1)]
    agent.handle(admit("n0", 2, planned=True, replica_bytes=budget))
    assert not agent.groups[2].admitted
    agent.handle(ev.JobIdle(1))
    assert agent.groups[2].admitted


def test_a_group_that_is_dropped_while_it_is_aborted_waits_for_its_job() -> None:
    agent = begun(machine())
    agent.handle(store(1, 1))
    assert agent.handle(fx.AbortGroup("n0", 1)) == [fx.CancelJob(1)]
    assert agent.handle(fx.DropHeld("n0", KEY, False, False)) == []
    assert agent.handle(ev.JobIdle(1)) == [fx.EndJob(1, True)]


def test_a_group_that_has_begun_is_not_retracted_and_keeps_one_order_without_a_controller() -> None:
    agent = begun(machine())
    assert agent.handle(fx.RetractGroup("n0", 1)) == []
    agent.handle(store(1, 1))
    agent.handle(store(1, 2))
    assert agent.handle(ev.ControllerLeft((1,))) == []
    assert len(agent.groups[1].orders) == 1
    held = agent.held((1, 5))[0]
    assert (held.round, held.planned, held.opened) == (2, True, ())


def test_an_order_under_the_number_of_an_earlier_controller_is_ignored() -> None:
    agent = begun(machine())
    assert [e.event.group for e in agent.handle(fx.AdoptGroup("n0", KEY, 40))] == [40, 40]
    assert agent.handle(store(1, 1)) == []
    assert [e.group for e in agent.handle(store(40, 1))] == [1]
    assert agent.handle(admit("n0", 1, planned=True, again=True)) == []


def test_the_answer_to_an_order_that_is_repeated_is_repeated() -> None:
    agent = machine()
    agent.handle(admit("n0", wait=False, planned=True))
    assert agent.handle(admit("n0", wait=False, planned=True)) == []
    waited = agent.handle(admit("n0", planned=True))
    assert [e.event.waited for e in waited] == [True]
    again = agent.handle(admit("n0", planned=True, again=True))
    assert [e.event.waited for e in again] == [True]
    refused = machine()
    seat = fx.MemberSeat(0, "c0", 1)
    order = fx.AdmitGroup("n0", 3, KEY, (seat,), True, "wait")
    refused.handle(order)
    effects = refused.handle(msgspec.structs.replace(order, again=True))
    assert isinstance(effects[0].event, ev.NodeRefused)


def test_chunks_serve_readers_until_their_memory_is_needed() -> None:
    agent = machine(2 * EXTENT_ALIGN)
    agent.keeps_content = True
    for group, client in ((1, "c0"), (2, "c1")):
        asked = ev.LeaseAsked(client, 1, 0, layout_of(1 << 20), opened(0, 1, client=client))
        agent.handle(asked)
        agent.handle(fx.AdmitGroup("n0", group, KEY, (fx.MemberSeat(0, client, 1),), True, "wait"))
        agent.handle(fx.StartCopy("n0", group))
        agent.handle(ev.WaveCopied(client, 1, 0))
        job = PlannedJob("n0", "1", KEY, True, False)
        agent.handle(ev.JobStored(group, job.report()))
        closed = agent.handle(fx.CloseGroup("n0", group, True, True))
        assert closed == [fx.KeepContent(group, KEY), fx.EndJob(group, False)]
    assert agent.handle(ev.MemberGone("c0", process_gone=True)) == [], "its chunks stay"
    agent.handle(ev.LeaseAsked("c1", 2, 0, layout_of(3 << 20)))
    order = fx.AdmitGroup("n0", 3, KEY, (fx.MemberSeat(0, "c1", 2),), True, "wait")
    assert agent.handle(order)[:5] == [
        fx.DropContent(1, 0, EXTENT_ALIGN),
        fx.Punch(1, 0, EXTENT_ALIGN),
        fx.DropContent(2, 0, EXTENT_ALIGN),
        fx.Punch(2, 0, EXTENT_ALIGN),
        fx.CloseArena(1),
    ]


def test_what_the_agent_itself_uses_is_not_leased() -> None:
    agent = machine(16 * EXTENT_ALIGN)
    window = 5 * EXTENT_ALIGN  # the smallest one, of two chunks and a page

    def ask(group: int, nbytes: int) -> list[Any]:
        agent.handle(ev.LeaseAsked("c0", group, 0, layout_of(nbytes)))
        seat = fx.MemberSeat(0, "c0", group)
        return agent.handle(fx.AdmitGroup("n0", group, KEY, (seat,), True, "wait"))

    assert agent.handle(ev.MemoryReserved(12 * EXTENT_ALIGN)) == []
    assert ask(1, 8 * EXTENT_ALIGN) == []
    admitted = agent.handle(ev.MemoryReserved(-4 * EXTENT_ALIGN))
    assert isinstance(admitted[-1].event, ev.NodeAdmitted)
    closed = agent.handle(fx.CloseGroup("n0", 1, False, True))
    assert closed == []
    # Free memory gives way to the agent.
    assert agent.handle(ev.MemoryReserved(4 * EXTENT_ALIGN)) == [fx.Punch(1, 0, 8 * EXTENT_ALIGN)]
    # A state larger than the budget goes through what is left, if that is enough for a window.
    assert ask(2, 40 * EXTENT_ALIGN) == []
    admitted = agent.handle(ev.MemoryReserved(-4 * EXTENT_ALIGN))
    assert not admitted[-1].event.in_memory
    assert window <= agent.ledger.total() <= 8 * EXTENT_ALIGN


def test_the_newest_chunks_are_spared_while_there_is_room() -> None:
    ledger = Ledger(4 * EXTENT_ALIGN)
    first, second = ledger.lease(1, 1), ledger.lease(1, 1)
    ledger.free(first, DecisionKey(1, 1, 1))
    ledger.free(second, DecisionKey(1, 2, 1))
    assert ledger.lease(1, 1, sparing=True) is first
    assert ledger.lease(1, 1, sparing=True) is not second
    third = ledger.lease(1, 1, sparing=True)
    assert third is not second
    assert ledger.lease(1, 1, sparing=True) is second, "there is no other room"
    assert Ledger(0).lease(1, 1, sparing=True).offset == 0


# -- the controller ---------------------------------------------------------


def running() -> Controller:
    """Two agents, and a group of one member that copies."""
    controller = Controller(resumes=True)
    controller.handle(joins("n0"))
    controller.handle(joins("n1"))
    controller.handle(opened(0, 1, 5, total_bytes=1 << 20))
    state = ev.StoreState("job", (), (), (), 0, undecided=(), store_id="s")
    controller.handle(ev.StoreOpened(state))
    controller.handle(ev.InflightPublished(1))
    for node in ("n0", "n1"):
        controller.handle(ev.NodeAdmitted(1, node))
    assert controller.groups[1].phase is Phase.COPYING
    return controller


def storing(controller: Controller) -> Storing:
    """Its group is sealed and hashed; a plan is asked for."""
    job = PlannedJob("n0", "1", KEY, True, True, content={0: "x"}, hashed=True)
    controller.handle(ev.MemberCopied(1, 0, "n0"))
    effects = controller.handle(ev.NodeHashed(1, "n0", job.report()))
    assert isinstance(effects[-1], fx.MakePlan)
    found = controller.groups[1].storing
    assert found is not None
    return found


def test_what_was_on_its_way_when_its_node_was_lost_is_ignored() -> None:
    controller = running()
    controller.handle(ev.NodeLost("n1", "1", "x"))
    assert controller.handle(ev.NodeFailed(1, "n1", StorageError("x"))) == []
    assert controller.handle(opened(0, 1, 6, node="n1", client="c7")) == []
    assert (
        controller.handle(ev.NodeStored(1, "n1", PlannedJob("n1", "", KEY, True, True).report()))
        == []
    )


def test_a_planner_that_fails_ends_the_group() -> None:
    controller = running()
    storing(controller)
    error = StorageError("the planner is broken")
    assert controller.handle(ev.Planned(1, 9, error=error)) == [], "not the one that is awaited"
    effects = controller.handle(ev.Planned(1, 1, error=error))
    assert [e.node for e in effects if isinstance(e, fx.AbortGroup)] == ["n0", "n1"]


def test_a_bad_plan_is_answered_with_its_error() -> None:
    answer = make_plan(fx.MakePlan(1, 1, (), (link("n0"), link("n0")), 1, {}, (), (), {}))
    assert isinstance(answer.error, InvalidInput)


def test_a_node_that_is_back_cannot_fail_the_group_that_goes_on_without_it() -> None:
    controller = running()
    storing(controller)
    controller.handle(ev.NodeLost("n1", "1", "x"))
    held = ev.HeldGroup(KEY, 1, 1, 1, (), (), True, np.zeros((0, 32), np.uint8))
    effects = controller.handle(joins("n1", held=(held,)))
    assert effects == [fx.AdoptGroup("n1", KEY, 1)]
    assert controller.handle(ev.NodeFailed(1, "n1", StorageError("x"))) == []
    none = np.zeros((0, 32), np.uint8)
    assert controller.handle(ev.NodeReplicated(1, "n1", 1, none)) == []
    job = PlannedJob("n1", "1", KEY, True, True)
    assert controller.handle(ev.NodeStored(1, "n1", job.report(), 1)) == []
    assert controller.groups[1].phase is Phase.STORING


def test_a_group_of_the_same_key_but_another_number_is_not_this_one() -> None:
    controller = running()
    held = ev.HeldGroup(KEY, 1, 1, 77, (), (), True, np.zeros((0, 32), np.uint8))
    effects = controller.handle(joins("n1", held=(held,)))
    assert fx.DropHeld("n1", KEY, False, True, 77) in effects


def test_a_group_is_not_planned_for_ever() -> None:
    controller = running()
    found = storing(controller)
    for number in range(1, ROUNDS_MAX + 1):
        order = NodeOrder(np.zeros(0, np.int64), (), True)
        plan = GroupPlan({"n0": order, "n1": order}, 0.0, 0, 0, 0, ("a note",), False)
        controller.handle(ev.Planned(1, number, plan))
        digests = as_array({digest_of("x")})
        # What another round's order lacks says nothing of this one.
        assert controller.handle(ev.NodeShort(1, "n1", number + 50, digests, ("n0",))) == []
        effects = controller.handle(ev.NodeShort(1, "n1", number, digests, ("n0",)))
    assert [e.node for e in effects if isinstance(e, fx.AbortGroup)] == ["n0", "n1"]
    assert "a note" in str(controller.groups[1].error)
    assert found.round == ROUNDS_MAX
    assert "so it is given up" in str(reasons.rounds_over(5, 8, ()))


def test_the_store_of_a_sealed_group_may_be_away_when_it_is_opened_again() -> None:
    controller = running()
    storing(controller)
    order = NodeOrder(np.zeros(0, np.int64), (), False)
    controller.store_closed()
    controller.handle(ev.Planned(1, 1, GroupPlan({"n0": order}, 0.0, 0, 0, 0, (), False)))
    job = PlannedJob("n0", "1", KEY, True, True, content={0: "x"}, hashed=True)
    effects = controller.handle(ev.NodeStored(1, "n0", job.report(), 1))
    assert effects == [fx.OpenStore((KEY,), True, True)]
    away = StorageError("no answer", errno=107)
    assert controller.handle(ev.StoreUnavailable(away)) == [fx.StartTimer("away-store", 5.0)]
    assert controller.handle(ev.TimerFired("away-store")) == [fx.OpenStore((KEY,), True, True)]
    effects = controller.handle(ev.StoreUnavailable(StorageError("broken", errno=5)))
    assert [e.node for e in effects if isinstance(e, fx.AbortGroup)] == ["n0", "n1"]


def test_the_loss_of_an_older_life_says_nothing_of_a_node_that_lives() -> None:
    controller = running()
    assert controller.handle(ev.NodeLost("n1", "older", "its process ended")) == []
    assert "n1" in controller.nodes
    controller.handle(ev.NodeLost("n9", "older", "its process ended"))
    assert "n9" in controller.resume.gone


def test_a_store_that_is_away_is_not_tried_again_for_nothing() -> None:
    controller = Controller(resumes=True)
    controller.open_store(create=True)
    away = StorageError("no answer", errno=107)
    assert controller.handle(ev.StoreUnavailable(away)) == []


def test_what_a_sealed_group_waits_for_is_known() -> None:
    controller = running()
    group = controller.groups[1]
    assert group.waits_for == ()
    controller.handle(ev.MemberCopied(1, 0, "n0"))
    assert group.waits_for == ("n0",)
    assert group.levels == (Level.STAGED,)
    job = PlannedJob("n0", "1", KEY, True, True, content={0: "x"}, hashed=True)
    controller.handle(ev.NodeHashed(1, "n0", job.report()))
    order = NodeOrder(np.zeros(0, np.int64), (), True)
    plan = GroupPlan({"n0": order, "n1": order}, 0.0, 0, 0, 0, (), False)
    controller.handle(ev.Planned(1, 1, plan))
    assert group.waits_for == ("n0", "n1")
    # A node that keeps its record already lacks chunks all the same.
    none = np.zeros((0, 32), np.uint8)
    controller.handle(ev.NodeReplicated(1, "n1", 1, none))
    short = ev.NodeShort(1, "n1", 1, as_array({digest_of("x")}), ("n0",))
    assert [type(e) for e in controller.handle(short)] == [fx.MakePlan]
    eager = Controller()
    eager.handle(opened(0, 1, 5))
    eager.handle(ev.StoreOpened(ev.StoreState("job", (), (), (), 0)))
    eager.handle(ev.InflightPublished(1))
    eager.handle(ev.NodeAdmitted(1, "n0"))
    eager.handle(ev.MemberCopied(1, 0, "n0"))
    assert eager.groups[1].waits_for == ("n0",)


def test_an_answer_that_was_not_heard_is_given_again() -> None:
    controller = running()
    asked = opened(0, 1, 4, save_id=9)
    assert controller.handle(asked) != [], "it is older than the one in flight"
    effects = controller.handle(joins("n0", opens=(asked,)))
    told = [e for e in effects if isinstance(e, fx.TellFailed)]
    assert [type(e.error).__name__ for e in told] == ["StaleEpoch"]
    controller.refusals = Refusals()
    effects = controller.handle(joins("n0", opens=(asked,)))
    told = [e for e in effects if isinstance(e, fx.TellFailed)]
    assert [type(e.error).__name__ for e in told] == ["ControllerLost"]
    assert told[0].error.outcome is Outcome.NOT_COMMITTED


def test_a_client_is_given_up_with_its_node_and_may_come_back_with_it() -> None:
    controller = running()
    arrived = ev.ClientArrived("c5", ev.Process(9, 1), 0, 1, node="n1")
    controller.handle(arrived)
    controller.handle(ev.NodeLost("n1", "1", "x"))
    assert controller.presence.on_node("n1") == []
    controller.handle(joins("n1", clients=(arrived,)))
    assert controller.presence.on_node("n1") == [arrived]
    controller.handle(joins("n1"))
    assert controller.presence.on_node("n1") == []


def test_only_the_newest_refusals_are_remembered() -> None:
    refusals = Refusals()
    error = GroupAborted("x")
    seats = [fx.MemberSeat(0, "c", i) for i in range(REFUSALS_REMEMBERED + 1)]
    refusals.note([fx.TellFailed(seat, error) for seat in seats])
    assert refusals.of("c", 0) is None
    assert refusals.of("c", 1) is error


@pytest.mark.parametrize("replicas", [0, 17])
def test_absurd_replicas_are_refused(replicas: int) -> None:
    error = reasons.absurd(opened(0, 1, 1, replicas=replicas))
    assert "replicas" in str(error)


def test_an_agent_knows_whose_saves_it_holds() -> None:
    agent = begun(machine())
    assert not agent.has_save("c0")
    seat = fx.MemberSeat(0, "c0", 1)
    agent.handle(ev.LeaseAsked("c0", 1, 0, layout_of(100), opened(0, 5)))
    agent.handle(fx.AdmitGroup("n0", 2, DecisionKey(1, 6, 1), (seat,), True, "wait"))
    assert agent.has_save("c0")
    assert not agent.has_save("c1")
