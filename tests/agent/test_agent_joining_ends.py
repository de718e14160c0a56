"""How an agent's part in a job ends: its rule, the job on this node, or the agent itself."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from joining_tools import OTHER, PROCESS, World, agent, away, until

from groupio.agent import joining, unheard
from groupio.controller import messages as cm
from groupio.controller.coordinator import Rule
from groupio.controller.store import JobStore
from groupio.errors import StorageError
from groupio.protocol import events as ev
from groupio.protocol import following as fo


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fo, "RETRY_S", 0.01)
    monkeypatch.setattr(fo, "BACKOFF_S", 0.01)
    monkeypatch.setattr(joining, "KEEP_S", 0.02)
    monkeypatch.setattr(joining, "LOOK_S", 0.01)


async def hosting(it: World) -> Any:
    """The controller of this agent, once it has its store."""
    it.make_store()
    it.come()
    await until(lambda: it.job.host and it.job.host.controller.store_open)
    return it.job.host


# -- the rule ends -----------------------------------------------------------------------------


def test_a_ruler_looks_whether_it_rules_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(it: World) -> None:
        host = await hosting(it)
        await until(lambda: it.coordinator.asked.count("keep") > 1)
        it.coordinator.error = StorageError("no answer", path="/x", errno=5)
        asked = it.coordinator.asked.count("keep")
        await until(lambda: it.coordinator.asked.count("keep") > asked + 1)
        assert it.job.host is host, "a store that is silent says nothing of who rules"

    agent(tmp_path, monkeypatch, play)


def test_a_deposed_ruler_follows_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(it: World) -> None:
        host = await hosting(it)
        it.coordinator.wins = False
        it.coordinator.rule = Rule(2, "tcp://10.0.0.2:7", "n2", OTHER)
        it.coordinator.kept = False
        await until(lambda: it.clients)
        assert it.job.host is None
        assert it.network.hosts == {}
        assert it.client.address == "tcp://10.0.0.2:7"
        it.client.say(cm.NodeWelcome(2, "n2"))
        assert it.joining.joined
        # What it heard too late is nobody's business any more.
        host.tell(ev.TimerFired("g1"))
        host.open_store()
        assert not it.ended

    agent(tmp_path, monkeypatch, play)


def test_a_rule_that_ended_by_itself_is_won_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(it: World) -> None:
        host = await hosting(it)
        # Said by a thread of the coordinator, and by the next look too, which is heard late.
        late: list[Any] = []
        post = it.driver.post
        it.driver.post = lambda step: (  # type: ignore[method-assign]
            late.append(step) if "_deposed" in step.__qualname__ else post(step)
        )
        await asyncio.to_thread(it.coordinator.on_lost, "the lease ran out")
        it.coordinator.on_lost("it ran out")
        it.driver.post = post  # type: ignore[method-assign]
        it.driver.do(late[0])
        await until(lambda: it.job.host is not host and it.joining.joined)
        it.driver.do(late[1])
        await asyncio.sleep(0.05)
        assert it.joining.term == 2, "once"

    agent(tmp_path, monkeypatch, play)


def test_a_ruler_that_is_deposed_while_the_coordinator_is_away_campaigns_until_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it goes on beside the next one, and the job's nodes are split between them."""

    async def play(it: World) -> None:
        await hosting(it)
        campaign = it.coordinator.campaign
        tries: list[int] = []

        def fails(*arguments: Any, **more: Any) -> Rule:
            tries.append(more["over"])
            if len(tries) < 4:
                raise away()
            return campaign(*arguments, **more)

        it.coordinator.campaign = fails  # type: ignore[method-assign]
        it.coordinator.kept = False
        await until(lambda: len(tries) >= 4)
        it.coordinator.kept = True
        await until(lambda: it.joining.term == 2 and it.joining.joined)
        assert it.job.host is not None
        assert it.job.host.term == 2

    agent(tmp_path, monkeypatch, play)


def test_a_ruler_is_deposed_while_its_store_is_at_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer comes after the end: it asks for nothing more, and the agent lives."""
    reached, free = threading.Event(), threading.Event()

    async def play(it: World) -> None:
        await hosting(it)
        publish = JobStore.publish
        decided: list[Any] = []

        def slow(store: JobStore, effect: Any) -> None:
            reached.set()
            assert free.wait(10)
            publish(store, effect)

        monkeypatch.setattr(JobStore, "publish", slow)
        monkeypatch.setattr(JobStore, "decide", lambda store, effect: decided.append(effect))
        # The agent has no memory for it: the attempt is to be given up once it is published.
        it.open(world_size=1)
        await until(reached.is_set)
        it.coordinator.wins = False
        it.coordinator.rule = Rule(2, "tcp://10.0.0.2:7", "n2", OTHER)
        it.coordinator.kept = False
        await until(lambda: it.clients)
        free.set()
        done: list[int] = []
        it.joining.run(lambda: done.append(1))
        await until(lambda: done)
        await asyncio.sleep(0.02)
        assert not it.ended
        assert decided == [], "that is the next controller's"

    agent(tmp_path, monkeypatch, play)


# -- the job ends here -------------------------------------------------------------------------


def test_a_job_is_left_while_its_store_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client came and went at once."""
    reached, free = threading.Event(), threading.Event()
    follow = JobStore.follow

    def slow(store: JobStore, *, create: bool) -> str:
        if store.node == "n0":
            reached.set()
            assert free.wait(10)
        return follow(store, create=create)

    monkeypatch.setattr(JobStore, "follow", slow)

    async def play(it: World) -> None:
        it.make_store()
        it.come()
        await until(reached.is_set)
        it.driver._let_go(it.path)
        it.joining.tell(ev.MemberGone("c0", process_gone=True))
        free.set()
        await until(lambda: "close" in it.coordinator.asked)
        await asyncio.sleep(0.02)
        assert not it.ended
        assert it.coordinator.asked == ["resign", "close"], "it asked nobody anything"
        assert it.job.store._backend is None

    agent(tmp_path, monkeypatch, play)


def test_a_job_is_left_while_it_is_asked_whether_it_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(it: World) -> None:
        host = await hosting(it)
        it.coordinator.gate.clear()
        asked = len(it.coordinator.asked)
        await until(lambda: "keep" in it.coordinator.asked[asked:])
        it.driver._let_go(it.path)
        assert it.network.hosts == {}, "no agent finds a controller that has ended"
        it.coordinator.gate.set()
        await until(lambda: "close" in it.coordinator.asked)
        asked = len(it.coordinator.asked)
        await asyncio.sleep(0.1)
        assert not it.ended
        assert it.coordinator.asked[-2:] == ["resign", "close"]
        assert len(it.coordinator.asked) == asked
        assert host.timers == {}

    agent(tmp_path, monkeypatch, play)


def test_a_follower_hangs_up_and_a_rule_just_won_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(it: World) -> None:
        client = await it.follow()
        it.driver._let_go(it.path)
        assert client.closed is not None
        await until(lambda: "close" in it.coordinator.asked)
        assert it.coordinator.asked[-2:] == ["resign", "close"]
        it.joining.tell(ev.MemberGone("c0", process_gone=True))
        it.joining.settle("c0", 1)
        assert len(it.clients) == 1

    agent(tmp_path, monkeypatch, play)


def test_a_rule_that_cannot_be_given_up_keeps_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(it: World) -> None:
        await hosting(it)
        it.coordinator.resign_error = StorageError("no answer", path="/x", errno=5)
        it.driver._let_go(it.path)
        await asyncio.to_thread(it.driver._closing.shutdown)
        assert it.coordinator.asked[-2:] == ["resign", "close"]
        assert it.job.store._backend is None
        names = {thread.name for thread in threading.enumerate()}
        assert not any(name.startswith(("join", "store")) for name in names)

    agent(tmp_path, monkeypatch, play)


# -- the last client ends ----------------------------------------------------------------------


def gone_after_a_save_with_a_lost_agent(it: World) -> list[Any]:
    """A client that gave a save up, and its end; nobody takes it up here."""
    news = [
        ev.ClientArrived("c0", PROCESS, 1, 2, gave_up=(7,), node="n0"),
        ev.MemberGone("c0", process_gone=False),
        ev.MemberGone("c0", process_gone=True),
    ]
    for event in news:
        it.job.tell(event)
    return news


def test_the_end_of_a_client_that_lost_its_agent_is_told_to_the_next_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the group of its epoch waits for it until the deadline."""

    async def play(it: World) -> None:
        it.coordinator.error = away()
        it.make_store()
        it.job.tell(ev.ClientArrived("c9", PROCESS, 1, 2, node="n0"))
        await until(lambda: it.joining._machine.error is not None)
        it.job.tell(ev.MemberGone("c9", process_gone=True))
        assert it.job.idle, "of what was in no save nobody has to hear"
        news = gone_after_a_save_with_a_lost_agent(it)
        assert not it.job.idle
        it.coordinator.rule = Rule(3, "tcp://10.0.0.1:7", "n1", OTHER)
        it.coordinator.error = None
        await until(lambda: it.clients)
        it.client.say(cm.NodeWelcome(3, "n1"))
        await until(lambda: it.joining.joined)
        await until(lambda: it.client.got(ev.MemberGone))
        (joined,) = it.client.got(ev.NodeJoined)
        assert joined.clients == ()
        told = it.client.sent[it.client.sent.index(joined) + 1 :]
        assert [one for one in told if getattr(one, "client", "") == "c0"] == news
        assert it.job.idle

    agent(tmp_path, monkeypatch, play)


def test_it_is_told_although_the_store_was_not_even_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client ends within moments of the error."""

    async def play(it: World) -> None:
        it.make_store()
        it.coordinator.rule = Rule(3, "tcp://10.0.0.1:7", "n1", OTHER)
        news = gone_after_a_save_with_a_lost_agent(it)
        assert not it.job.idle
        await until(lambda: it.clients)
        it.client.say(cm.NodeWelcome(3, "n1"))
        await until(lambda: len(it.client.got(ev.MemberGone)) == 2)
        assert it.client.sent[-3:] == news
        assert it.job.idle

    agent(tmp_path, monkeypatch, play)


def test_an_agent_does_not_wait_for_long_to_tell_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unheard, "KEEP_S", 0.05)

    async def play(it: World) -> None:
        it.coordinator.error = away()
        it.make_store()
        it.come("c9")
        await until(lambda: it.joining._machine.error is not None)
        it.job.tell(ev.MemberGone("c9", process_gone=True))
        gone_after_a_save_with_a_lost_agent(it)
        await until(lambda: it.job.idle)

    agent(tmp_path, monkeypatch, play)
