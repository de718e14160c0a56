"""Intervals of communication: what the agent hears, and what a real one then moves."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from client_store import StoreBuilder
from fake_agent import Background, FakeAgent

import groupio
from groupio.client.foreground import set_aside
from groupio.protocol import messages as msg
from groupio.testing.fabric_suite import eventually

Connect = Callable[..., groupio.Client]

SIZE = 48 << 20


def test_intervals_nest_and_the_lowest_share_counts(connect: Connect, agent: FakeAgent) -> None:
    client = connect(settings={"foreground_share": 0.25})
    peer = agent.peer()
    with client.foreground():
        with client.foreground(), client.foreground(0.5):
            pass
        with client.foreground(0):
            pass
    with pytest.raises(ZeroDivisionError), client.foreground(share=1):
        _ = 1 / 0
    told = [peer.take(msg.Foreground).share for _ in range(6)]
    assert told == [0.25, 0.0, 0.25, None, 1.0, None]
    client.close()
    assert isinstance(peer.take(msg.Bye), msg.Bye)


def test_a_rank_that_waits_for_a_load_is_in_no_interval(connect: Connect, agent: FakeAgent) -> None:
    first, second = connect(), connect()
    peers = agent.peer(), agent.peer()
    with first.foreground(0.5), second.foreground(0):
        with set_aside():
            with set_aside(), first.foreground(0.25):
                pass
            with first.foreground(0.75):
                pass
        with first.foreground(0.125):
            pass
    told = [[peer.take(msg.Foreground).share for _ in range(4)] for peer in peers]
    assert sorted(told, key=str) == [[0.0, None, 0.0, None], [0.5, None, 0.5, 0.125]]


def test_settling_what_was_staged_is_no_time_to_hold_it(
    connect: Connect, agent: FakeAgent, background: Background, store: StoreBuilder
) -> None:
    client = connect()
    peer = agent.peer()
    with client.foreground(0):
        loading = background.submit(client.load)
        assert peer.take(msg.Foreground).share == 0
        assert peer.take(msg.Foreground).share is None
        settle = peer.take(msg.Settle)
        peer.send(msg.Settled(settle.request_id))
        assert peer.take(msg.Foreground).share == 0
        with pytest.raises(groupio.NotFound):
            loading.result(20)
    assert peer.take(msg.Foreground).share is None


def test_an_agent_that_is_new_hears_of_an_open_interval(connect: Connect, agent: FakeAgent) -> None:
    client = connect()
    peer = agent.peer()
    with client.foreground(0.5):
        assert peer.take(msg.Foreground).share == 0.5
        peer.die()
        eventually(lambda: not client._connections[-1].is_usable)
        client._connected()
        peer = agent.peer()
        assert peer.take(msg.Foreground).share == 0.5
    assert peer.take(msg.Foreground).share is None


def test_without_an_agent_nothing_has_to_give_way(connect: Connect, agent: FakeAgent) -> None:
    client = connect()
    agent.peer().channel.close()
    with client.foreground():
        pass


@pytest.mark.parametrize("share", [-0.1, 1.1, "half", True, float("nan")])
def test_wrong_share_is_invalid(connect: Connect, share: object) -> None:
    with pytest.raises(groupio.InvalidInput, match="from 0"):
        connect().foreground(share)  # type: ignore[arg-type]
    if isinstance(share, float) and share == share:
        with pytest.raises(groupio.InvalidInput, match="foreground_share"):
            groupio.Settings(foreground_share=share)


@pytest.fixture
def real(tmp_path: Path) -> Iterator[groupio.Client]:
    """A client of an agent of its own."""
    settings = groupio.Settings(runtime_dir=str(tmp_path / "run"), idle_s=0.2)
    with groupio.connect(tmp_path / "store", rank=0, world_size=1, settings=settings) as client:
        yield client


def written(client: groupio.Client) -> int:
    """Bytes that the agent's process has written so far."""
    pid = client._connections[-1].welcome.agent_pid
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["wchar"])


def items(seed: int) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(seed).integers(0, 256, SIZE, np.uint8)}


def test_real_agent_writes_nothing_in_a_pause_and_all_of_it_later(real: groupio.Client) -> None:
    real.save({"x": np.zeros(10)}, epoch=1).wait("durable", 30)
    with real.foreground(share=0):
        time.sleep(0.1)
        before = written(real)
        handle = real.save(items(0), epoch=2, wait_for="staged")
        time.sleep(0.7)
        moved = written(real) - before
        assert handle.times.staged is not None
        assert handle.times.durable is None
    handle.wait("durable", 30)
    assert moved < 1 << 20  # records and logs
    assert written(real) - before > SIZE
    assert np.array_equal(real.load(2)["x"], items(0)["x"])


CHILD = """
import sys, time, groupio
client = groupio.connect(sys.argv[1], rank=0, world_size=1,
                         settings=groupio.Settings(runtime_dir=sys.argv[2]))
with client.foreground(share=0):
    print("in", flush=True)
    time.sleep(60)
"""


def test_interval_of_a_dead_rank_ends(real: groupio.Client) -> None:
    real.save({"x": np.zeros(10)}, epoch=1).wait("durable", 30)
    command = [sys.executable, "-c", CHILD, real.store + "-other", real.settings.runtime_dir or ""]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "in\n"
        time.sleep(0.1)
        handle = real.save(items(1), epoch=2, wait_for="staged")
        with pytest.raises(groupio.WaitTimeout):
            handle.wait("durable", 0.5)
        child.kill()
    handle.wait("durable", 8)
