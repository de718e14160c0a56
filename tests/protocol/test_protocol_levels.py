"""What ``groupio status`` asks of a group: its levels, and which nodes it waits for."""

from __future__ import annotations

from typing import Any

from protocol_help import opened, report_of

from groupio.errors import LevelUnreachable
from groupio.model import Level
from groupio.protocol import effects as fx
from groupio.protocol.group import Group
from groupio.protocol.state import Phase, Seat
from groupio.protocol.storing import Storing


def group_on(*nodes: str) -> Group:
    """A group with one rank on each of these nodes."""
    group = Group(1, 5, 1, 1, len(nodes))
    for rank, node in enumerate(nodes):
        group.seats[rank] = Seat(opened(rank, len(nodes), 5, node=node), copied=True)
    return group


def test_levels_are_those_that_the_members_were_told_of() -> None:
    group = group_on("n0", "n1")
    assert group.levels == ()
    group.staged()
    assert group.levels == (Level.STAGED,)
    error = LevelUnreachable("one node", level="replicated")
    group._levels.append(fx.TellUnreachable(group.seats[0].seat, Level.REPLICATED, error))
    group._tell(Level.DURABLE)
    assert group.levels == (Level.STAGED, Level.DURABLE)


def test_only_a_group_that_is_stored_waits_for_nodes() -> None:
    group = group_on("n0", "n1", "n0")
    assert group.waits_for == ()
    group.phase = Phase.STORING
    assert group.waits_for == ("n0", "n1")
    group._reports["n0"] = report_of("n0", {0: "a", 2: "b"})
    assert group.waits_for == ("n1",)


def test_a_planned_group_waits_for_hashes_and_then_for_orders() -> None:
    group = group_on("n0", "n1")
    group.phase = Phase.STORING
    storing = group.storing = Storing(1, 5, ("n0", "n1"), 1, False, {"n0", "n1"})
    storing.hashed["n1"] = report_of("n1", {1: "b"})
    assert group.waits_for == ("n0",)
    storing.hashed["n0"] = report_of("n0", {0: "a"})
    assert group.waits_for == ()
    order: Any = "to be finished"
    storing._orders.update(n2=[order], n1=[order], n0=[])
    assert group.waits_for == ("n1", "n2")
