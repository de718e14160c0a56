"""The swarms of a job keep to the life that a node takes part with, as the controller does."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np
import pytest

from groupio.controller.swarms import Swarms
from groupio.errors import InvalidInput
from groupio.model import NodeLink
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol import reading_messages as rm
from groupio.protocol.controller import Controller

KEY = "L00000001-E00000000000000000001-A000000"
LENGTHS = np.array([100, 200, 300], np.int32)
OLD, NEW = "1" * 32, "2" * 32


def joined(node: str, life: str, address: str, store_id: str = "5" * 32) -> ev.NodeJoined:
    return ev.NodeJoined(node, life, address, NodeLink(node, 1e9, 1e9, node), store_id)


class Job:
    """The machine of a controller and its swarms, which hear the same; nodes a and b are there."""

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.swarms = Swarms(self.said.append)
        self.controller = Controller(numbers=count(1), node="", resumes=True)
        self.note(joined("a", OLD, "tcp://a:1"))
        self.note(joined("b", OLD, "tcp://b:1"))

    def note(self, event: Any) -> list[Any]:
        self.swarms.note(event)
        return self.controller.handle(event)

    def addresses(self) -> dict[str, str]:
        """What the nodes of a read are told."""
        self.said.clear()
        self.swarms.take(rm.ReadOpened(KEY, "a", LENGTHS))
        peers = [one for one in self.said if isinstance(one, rm.Peers)]
        return peers[-1].addresses if peers else {}

    def agree(self) -> None:
        """Both know the same nodes."""
        alive = self.controller.nodes.alive
        assert tuple(sorted(self.swarms._links)) == alive
        assert self.swarms._addresses == self.controller.nodes.addresses(alive)
        assert self.swarms._lives == {node: self.controller.nodes.life(node) for node in alive}


def test_a_refused_twin_changes_nothing() -> None:
    job = Job()
    (refused,) = job.note(joined("b", NEW, "tcp://elsewhere:9"))
    assert isinstance(refused, fx.RefuseNode)
    assert isinstance(refused.error, InvalidInput)
    assert job.addresses() == {"a": "tcp://a:1", "b": "tcp://b:1"}
    job.agree()


def test_the_end_of_a_refused_life_is_not_that_of_the_living_one() -> None:
    job = Job()
    job.note(joined("b", NEW, "tcp://elsewhere:9"))
    job.note(ev.NodeLost("b", NEW, "refused"))
    job.note(ev.NodeLost("z", NEW, "never heard of"))
    assert job.addresses() == {"a": "tcp://a:1", "b": "tcp://b:1"}
    job.agree()


def test_a_read_goes_on_with_the_living_one() -> None:
    job = Job()
    job.addresses()
    job.swarms.take(rm.ReadOpened(KEY, "b", LENGTHS))
    job.swarms.take(rm.NodeHas(KEY, "b", np.arange(3, dtype=np.int32), np.empty(0, np.int32)))
    job.note(joined("b", NEW, "tcp://elsewhere:9"))
    job.note(ev.NodeLost("b", NEW, "refused"))
    job.said.clear()
    rows = np.arange(3, dtype=np.int32)
    job.swarms.take(rm.NodeAsks(KEY, "a", rows, np.ones(3, np.bool_), "", 1))
    (order,) = [one for one in job.said if isinstance(one, rm.Assign) and one.node == "a"]
    assert {order.names[source] for source in order.sources} == {"b"}


@pytest.mark.parametrize("life", [OLD, NEW])
def test_a_node_comes_back_once_it_was_missed(life: str) -> None:
    job = Job()
    job.note(ev.NodeLost("b", OLD, "it is gone"))
    job.agree()
    assert job.addresses() == {}
    assert job.note(joined("b", life, "tcp://b:2")) == []
    job.swarms.take(rm.ReadOpened(KEY, "b", LENGTHS))
    job.agree()
    assert job.swarms._addresses == {"a": "tcp://a:1", "b": "tcp://b:2"}


def test_a_life_that_joins_again_may_have_another_address() -> None:
    job = Job()
    job.note(joined("b", OLD, "tcp://b:7"))
    assert job.addresses()["b"] == "tcp://b:7"
    job.agree()
