"""The agent's driver with a client in the same process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from groupio.agent import process
from groupio.agent.driver import Driver
from groupio.agent.peer import Peer
from groupio.agent.status import status
from groupio.protocol import messages as msg
from groupio.settings import Settings
from groupio.wire import Channel, connect


async def until(test: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not test():
            await asyncio.sleep(0.002)


def serve(
    paths: process.RuntimePaths,
    store: Path,
    act: Callable[[Driver, Channel], Awaitable[None]],
) -> None:
    """Let ``act`` use a driver to which a client "one" has connected; nothing of it may stay."""
    settings = Settings(memory_bytes=64 << 20, idle_s=60)
    residence = process.Residence.take(paths)
    driver = Driver(settings, residence)

    async def use() -> None:
        serving = asyncio.create_task(driver.run(lambda: None))
        channel = Channel(connect(paths.socket, timeout_s=5), msg.ToRank)
        channel.send(msg.Hello(msg.PROTOCOL_VERSION, "one", os.getpid(), 0, 1, str(store)))
        await until(lambda: driver.clients)
        await act(driver, channel)
        channel.close()
        await until(lambda: not driver.clients and not driver.jobs)
        assert not driver.machine.arenas
        assert not driver.memory.arenas
        assert not driver.watches._watches
        driver.quit()
        await serving

    try:
        asyncio.run(use())
    finally:
        residence.close()


def test_a_goodbye_counts_that_an_answer_crosses(
    paths: process.RuntimePaths, tmp_path: Path
) -> None:
    async def act(driver: Driver, channel: Channel) -> None:
        channel.send(msg.Expect(1 << 20))
        await until(lambda: driver.machine.arenas and not driver.memory._populates)
        peer = driver.clients["one"]
        channel.send(msg.Bye())
        channel.close()
        driver.send(peer, msg.Standby(0, 4096))
        await until(lambda: not driver.clients)
        assert peer.fenced

    serve(paths, tmp_path / "store", act)


def test_no_memory_is_prepared_for_a_client_that_has_said_goodbye(
    paths: process.RuntimePaths, tmp_path: Path
) -> None:
    async def act(driver: Driver, channel: Channel) -> None:
        peer = driver.clients["one"]
        assert peer.job is not None
        peer.job.store.lease_bytes[0] = 1 << 20
        channel.send(msg.Bye())
        await until(lambda: peer.closed)
        driver._stand_by(peer.job)
        channel.send(msg.Expect(1 << 20))

    serve(paths, tmp_path / "store", act)


def test_the_status_says_on_how_many_processors_it_runs(
    paths: process.RuntimePaths, tmp_path: Path
) -> None:
    whole = os.sched_getaffinity(0)

    async def act(driver: Driver, channel: Channel) -> None:
        # Of this thread alone, which is the event loop's.
        os.sched_setaffinity(0, {min(whole)})
        try:
            assert status(driver)["agent"]["processors"] == 1
        finally:
            os.sched_setaffinity(0, whole)
        assert status(driver)["agent"]["processors"] == len(whole)
        channel.send(msg.Bye())

    serve(paths, tmp_path / "store", act)


@pytest.mark.parametrize("lives", [False, True])
def test_only_a_client_that_lives_and_does_not_read_is_dropped_with_a_warning(
    paths: process.RuntimePaths, tmp_path: Path, caplog: pytest.LogCaptureFixture, lives: bool
) -> None:
    caplog.set_level("DEBUG", "groupio.agent.driver")
    store = tmp_path / "store"

    async def act(driver: Driver, channel: Channel) -> None:
        peer = driver.clients["one"]
        if lives:
            peer.channel._backlog_bytes_max = 1 << 20
        else:
            channel.close()
        for _ in range(100):
            driver.send(peer, msg.Answer(1, {"text": "x" * (1 << 16)}))
        await until(lambda: not peer.connected)

    serve(paths, store, act)
    said = [r for r in caplog.records if "process" in r.getMessage()]
    warnings = [r.getMessage() for r in said if r.levelname == "WARNING"]
    if not lives:
        assert warnings == []
        assert [r.levelname for r in said if "sending failed" in r.getMessage()] == ["DEBUG"]
    else:
        assert len(warnings) == 1
        assert f"rank 0 of {store} (process {os.getpid()}) is dropped: the peer left" in warnings[0]
        assert "bytes unread" in warnings[0]
        assert "SIGCONT" in warnings[0]


def test_who_has_not_said_who_it_is_is_named_by_its_process() -> None:
    assert str(Peer(None, 4321)).startswith("process 4321")  # type: ignore[arg-type]
