"""A node says only of its own ranks that they have copied, and reports only their items."""

from __future__ import annotations

from itertools import count

import pytest
from protocol_help import opened, report_of

from groupio.errors import GroupAborted
from groupio.model import Level, NodeLink
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol.controller import Controller


def two_nodes(*, planned: bool = True) -> tuple[Controller, int]:
    """A group of rank 0 on n0 and rank 1 on n1 that copies."""
    made = Controller(numbers=count(1), node="n0", resumes=True)
    for node in ("n0", "n1") if planned else ():
        link = NodeLink(node, 1e9, 1e9, node)
        made.handle(ev.NodeJoined(node, node * 16, "", link, "s"))
    made.handle(opened(0, 2, node="n0"))
    state = ev.StoreState("job", (), (), (), 0, node_local=False, store_id="s")
    made.handle(ev.StoreOpened(state))
    made.handle(opened(1, 2, node="n1"))
    (group,) = made.groups
    for node in ("n0", "n1"):
        made.handle(ev.NodeAdmitted(group, node))
    effects = made.handle(ev.InflightPublished(group))
    assert any(isinstance(effect, fx.StartCopy) for effect in effects)
    return made, group


def refused(made: Controller, event: ev.ControllerEvent) -> str:
    """The group ends because of this event; why."""
    effects = made.handle(event)
    assert [e.node for e in effects if isinstance(e, fx.AbortGroup)] == ["n0", "n1"]
    (group,) = made.groups.values()
    assert isinstance(group.error, GroupAborted)
    return group.error.message


def test_the_ranks_of_a_node_are_taken_from_it() -> None:
    made, group = two_nodes()
    effects = made.handle(ev.MemberCopied(group, 0, "n0"))
    effects += made.handle(ev.MemberCopied(group, 1, "n1"))
    told = [e for e in effects if isinstance(e, fx.TellReached) and e.level is Level.STAGED]
    assert [e.seat.rank for e in told] == [0, 1]


@pytest.mark.parametrize("rank", [0, 7])
def test_another_nodes_rank_has_not_copied_because_a_node_says_so(rank: int) -> None:
    made, group = two_nodes()
    made.handle(ev.MemberCopied(group, 1, "n1"))
    message = refused(made, ev.MemberCopied(group, rank, "n1"))
    assert f"Node n1 sent a report of rank(s) {rank}, which are not on it" in message


def test_a_report_of_another_nodes_rank_is_not_taken() -> None:
    made, group = two_nodes()
    made.handle(ev.MemberCopied(group, 0, "n0"))
    made.handle(ev.MemberCopied(group, 1, "n1"))
    report = report_of("n1", {0: "theirs", 1: "own"})
    message = refused(made, ev.NodeHashed(group, "n1", report))
    assert "Node n1 sent a report of rank(s) 0, which are not on it" in message


@pytest.mark.parametrize("planned", [True, False])
def test_another_nodes_rank_is_not_stored_because_a_node_says_so(planned: bool) -> None:
    made, group = two_nodes(planned=planned)
    report = report_of("n1", {0: "theirs", 1: "own"})
    message = refused(made, ev.NodeStored(group, "n1", report))
    assert "Node n1 sent a report of rank(s) 0, which are not on it" in message
