"""Which agent is told what, and who may say what."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from groupio.controller import messages as cm
from groupio.controller.lines import Line, Lines, from_ages
from groupio.errors import GroupAborted, InvalidInput
from groupio.model import ChunkTable, Level, MemberTable, NodeLink, NodeReport
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol.wireform import WireForm

PROCESS = ev.Process(10, 1)


class Peer:
    """The other end of a line."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, payload: bytes) -> None:
        self.sent.append(WireForm(cm.FROM_CONTROLLER).decode(payload))


def line(lines: Lines, node: str) -> tuple[Line, Peer]:
    peer = Peer()
    hello = cm.NodeHello(1, "0", node, "5" * 32, "job", "/store", "6" * 32)
    return Line(lines, peer, hello), peer  # type: ignore[arg-type]


def opened(client: str, node: str) -> ev.MemberOpened:
    return ev.MemberOpened(
        node=node,
        client=client,
        process=PROCESS,
        rank=0,
        world_size=1,
        save_id=1,
        epoch=1,
        deadline_s=1.0,
        elapsed_s=0.0,
        at=0.0,
        total_bytes=1,
        bytes_logical=1,
        items_id=b"i" * 32,
    )


def test_news_goes_to_the_node_of_its_client() -> None:
    lines = Lines("n0")
    lines.note(opened("a", "n1"))
    held = ev.HeldGroup(
        key=fx.DecisionKey(1, 1, 1),
        incarnation=1,
        world_size=1,
        group=1,
        opened=(opened("c", "n2"),),
        copied=(),
        planned=True,
        copies=np.empty((0, 32), np.uint8),
    )
    link = NodeLink("n2", 1e9, 1e9, "n2")
    arrived = ev.ClientArrived("b", PROCESS, 1, 2)
    lines.note(ev.NodeJoined("n2", "5" * 32, "tcp://h:1", link, "6" * 32, (held,), (arrived,), ()))
    seats = [fx.MemberSeat(0, name, 1) for name in "abcd"]
    told = [lines.target(fx.TellFailed(seat, GroupAborted("it ended"))) for seat in seats]
    assert told == ["n1", "n2", "n2", ""]
    assert lines.target(fx.StartCopy("n7", 1)) == "n7"
    lines.note(ev.MemberGone("a", process_gone=False))
    assert lines.target(fx.TellReached(seats[0], Level.STAGED)) == "n1"
    lines.note(ev.MemberGone("a", process_gone=True))
    assert lines.target(fx.TellReached(seats[0], Level.STAGED)) == ""


def test_times_travel_as_ages() -> None:
    lines = Lines("n0")
    way, peer = line(lines, "n1")
    now = time.monotonic()
    seat = fx.MemberSeat(0, "a", 1)
    way.send(fx.TellReached(seat, Level.STAGED, now - 5, now - 2))
    (sent,) = peer.sent
    assert (round(sent.first_arrival), round(sent.last_arrival)) == (5, 2)
    back = from_ages(sent)
    assert back.first_arrival == pytest.approx(now - 5, abs=1.0)
    assert back.last_arrival == pytest.approx(now - 2, abs=1.0)
    way.send(fx.TellReached(seat, Level.DURABLE))
    assert from_ages(peer.sent[1]).first_arrival is None


def test_a_node_speaks_for_itself_and_its_clients_only() -> None:
    lines = Lines("n0")
    way, _ = line(lines, "n1")
    lines.note(opened("theirs", "n2"))
    lines.check(way, ev.ClientArrived("mine", PROCESS, 0, 1, node="n1"))
    lines.check(way, ev.MemberGone("mine", process_gone=True))
    lines.check(way, ev.NodeAdmitted(1, "n1"))
    lines.check(way, ev.LinkMeasured(NodeLink("n1", 1.0, 1.0, "n1")))
    for message in (
        ev.NodeAdmitted(1, "n2"),
        ev.LinkMeasured(NodeLink("n2", 1.0, 1.0, "n2")),
        ev.MemberGone("theirs", process_gone=True),
        opened("theirs", "n1"),
    ):
        with pytest.raises(InvalidInput, match="in the name of"):
            lines.check(way, message)


def none() -> Any:
    return np.empty(0, np.int64)


def report(node: str, *ranks: int) -> NodeReport:
    chunks = ChunkTable(np.empty((0, 32), np.uint8), none(), none().astype(np.int32), none())
    return NodeReport(node, (), chunks, tuple(MemberTable(r, (), b"", none(), 0) for r in ranks))


def joins(**fields: Any) -> ev.NodeJoined:
    """n1 joins with a group of rank 0, of which it says this."""
    held = ev.HeldGroup(
        key=fx.DecisionKey(1, 5, 1),
        incarnation=1,
        world_size=2,
        group=1,
        opened=(opened("mine", "n1"),),
        planned=True,
        copies=np.empty((0, 32), np.uint8),
        **{"copied": (0,)} | fields,
    )
    return ev.NodeJoined("n1", "5" * 32, "tcp://h:1", NodeLink("n1", 1.0, 1.0, "n1"), "", (held,))


@pytest.mark.parametrize("name", ["hashed", "stored"])
def test_a_node_holds_reports_of_its_own_only(name: str) -> None:
    lines = Lines("n0")
    way, _ = line(lines, "n1")
    lines.check(way, joins(**{name: report("n1", 0)}))
    with pytest.raises(InvalidInput, match="sent NodeJoined in the name of node n2"):
        lines.check(way, joins(**{name: report("n2", 0)}))
    with pytest.raises(InvalidInput, match=r"it holds epoch 5 of rank\(s\) 1 of others"):
        lines.check(way, joins(**{name: report("n1", 0, 1)}))


def test_a_node_holds_the_bytes_of_its_own_members_only() -> None:
    lines = Lines("n0")
    way, _ = line(lines, "n1")
    lines.check(way, joins())
    with pytest.raises(InvalidInput, match=r"it holds epoch 5 of rank\(s\) 1 of others"):
        lines.check(way, joins(copied=(0, 1)))


def test_a_node_says_of_its_own_members_that_they_copied() -> None:
    lines = Lines("n0")
    way, _ = line(lines, "n1")
    lines.check(way, ev.MemberCopied(1, 0, "n1"))
    with pytest.raises(InvalidInput, match="sent MemberCopied in the name of node n2"):
        lines.check(way, ev.MemberCopied(1, 0, "n2"))
