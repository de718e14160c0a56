"""How groups of several nodes get their memory, and never wait for each other in a circle."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest
from protocol_help import layout_of

from groupio.model import DecisionKey
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol import reasons
from groupio.protocol.admission import Admission
from groupio.protocol.agent import AgentMachine
from groupio.protocol.ledger import EXTENT_ALIGN, Ledger

KEY = DecisionKey(1, 5, 1)


def admit(node: str, group: int = 1, **fields: Any) -> fx.AdmitGroup:
    return fx.AdmitGroup(node, group, KEY, (), True, "wait", **fields)


def test_an_answer_of_the_first_try_is_not_taken_for_one_of_the_second() -> None:
    admission = Admission()
    admission.begin([admit("n1", wait=False), admit("n0", wait=False)])
    assert admission.admitted(ev.NodeAdmitted(1, "n1")) == []
    effects = admission.busy("n0")
    assert effects == [fx.RetractGroup("n1", 1), admit("n0")]
    assert admission.busy("n0") == []
    assert admission.admitted(ev.NodeAdmitted(1, "n0")) == []
    assert admission.admitted(ev.NodeAdmitted(1, "n9", waited=True)) == []
    assert admission.admitted(ev.NodeAdmitted(1, "n0", waited=True)) == [admit("n1")]
    assert admission.again("n1") == [admit("n1", again=True)]
    assert admission.lose("n1") == []
    assert admission.lose("n1") == []
    assert admission.complete


def test_a_node_that_was_busy_at_first_may_be_admitted_all_the_same() -> None:
    """Its first answer was lost on the way, and it was asked again."""
    admission = Admission()
    admission.begin([admit("n1", wait=False), admit("n0", wait=False)])
    assert admission.busy("n0") == []
    assert admission.admitted(ev.NodeAdmitted(1, "n0")) == []
    assert admission.admitted(ev.NodeAdmitted(1, "n1")) == []
    assert admission.complete
    assert admission.asked == {"n0", "n1"}


def test_memory_that_a_node_took_before_its_turn_is_given_back() -> None:
    admission = Admission()
    admission.begin([admit("n1", wait=False), admit("n0", wait=False)])
    admission.busy("n1")
    admission.admitted(ev.NodeAdmitted(1, "n0"))
    assert admission.asked == {"n0"}
    assert admission.admitted(ev.NodeAdmitted(1, "n1")) == [fx.RetractGroup("n1", 1)]
    assert admission.admitted(ev.NodeAdmitted(1, "n0", waited=True)) == [admit("n1")]
    assert not admission.complete


def test_nodes_that_cannot_hold_copies_are_named() -> None:
    admission = Admission()
    admission.begin([admit("n0", replica_bytes=5), admit("n1", replica_bytes=5)])
    admission.admitted(ev.NodeAdmitted(1, "n0", replica_bytes=0))
    admission.admitted(ev.NodeAdmitted(1, "n1", replica_bytes=5, in_memory=False))
    assert admission.cramped == {"n0", "n1"}
    assert "n0, n1" in reasons.cramped(2, ("n0", "n1"))


# -- two jobs, two nodes ---------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_groups_that_need_room_on_the_same_full_nodes_all_get_it(seed: int) -> None:
    """Each group needs nearly all memory of both nodes, for its member there and for copies."""
    rng = random.Random(seed)
    agents = {name: AgentMachine(name, Ledger(4 * EXTENT_ALIGN)) for name in ("n0", "n1")}
    groups: dict[int, Admission] = {}
    orders: dict[tuple[int, str], deque[Any]] = {}
    answers: dict[tuple[int, str], deque[Any]] = {}
    for group in range(1, 4):
        for node, agent in agents.items():
            client = f"{node}-{group}"
            agent.handle(ev.LeaseAsked(client, 1, 0, layout_of(EXTENT_ALIGN)))
            orders[group, node], answers[group, node] = deque(), deque()
        admission = groups[group] = Admission()
        begun = admission.begin(
            fx.AdmitGroup(
                node,
                group,
                DecisionKey(group, 5, 1),
                (fx.MemberSeat(0, f"{node}-{group}", 1),),
                True,
                "wait",
                planned=True,
                replica_bytes=2 * EXTENT_ALIGN,
                wait=False,
            )
            for node in rng.sample(sorted(agents), 2)
        )
        for effect in begun:
            orders[group, effect.node].append(effect)
    done: set[int] = set()
    while len(done) < len(groups):
        ways = [q for q in (orders, answers) for key in q if q[key]]
        assert ways, f"groups {set(groups) - done} wait for each other"
        way = rng.choice(ways)
        group, node = rng.choice([key for key in way if way[key]])
        if way is orders:
            for report in agents[node].handle(orders[group, node].popleft()):
                if isinstance(report, fx.Report):
                    answers[report.event.group, node].append(report.event)
            continue
        event = answers[group, node].popleft()
        admission = groups[group]
        busy = isinstance(event, ev.NodeBusy)
        for effect in admission.busy(node) if busy else admission.admitted(event):
            orders[group, effect.node].append(effect)
        if admission.complete and group not in done:
            done.add(group)
            for name in agents:
                orders[group, name].append(fx.CloseGroup(name, group, False, True))
