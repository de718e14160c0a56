"""The driver of a job's swarms: who is asked what, when reads begin and end."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from groupio.controller.swarms import SOUGHT_S, Swarms
from groupio.model import NodeLink
from groupio.plan.distribute import STORAGE
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol import reading_messages as rm

KEY = "L00000001-E00000000000000000001-A000000"
LENGTHS = np.array([100, 200, 300], np.int32)
NOTHING = np.empty(0, np.int32)
ALL = np.arange(3, dtype=np.int32)


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Log lines are seen although an agent's log was set up in this process before."""
    logger = logging.getLogger("groupio.controller.swarms")
    logger.addHandler(caplog.handler)
    yield
    logger.removeHandler(caplog.handler)


class Job:
    """A job of nodes a, b and c, and what its swarms say."""

    def __init__(self, nodes: str = "abc") -> None:
        self.said: list[Any] = []
        self.swarms = Swarms(self.said.append)
        for name in nodes:
            self.join(name)

    def join(self, name: str) -> None:
        link = NodeLink(name, 1e9, 1e9, name)
        joined = ev.NodeJoined(name, "0" * 32, f"tcp://{name}:1", link, "5" * 32)
        self.swarms.note(joined)

    def open(self, node: str, lengths: Any = LENGTHS) -> None:
        self.swarms.take(rm.ReadOpened(KEY, node, lengths))

    def has(self, node: str, rows: Any = NOTHING) -> None:
        self.swarms.take(rm.NodeHas(KEY, node, rows, NOTHING))

    def ask(self, node: str, load: str = "", members: int = 1) -> None:
        whole = np.ones(3, np.bool_)
        self.swarms.take(rm.NodeAsks(KEY, node, ALL, whole, load, members))

    def take(self, kind: type) -> list[Any]:
        found = [one for one in self.said if isinstance(one, kind)]
        self.said[:] = [one for one in self.said if not isinstance(one, kind)]
        return found


def test_all_nodes_say_what_they_have_before_the_first_plan() -> None:
    job = Job()
    job.open("a")
    assert [one.node for one in job.take(rm.ReadSought)] == ["b", "c"]
    assert job.take(fx.StartTimer) == [fx.StartTimer(f"read {KEY}", SOUGHT_S)]
    job.has("a")
    job.ask("a")
    job.open("b")
    job.has("b", ALL)
    assert job.take(rm.Assign) == []
    job.open("c")
    job.has("c")
    assert job.take(fx.StopTimer) == [fx.StopTimer(f"read {KEY}")]
    orders = {one.node: one for one in job.take(rm.Assign)}
    names = orders["a"].names
    assert [names[source] for source in orders["a"].sources] == ["b"] * 3
    assert set(orders) == {"a", "b"}


def test_the_wait_for_them_is_bounded() -> None:
    job = Job()
    job.open("a")
    job.ask("a")
    assert job.take(rm.Assign) == []
    job.swarms.fire(f"read {KEY}")
    read = [order for order in job.take(rm.Assign) if (order.sources == STORAGE).any()]
    assert sum(int((order.sources == STORAGE).sum()) for order in read) == 3


@pytest.mark.parametrize("how", ["lost", "closed"])
def test_nodes_that_cannot_answer_are_not_waited_for(how: str) -> None:
    job = Job("ab")
    job.open("a")
    job.ask("a")
    if how == "lost":
        job.swarms.note(ev.NodeLost("b", "0" * 32, "it is gone"))
    else:
        job.swarms.take(rm.ReadClosed(KEY, "b"))
    assert {order.node for order in job.take(rm.Assign)} >= {"a"}


def test_addresses_are_told_once_and_again_when_they_change() -> None:
    job = Job("ab")
    job.open("a")
    assert [(p.node, p.addresses) for p in job.take(rm.Peers)] == [
        ("b", {"a": "tcp://a:1", "b": "tcp://b:1"})
    ]
    job.open("b")
    job.has("b")
    job.ask("a")
    assert [p.node for p in job.take(rm.Peers)] == ["a"]
    job.join("c")
    job.ask("b")
    assert "c" in job.take(rm.Peers)[0].addresses


def test_a_grouped_load_waits_for_its_members() -> None:
    job = Job("a")
    job.open("a")
    job.ask("a", "x", 2)
    (timer,) = job.take(fx.StartTimer)
    assert job.take(rm.Assign) == []
    job.swarms.fire(timer.name)
    assert len(job.take(rm.Assign)) == 1


def test_a_read_ends_with_its_last_node() -> None:
    job = Job("ab")
    job.open("a")
    job.open("b")
    job.swarms.take(rm.ReadClosed(KEY, "a"))
    job.swarms.take(rm.ReadClosed(KEY, "b"))
    job.said.clear()
    job.ask("a")  # too late
    job.swarms.fire(f"read {KEY}")
    assert job.said == []
    job.open("a")
    assert len(job.take(rm.ReadSought)) == 1


def test_a_lost_node_is_replaced() -> None:
    job = Job("ab")
    job.open("a")
    job.open("b")
    job.has("a")
    job.has("b", ALL)
    job.ask("a")
    job.take(rm.Assign)
    job.swarms.note(ev.NodeLost("b", "0" * 32, "it is gone"))
    (order,) = job.take(rm.Assign)
    assert order.node == "a"
    assert (order.sources == STORAGE).all()


def test_strangers_and_other_tables_are_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    job = Job("ab")
    job.open("z")
    job.open("a")
    job.said.clear()
    job.open("b", LENGTHS + 1)
    job.ask("b")
    assert job.said == []
    assert "sees other chunks" in caplog.text


def test_a_liar_is_named(caplog: pytest.LogCaptureFixture) -> None:
    job = Job("ab")
    job.open("a")
    job.open("b")
    job.has("b", ALL)
    job.has("a")
    job.ask("a")
    job.take(rm.Assign)
    job.swarms.take(rm.NodeFailed(KEY, "a", "b", ALL[:1], "digest"))
    assert "node b sent node a wrong bytes" in caplog.text
    (order,) = [one for one in job.take(rm.Assign) if one.node == "a"]
    assert order.sources.tolist() == [STORAGE]


def test_changed_links_are_known() -> None:
    job = Job("ab")
    job.open("a")
    job.swarms.note(ev.LinkMeasured(NodeLink("a", 5e8, 1e9, "a")))
    job.swarms.note(ev.LinkMeasured(NodeLink("z", 5e8, 1e9, "z")))
    job.ask("a")
    job.swarms.fire(f"read {KEY}")
    shares = {order.node: order.store_bytes_per_s for order in job.take(rm.Assign)}
    assert shares["a"] == 5e8
