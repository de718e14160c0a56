"""An agent follows the controller of its job: joining, being refused and cut off, draining."""

from __future__ import annotations

import asyncio
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from joining_tools import LIFE, OTHER, STORE, World, agent, away, until

from groupio.agent import joining, unjoined
from groupio.controller import messages as cm
from groupio.controller.coordinator import Rule
from groupio.controller.keys import Keys
from groupio.errors import (
    ControllerLost,
    GroupIOError,
    InvalidInput,
    to_wire,
)
from groupio.model import Level
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol import following as fo
from groupio.protocol import messages as msg
from groupio.protocol import reading_messages as rm

SEAT = fx.MemberSeat(0, "c0", 1)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for long, unless a test says so."""
    monkeypatch.setattr(fo, "RETRY_S", 0.01)
    monkeypatch.setattr(fo, "BACKOFF_S", 0.01)
    monkeypatch.setattr(fo, "REFUSED_RETRY_S", 0.01)
    monkeypatch.setattr(joining, "RETRY_S", 0.02)
    monkeypatch.setattr(joining, "KEEP_S", 0.02)
    monkeypatch.setattr(joining, "LOOK_S", 0.01)
    monkeypatch.setattr(unjoined, "GRACE_S", 0.02)


# -- following ---------------------------------------------------------------------------------


def test_a_rule_elsewhere_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(it: World) -> None:
        it.coordinator.rule = Rule(4, "tcp://10.0.0.1:7", "n1", OTHER)
        it.make_store()
        it.come()
        await until(lambda: it.clients)
        (hello,) = it.client.sent
        assert isinstance(hello, cm.NodeHello)
        assert (hello.node, hello.life, hello.job, hello.term) == ("n0", LIFE, "job", 4)
        assert hello.store_id == it.job.store.store_id
        # Before the welcome nothing is said or taken.
        opened = it.open()
        it.joining.tell(ev.MemberGone("c9", process_gone=True))
        it.joining.tell_swarm(rm.ReadClosed("L1", "n0"))
        it.client.say(fx.RetractGroup("n0", 1))
        assert len(it.client.sent) == 1
        it.client.say(cm.NodeWelcome(4, "n1"))
        await until(lambda: it.joining.joined)
        joined, gone = it.client.sent[1:]
        assert isinstance(joined, ev.NodeJoined)
        assert (joined.node, joined.life, joined.address) == ("n0", LIFE, "tcp://127.0.0.1:9")
        assert [one.client for one in joined.clients] == ["c0"]
        assert [one.save_id for one in joined.opens] == [opened.save_id]
        assert gone == ev.MemberGone("c9", process_gone=True), "once, behind the joining"
        assert it.network.reads.said == ["joined"]
        it.joining.tell(ev.MemberGone("c8", process_gone=True))
        it.joining.tell_swarm(rm.ReadClosed("L1", "n0"))
        assert [type(one) for one in it.client.sent[3:]] == [ev.MemberGone, rm.ReadClosed]

    agent(tmp_path, monkeypatch, play)


def test_orders_are_carried_out_while_the_agent_takes_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(it: World) -> None:
        client = await it.follow()
        it.open()
        it.driver.clients["c0"].called_at[1] = time.monotonic()
        client.say(fx.TellReached(SEAT, Level.STAGED, 2.0, 1.0))
        ((_, reached),) = it.told
        assert reached.level == "staged"
        assert 1.9 < time.monotonic() - reached.first_arrival < 3, "ages became times"
        client.say(fx.TellReached(SEAT, Level.DURABLE))
        assert it.job.opens == {}
        client.say(fx.TellFailed(fx.MemberSeat(0, "c0", 2), GroupIOError("it failed")))
        assert it.failures()[0].message == "it failed"
        client.lose()
        client.say(fx.TellFailed(SEAT, GroupIOError("too late")))
        assert len(it.failures()) == 1

    agent(tmp_path, monkeypatch, play)


def test_a_broken_link_is_made_anew_and_all_is_said_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(it: World) -> None:
        first = await it.follow()
        it.joining.settle("c0", 3)
        assert first.got(cm.ClientSettles) == [cm.ClientSettles("c0", 3)]
        it.job.settling.append((it.driver.clients["c0"], 3))
        first.lose("the cable")
        assert not it.joining.joined
        assert it.network.reads.said == ["joined", "left"]
        assert not it.joining.describe(1, lambda body: None)
        it.open()
        it.joining.tell(ev.MemberFailed("c0", 9, GroupIOError("x")))
        await until(lambda: it.client is not first)
        second = it.client
        second.say(cm.NodeWelcome(1, "n1"))
        assert [type(one) for one in second.sent[1:]] == [
            ev.NodeJoined,
            ev.MemberFailed,
            cm.ClientSettles,
        ]
        second.say(cm.ClientSettled("c0", 3))
        assert it.told == [("c0", msg.Settled(3))]
        assert it.job.settling == []
        # What an old link still says is nobody's.
        first.say(fx.TellFailed(SEAT, GroupIOError("from before")))
        assert it.failures() == []

    agent(tmp_path, monkeypatch, play)


def test_a_new_controller_is_followed_and_the_old_one_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fo, "RECONNECT_S", 0.05)

    async def play(it: World) -> None:
        first = await it.follow()
        it.coordinator.wins = False
        it.coordinator.rule = Rule(2, "tcp://10.0.0.2:7", "n2", OTHER)
        first.lose()
        await until(lambda: it.client.address == "tcp://10.0.0.2:7")
        assert it.joining.term == 2
        assert all(one.closed is not None for one in it.clients[:-1])
        it.client.say(cm.NodeWelcome(2, "n2"))
        assert it.joining.joined

    agent(tmp_path, monkeypatch, play)


def test_a_lost_controller_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fo, "RECONNECT_S", 0.05)

    async def play(it: World) -> None:
        (await it.follow()).lose()
        await until(lambda: it.job.host is not None)
        assert it.job.host is not None
        assert it.job.host.term == 2
        await until(lambda: it.joining.joined)

    agent(tmp_path, monkeypatch, play)


def test_what_cannot_be_read_ends_the_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(it: World) -> None:
        first = await it.follow()
        first.on_message(b"nonsense")
        assert first.closed is not None
        assert it.network.reads.said == ["joined", "left"], "reads go on without the others"
        await until(lambda: it.client is not first)
        it.client.say(cm.NodeWelcome(1, "n1"))
        assert it.joining.joined

    agent(tmp_path, monkeypatch, play)


def test_an_address_of_no_use_is_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fo, "RECONNECT_S", 0.05)

    async def play(it: World) -> None:
        def refuse(*_: Any, **__: Any) -> Any:
            raise InvalidInput("'nowhere' is no address")

        monkeypatch.setattr(joining, "ControlClient", refuse)
        it.coordinator.rule = Rule(1, "nowhere", "n1", OTHER)
        it.make_store()
        it.come()
        await until(lambda: it.job.host is not None)

    agent(tmp_path, monkeypatch, play)


def test_questions_to_the_controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(it: World) -> None:
        bodies: list[Any] = []
        assert not it.joining.describe(1, bodies.append)
        client = await it.follow()
        assert it.joining.describe(2, bodies.append)
        assert client.got(cm.StatusAsked) == [cm.StatusAsked(2)]
        client.say(cm.StatusAnswer(3, {}), cm.StatusAnswer(2, {"a": 1}), cm.StatusAnswer(2, {}))
        assert bodies == [{"a": 1}]
        assert it.joining.describe(4, bodies.append)
        client.lose()
        await until(lambda: it.client is not client)
        it.client.say(cm.StatusAnswer(4, {}))
        assert len(bodies) == 1

    agent(tmp_path, monkeypatch, play)


# -- being refused -----------------------------------------------------------------------------


def refused(error: GroupIOError) -> cm.NodeRefused:
    return cm.NodeRefused(to_wire(error))


def test_a_refused_agent_tries_again_and_its_members_hear_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(unjoined, "REFUSED_S", 0.1)
    caplog.set_level("ERROR", unjoined.__name__)

    async def play(it: World) -> None:
        first = await it.follow()
        it.open()
        it.open(save_id=2)
        first.say(refused(InvalidInput("two agents call themselves node n0")))
        assert first.closed is not None
        assert it.network.reads.said == ["joined", "left"], "reads do not wait for a swarm"
        assert it.failures() == []
        for _ in range(2):
            latest = it.client
            await until(lambda: it.client is not latest)  # noqa: B023
            it.client.say(refused(InvalidInput("two agents call themselves node n0")))
        await until(lambda: len(it.failures()) == 2)
        assert {str(error) for error in it.failures()} == {"two agents call themselves node n0"}
        assert ("tcp://127.0.0.1:5", 1) not in it.coordinator.asked, "it lives: nobody replaces it"

    agent(tmp_path, monkeypatch, play)
    said = [line for line in caplog.messages if "refused by the controller" in line]
    assert len(said) == 1, "it is tried several times a second"


def test_what_an_earlier_controller_had_against_it_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unjoined, "REFUSED_S", 0.1)
    monkeypatch.setattr(fo, "RECONNECT_S", 5.0)

    async def play(it: World) -> None:
        first = await it.follow()
        it.open()
        first.say(refused(InvalidInput("two agents call themselves node n0")))
        it.joining._found(Rule(2, "tcp://10.0.0.2:7", "n2", OTHER), None)
        await asyncio.sleep(0.2)
        assert it.failures() == [], "the new one has said nothing against it"
        it.client.say(cm.NodeWelcome(2, "n2"))
        assert it.joining.joined

    agent(tmp_path, monkeypatch, play)


def test_one_that_is_no_controller_any_more_sends_the_agent_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(it: World) -> None:
        first = await it.follow()
        it.coordinator.rule = Rule(2, "tcp://10.0.0.2:7", "n2", OTHER)
        first.say(refused(ControllerLost("not here")))
        await until(lambda: it.client.address == "tcp://10.0.0.2:7")

    agent(tmp_path, monkeypatch, play)


def test_one_that_is_no_controller_and_no_next_one_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(it: World) -> None:
        first = await it.follow()
        it.coordinator.error = away()
        first.say(refused(ControllerLost("not here")))
        await until(lambda: it.client is not first)
        it.client.say(cm.NodeWelcome(1, "n1"))
        assert it.joining.joined, "it is the same one, back again"

    agent(tmp_path, monkeypatch, play)


def test_a_controller_with_another_token_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fo, "RECONNECT_S", 0.03)
    monkeypatch.setattr(unjoined, "REFUSED_S", 0.05)

    async def play(it: World) -> None:
        it.coordinator.rule = Rule(1, "tcp://10.0.0.1:7", "n1", OTHER)
        it.make_store()
        it.come()
        it.open()
        await until(lambda: it.clients)
        seen = 0
        while not it.failures():
            for client in it.clients[seen:]:
                client.lose("no answer", locked_out=True)
            seen = len(it.clients)
            await asyncio.sleep(0.005)
        assert "GROUPIO_TOKEN" in it.failures()[0].message
        assert it.coordinator.asked == ["current"]

    agent(tmp_path, monkeypatch, play)


def test_a_node_without_a_token_replaces_no_controller_that_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take the job from nodes that it cannot even talk to."""
    monkeypatch.setattr(fo, "RECONNECT_S", 0.03)
    monkeypatch.setattr(unjoined, "REFUSED_S", 0.05)

    async def play(it: World) -> None:
        it.network.keys = replace(Keys.make(), of_store=True)
        with socket.create_server(("127.0.0.1", 0)) as there:
            address = f"tcp://127.0.0.1:{there.getsockname()[1]}"
            it.coordinator.rule = Rule(1, address, "n1", OTHER)
            it.make_store()
            it.come()
            it.open()
            await until(it.failures)
            assert "GROUPIO_TOKEN" in it.failures()[0].message
            assert it.coordinator.asked == ["current"]
            assert it.clients == [], "its port is not even tried"
        await until(lambda: it.job.host is not None)

    agent(tmp_path, monkeypatch, play)


def test_whoever_took_the_port_of_a_dead_controller_does_not_keep_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All who can open the store have its key, so one that refuses it is no controller of it."""
    monkeypatch.setattr(fo, "RECONNECT_S", 0.03)

    async def play(it: World) -> None:
        it.network.keys = first = replace(Keys.make(), of_store=True)
        it.coordinator.rule = Rule(1, "tcp://127.0.0.1:7", "n1", OTHER, by_token=False)
        it.make_store()
        it.come()
        it.open()
        await until(lambda: it.clients)
        it.network.keys = replace(Keys.make(), of_store=True)
        seen = 0
        while it.job.host is None:
            for client in it.clients[seen:]:
                client.lose("no answer", locked_out=True)
            seen = len(it.clients)
            await asyncio.sleep(0.005)
        assert it.failures() == []
        assert it.joining._keys is not first, "the key may be another one by now: it is read again"

    agent(tmp_path, monkeypatch, play)


# -- draining ----------------------------------------------------------------------------------


def test_a_draining_agent_gives_up_what_no_controller_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(it: World) -> None:
        it.coordinator.error = away()
        it.come()
        it.open()
        it.driver.drain()
        assert len(it.failures()) == 1
        assert "drain" in it.failures()[0].message or "about to end" in it.failures()[0].message
        assert it.job.opens == {}
        assert it.job.quiet

    agent(tmp_path, monkeypatch, play)


def test_a_draining_agent_tells_the_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(it: World) -> None:
        client = await it.follow()
        it.open()
        it.driver.drain(abort_unstaged=True)
        assert {one.save_id for one in client.got(ev.MemberFailed)} == {1}
        assert it.failures() == [], "the controller says so, once it has given it up"

    agent(tmp_path, monkeypatch, play)


def test_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(it: World) -> None:
        assert it.joining.where == STORE
        assert it.joining.term == 0
        assert it.joining.idle
        with pytest.raises(AssertionError, match="not an effect"):
            it.joining._execute(fo.NoRule())

    agent(tmp_path, monkeypatch, play)
