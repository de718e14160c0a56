"""A stated uplink is kept to by a real agent, in both directions, and by nobody's surprise."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import groupio
from groupio import wire
from groupio.agent import process
from groupio.protocol import messages as msg
from groupio.testing.fabric_suite import eventually

MIB = 1 << 20
RATE = 10e6

Join = Callable[..., groupio.Client]


@pytest.fixture
def join(tmp_path: Path) -> Iterator[Join]:
    """Connects to an agent of its own, one for each ``node``."""
    with ExitStack() as stack:

        def connect(node: str = "n0", **settings: Any) -> groupio.Client:
            made = groupio.Settings(
                runtime_dir=str(tmp_path / node), node=node, idle_s=0.2, **settings
            )
            client = groupio.connect(tmp_path / "store", rank=0, world_size=1, settings=made)
            return stack.enter_context(client)

        yield connect


def data(seed: int, nbytes: int) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)}


def written(client: groupio.Client) -> int:
    """Bytes that the agent's process has written so far."""
    pid = client._connections[-1].welcome.agent_pid
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["wchar"])


def pace(client: groupio.Client) -> dict[str, Any]:
    paths = process.runtime_paths(client.settings.runtime_dir, groupio.__version__)
    channel = wire.Channel(wire.connect(paths.socket, timeout_s=5), msg.ToRank)
    try:
        channel.send(msg.Ask(1, "status"))
        shown: dict[str, Any] = channel.recv(10).message.body["agent"]["pace"]
        return shown
    finally:
        channel.close()


def test_writes_keep_to_a_stated_uplink_all_the_time(join: Join) -> None:
    client = join(uplink_bytes_per_s=RATE)
    client.save({"x": np.zeros(10)}, epoch=1).wait("durable", 30)
    before, began = written(client), time.monotonic()
    handle = client.save(data(0, 40_000_000), epoch=2, wait_for="staged")
    samples = []
    while handle.times.durable is None and time.monotonic() - began < 60:
        moved = written(client) - before
        samples.append((time.monotonic() - began, moved))
        time.sleep(0.05)
    handle.wait("durable", 30)
    took = time.monotonic() - began
    assert written(client) - before >= 40_000_000
    assert took >= 3.0
    for seconds, moved in samples:
        # A write of full size may be ahead of its time, and there are records and logs.
        assert moved <= RATE * seconds + 18 * MIB
    shown = pace(client)
    assert shown["held_s"] > 1
    assert (shown["uplink_bytes_per_s"], shown["fabric_bytes_per_s"]) == (RATE, None)
    assert shown["share"] == 1
    with client.foreground(0.25):
        eventually(lambda: pace(client)["share"] == 0.25)
    assert np.array_equal(client.load(2)["x"], data(0, 40_000_000)["x"])


def test_a_deadline_that_the_uplink_cannot_keep_is_explained(join: Join) -> None:
    client = join(uplink_bytes_per_s=2e6, memory_bytes=16 * MIB)
    client.save({"x": np.zeros(10)}, epoch=1).wait("durable", 30)
    began = time.monotonic()
    handle = client.save(data(1, 64 * MIB), epoch=2, deadline_s=2.0, wait_for="released")
    with pytest.raises(groupio.GroupTimeout, match="stated uplink of 2000000 bytes/s"):
        handle.wait("durable", 30)
    assert time.monotonic() - began < 20


def test_grouped_reads_of_an_agent_keep_to_a_stated_uplink(join: Join) -> None:
    size = 24_000_000
    first = join("n0", controller="store", memory_bytes=512 * MIB)
    first.save(data(2, size), epoch=1).wait("durable", 60)
    first.close()
    client = join("n1", controller="store", memory_bytes=512 * MIB, uplink_bytes_per_s=RATE)
    client._connected()
    began = time.monotonic()
    loaded = client.load(1)
    took = time.monotonic() - began
    assert np.array_equal(loaded["x"], data(2, size)["x"])
    assert took >= 1.5
    assert pace(client)["held_s"] > 0.5


def test_a_rank_that_loads_in_its_own_interval_does_not_wait_for_its_end(join: Join) -> None:
    size = 24_000_000
    first = join("n0", controller="store", memory_bytes=512 * MIB)
    first.save(data(3, size), epoch=1).wait("durable", 60)
    first.close()
    client = join("n1", controller="store", memory_bytes=512 * MIB)
    client._connected()
    with client.foreground(share=0):
        eventually(lambda: pace(client)["share"] == 0)
        began = time.monotonic()
        loaded = client.load(1)
        took = time.monotonic() - began
        eventually(lambda: pace(client)["share"] == 0)
    assert np.array_equal(loaded["x"], data(3, size)["x"])
    assert pace(client)["uplink_bytes_per_s"] is None
    assert took < 8, "a pause lasts 10 s"
