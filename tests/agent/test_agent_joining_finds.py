"""How an agent finds the controller of its job, or comes to host it, and what if it does not."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from joining_tools import World, agent, away, until

from groupio.agent import joining, unjoined
from groupio.agent.status import _job
from groupio.controller.coordinator import Rule
from groupio.controller.discover import Kind, Where
from groupio.controller.store import JobStore
from groupio.errors import (
    GroupIOError,
    GroupTimeout,
    IntegrityError,
    InvalidInput,
    StorageError,
)
from groupio.protocol import following as fo
from groupio.protocol import messages as msg


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


def test_where_nobody_rules_the_agent_hosts_the_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(it: World) -> None:
        it.come()
        it.open()
        await until(lambda: it.joining.joined)
        assert it.coordinator.asked[:2] == ["current", ("tcp://127.0.0.1:5", 0)]
        assert it.joining.term == 1
        assert it.job.host is not None
        assert it.network.hosts == {it.job.store.store_id: it.job.host}
        await until(lambda: it.job.host and it.job.host.controller.store_open)
        assert it.job.host.controller.nodes.alive == ("n0",)
        # Nobody is asked over a link about a controller that is here.
        assert not it.joining.describe(1, lambda body: None)
        it.joining.settle("c0", 1)
        assert it.clients == []

    agent(tmp_path, monkeypatch, play)


def test_where_there_is_no_store_only_a_save_makes_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(it: World) -> None:
        it.come()
        it.driver.desk._settle_later(it.driver.clients["c0"], it.job, 5)
        await until(lambda: it.told)
        assert it.told == [("c0", msg.Settled(5))]
        await asyncio.sleep(0.02)
        assert it.coordinator.asked == []
        assert not Path(it.path).exists()
        it.open()
        await until(lambda: it.joining.joined)
        assert Path(it.path).is_dir()

    agent(tmp_path, monkeypatch, play)


def test_a_save_that_comes_while_the_store_is_looked_for_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(it: World) -> None:
        it.come()
        it.open()  # the first look is under way
        await until(lambda: it.joining.joined)

    agent(tmp_path, monkeypatch, play)


def test_members_hear_in_time_that_the_store_cannot_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries: list[bool] = []

    def follow(store: JobStore, *, create: bool) -> str:
        tries.append(create)
        raise StorageError("the mount is gone", path=store.path, errno=107)

    monkeypatch.setattr(JobStore, "follow", follow)

    async def play(it: World) -> None:
        it.come()
        it.driver.desk._settle_later(it.driver.clients["c0"], it.job, 5)
        await until(lambda: it.told)
        assert isinstance(it.told[0][1], msg.Settled)
        assert it.told[0][1].error["message"] == "the mount is gone"
        it.open(deadline_s=0.05)
        await until(it.failures)
        (error,) = it.failures()
        assert isinstance(error, GroupTimeout)
        assert "the mount is gone" in error.message
        assert it.job.opens == {}
        assert sum(tries) >= 2, "it is tried again while saves wait"
        tried = len(tries)
        await asyncio.sleep(0.15)
        assert len(tries) <= tried + 2, "and left alone afterwards"

    agent(tmp_path, monkeypatch, play)
    said = [line for line in caplog.messages if "cannot be used: the mount is gone" in line]
    assert len(said) == 1, "an outage may last for hours"


@pytest.mark.parametrize("error_class", [StorageError, IntegrityError])
def test_a_store_that_cannot_be_used_at_all_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error_class: type[GroupIOError]
) -> None:
    """The deadline of a save is 10 minutes, and a mistyped path does not mend itself."""
    tries: list[bool] = []

    def follow(store: JobStore, *, create: bool) -> str:
        tries.append(create)
        more = {"errno": 30} if error_class is StorageError else {}
        raise error_class("the file system is mounted read-only", path=store.path, **more)

    monkeypatch.setattr(JobStore, "follow", follow)

    async def play(it: World) -> None:
        it.come()
        it.open(deadline_s=600.0)
        await until(it.failures)
        (error,) = it.failures()
        assert isinstance(error, error_class)
        assert error.message == "the file system is mounted read-only"
        assert len(tries) >= unjoined.UNUSABLE_TRIES, "it is tried again: some errors pass"
        assert it.job.opens == {}

    agent(tmp_path, monkeypatch, play)


def test_no_store_is_made_for_saves_that_are_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[bool] = []
    follow = JobStore.follow

    def away_at_first(store: JobStore, *, create: bool) -> str:
        tries.append(create)
        if len(tries) < 3:
            raise StorageError("the mount is gone", path=store.path, errno=107)
        return follow(store, create=create)

    monkeypatch.setattr(JobStore, "follow", away_at_first)
    monkeypatch.setattr(joining, "RETRY_S", 0.5)

    async def play(it: World) -> None:
        it.come()
        await until(lambda: not it.joining._preparing)
        it.open(deadline_s=0.05)
        await until(it.failures)
        retry = it.joining._timers["prepare"].when()
        await until(lambda: asyncio.get_running_loop().time() > retry)
        done: list[int] = []
        it.joining.run(lambda: done.append(1))
        await until(lambda: done)
        assert tries[:2] == [False, True]
        assert not any(tries[2:])
        assert not Path(it.path).exists()

    agent(tmp_path, monkeypatch, play)


def test_members_hear_in_time_although_the_store_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = threading.Event()

    def follow(store: JobStore, *, create: bool) -> str:
        hangs.wait(10)
        raise StorageError("at last", path=store.path, errno=5)

    monkeypatch.setattr(JobStore, "follow", follow)

    async def play(it: World) -> None:
        try:
            it.come()
            it.open(deadline_s=0.05)
            await until(it.failures)
            assert isinstance(it.failures()[0], GroupTimeout)
        finally:
            hangs.set()

    agent(tmp_path, monkeypatch, play)


def test_a_defect_in_the_thread_is_an_error_and_not_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(it: World) -> None:
        def broken() -> Rule:
            raise RuntimeError("a defect")

        it.make_store()
        current = it.coordinator.current
        it.coordinator.current = lambda deadline: broken()  # type: ignore[method-assign]
        it.come()
        await until(lambda: it.joining._machine.error is not None)
        assert "a defect" in str(it.joining._machine.error)
        done: list[int] = []
        it.joining.run(lambda: done.append(1 // 0))
        it.joining.run(lambda: done.append(1))
        await until(lambda: done)
        it.coordinator.current = current  # type: ignore[method-assign]
        await until(lambda: it.joining.joined)

    agent(tmp_path, monkeypatch, play)


def test_a_coordinator_that_is_away_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(it: World) -> None:
        it.coordinator.error = away()
        it.make_store()
        it.come()
        await until(lambda: it.joining._machine.error is not None)
        it.open(deadline_s=0.03)
        await until(it.failures)
        assert "nobody answers" in it.failures()[0].message
        told = _job(it.job)
        assert (told["joined"], told["why_not"]) == (False, "nobody answers")
        it.coordinator.error = None
        await until(lambda: it.joining.joined)

    agent(tmp_path, monkeypatch, play)


def test_a_port_that_is_taken_does_not_end_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older agent, which drains, may have it still."""

    async def play(it: World) -> None:
        it.network.error = InvalidInput("cannot listen on tcp://10.0.0.1:7: in use")
        it.come()
        it.open()
        await until(lambda: it.joining._machine.error is not None)
        await asyncio.sleep(0.05)
        assert not it.ended
        it.network.error = None
        await until(lambda: it.joining.joined)

    agent(tmp_path, monkeypatch, play)


def test_a_controller_that_somebody_starts_is_only_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_hand = Where(Kind.TCP, "tcp://10.0.0.9:1", "GROUPIO_CONTROLLER")

    async def play(it: World) -> None:
        it.network.error = InvalidInput("no gate is needed")
        client = await it.follow()
        assert client.address == by_hand.address
        monkeypatch.setattr(fo, "RECONNECT_S", 0.02)
        client.lose()
        await until(lambda: it.joining._machine.error is not None)
        assert "groupio controller run" in str(it.joining._machine.error)
        assert it.job.host is None

    agent(tmp_path, monkeypatch, play, by_hand)
