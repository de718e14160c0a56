"""The agent's driver with a client in the same process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from groupio.agent import process
from groupio.agent.driver import Driver
from groupio.protocol import messages as msg
from groupio.settings import Settings
from groupio.wire import Channel, connect


async def until(test: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not test():
            await asyncio.sleep(0.002)


def test_a_goodbye_counts_that_an_answer_crosses(
    paths: process.RuntimePaths, tmp_path: Path
) -> None:
    settings = Settings(memory_bytes=64 << 20, idle_s=60)
    residence = process.Residence.take(paths)
    driver = Driver(settings, residence)

    async def use() -> None:
        serving = asyncio.create_task(driver.run(lambda: None))
        channel = Channel(connect(paths.socket, timeout_s=5), msg.ToRank)
        hello = msg.Hello(msg.PROTOCOL_VERSION, "one", os.getpid(), 0, 1, str(tmp_path / "store"))
        channel.send(hello)
        channel.send(msg.Expect(1 << 20))
        await until(lambda: driver.machine.arenas and not driver.memory._populates)
        peer = driver.clients["one"]
        channel.send(msg.Bye())
        channel.close()
        driver.send(peer, msg.Standby(0, 4096))
        await until(lambda: not driver.clients)
        await until(lambda: not driver.jobs)
        assert peer.fenced
        assert not driver.machine.arenas
        assert not driver.memory.arenas
        assert not driver.watches._watches
        driver.quit()
        await serving

    try:
        asyncio.run(use())
    finally:
        residence.close()
