"""A client that lost its agent tells the next one what it gave up, so that nobody waits for it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from fake_agent import Background, FakeAgent

import groupio
from groupio.client import again
from groupio.protocol import messages as msg

VALUE = np.arange(1000, dtype=np.float32)
Connect = Callable[..., groupio.Client]


def test_the_next_agent_hears_at_once_of_a_call_that_was_blocked(
    agent: FakeAgent, connect: Connect, background: Background
) -> None:
    client = connect(rank=1, world_size=2)
    peer = agent.peer()
    assert peer.hello.gave_up == ()
    saved = background.submit(client.save, {"w": VALUE}, epoch=7)
    peer.take(msg.OpenSave)
    peer.die()
    assert isinstance(saved.result(20).error, groupio.AgentLost)
    successor = agent.peer()  # nothing was called since
    assert successor.hello.gave_up == (7,)
    # The same with an agent that drains: it says so itself.
    saved = background.submit(client.save, {"w": VALUE}, epoch=8)
    opened = successor.take(msg.OpenSave)
    successor.fail(opened, groupio.AgentLost("The agent is draining."))
    assert isinstance(saved.result(20).error, groupio.AgentLost)
    assert agent.peer().hello.gave_up == (7, 8)


def test_a_save_that_was_released_is_not_given_up(
    agent: FakeAgent, connect: Connect, background: Background
) -> None:
    client = connect(rank=1, world_size=2)
    peer = agent.peer()
    saved = background.submit(client.save, {"w": VALUE}, epoch=7)
    peer.receive(peer.take(msg.OpenSave))
    handle = saved.result(20)
    peer.die()
    with pytest.raises(groupio.AgentLost):
        handle.wait(timeout_s=20)
    # Its group was complete, so nobody is still to come; the next call connects.
    background.submit(client.save, {"w": VALUE}, epoch=8)
    assert agent.peer().hello.gave_up == ()
    assert agent.starts == 2


def test_who_closes_gives_nothing_up_and_who_is_alone_has_nobody_to_tell(
    agent: FakeAgent, connect: Connect, background: Background
) -> None:
    for options in ({"rank": 0, "world_size": 2}, {}):
        client = connect(**options)
        peer = agent.peer()
        saved = background.submit(client.save, {"w": VALUE}, epoch=7)
        peer.take(msg.OpenSave)
        if options:
            client.close()
        else:
            peer.die()
        assert saved.result(20).error is not None
        assert client._again.epochs == (() if options else (7,))
    assert agent.starts == 2


def test_no_agent_can_be_had_any_more_and_only_the_newest_epochs_are_told() -> None:
    calls = []

    def refuse() -> None:
        calls.append(1)
        raise groupio.AgentLost("there is none")

    told = again.Again(refuse, others=True)
    told._run()
    assert calls == [1]
    alone = again.Again(refuse, others=False)
    for epoch in range(20):
        alone.lost([epoch])
    assert alone.epochs == tuple(range(4, 20))
