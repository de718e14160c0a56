"""While a rank communicates storage keeps to a share, but never for ever."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import pytest

from groupio.agent.foreground import FOREGROUND_MAX_S, GAP_PART, Foreground
from groupio.agent.uplink import Brake
from groupio.fabric.pacing import Pacer
from groupio.fabric.tcp import TcpFabric
from groupio.testing.fabric_suite import JOB, MIB, TOKEN, Holdings, eventually, soon, want


class World:
    """A foreground with a clock that the test moves."""

    def __init__(self) -> None:
        self.applied: list[float] = []
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._now = 0.0
        self.foreground = Foreground(self.applied.append, self._later, lambda: self._now)

    def _later(self, seconds: float, step: Callable[[], None]) -> None:
        self._timers.append((self._now + seconds, step))

    def sleep(self, seconds: float) -> None:
        self._now += seconds
        due = [step for at, step in self._timers if at <= self._now]
        self._timers = [timer for timer in self._timers if timer[0] > self._now]
        for step in due:
            step()


def test_lowest_share_of_all_clients_counts() -> None:
    world = World()
    enter, leave = world.foreground.enter, world.foreground.leave
    enter("a", 0.5)
    enter("b", 0.1)
    enter("c", 0.3)
    leave("b")
    leave("b")
    enter("a", 0.2)
    leave("a")
    leave("c")
    leave("nobody")
    assert world.applied == [0.5, 0.1, 0.3, 0.2, 0.3, 1.0]


def test_intervals_without_a_gap_cannot_starve_storage(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    for turn in range(20):
        world.foreground.enter(str(turn), 0.0)
        world.sleep(FOREGROUND_MAX_S / 10)
        world.foreground.enter(str(turn + 1), 0.0)
        world.foreground.leave(str(turn))
    assert world.applied == [0.0, 1.0]
    assert "hardly a gap" in caplog.text
    world.foreground.leave("20")
    world.foreground.enter("a", 0.0)
    assert world.applied == [0.0, 1.0, 0.0]


def test_a_gap_makes_good_what_was_held_before_it() -> None:
    world = World()
    world.foreground.enter("a", 0.0)
    world.sleep(FOREGROUND_MAX_S - 1)
    world.foreground.leave("a")
    world.sleep(FOREGROUND_MAX_S * GAP_PART)
    world.foreground.enter("a", 0.0)
    world.sleep(FOREGROUND_MAX_S - 1)
    assert world.applied == [0.0, 1.0, 0.0]
    world.sleep(1)
    assert world.applied == [0.0, 1.0, 0.0, 1.0]


def test_an_interval_that_holds_nothing_back_counts_for_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World()
    world.foreground.enter("a", 1.0)
    for _ in range(60):
        world.sleep(1)
    assert caplog.text == ""
    world.foreground.enter("a", 0.0)
    world.sleep(FOREGROUND_MAX_S - 1)
    assert world.applied == [0.0]
    world.sleep(1)
    world.sleep(1)
    assert world.applied == [0.0, 1.0]


def test_short_gaps_cannot_starve_storage() -> None:
    world, free = World(), 0.0
    for _ in range(2000):
        world.foreground.enter("a", 0.0)
        for _ in range(9):
            world.sleep(0.01)
            free += 0.01 * (world.foreground.share == 1)
        world.foreground.leave("a")
        world.sleep(0.001)
    assert free >= 2000 * 0.09 * GAP_PART / 2
    assert free <= 2000 * 0.09 * GAP_PART * 2


def test_gaps_that_are_long_enough_keep_storage_held() -> None:
    world = World()
    for _ in range(100):
        world.foreground.enter("a", 0.0)
        world.sleep(0.8)
        world.foreground.leave("a")
        world.sleep(0.2)
    assert world.applied == [0.0, 1.0] * 100


@pytest.mark.parametrize(("share", "most"), [(0.0, 0.0), (0.1, 0.2), (0.5, 0.65)])
def test_brake_leaves_a_share_of_the_time(share: float, most: float) -> None:
    brake, worked, stop = Brake(), [0.0], threading.Event()

    def work() -> None:
        while not stop.is_set():
            brake.wait(stop.is_set)
            began = time.monotonic()
            time.sleep(0.005)
            worked[0] += time.monotonic() - began
            brake.worked(began)

    thread = threading.Thread(target=work)
    thread.start()
    eventually(lambda: worked[0] > 0)
    brake.set(share)
    time.sleep(0.1)
    before, began = worked[0], time.monotonic()
    time.sleep(0.6)
    part = (worked[0] - before) / (time.monotonic() - began)
    stop.set()
    brake.set(1.0)
    thread.join()
    assert part <= most


def test_fabric_moves_no_more_than_its_share_in_an_interval() -> None:
    holdings = Holdings()
    wants = [want(holdings.put(os.urandom(MIB)), MIB) for _ in range(40)]
    moved = [0]
    with (
        TcpFabric(token=TOKEN, pace=Pacer(64 * MIB)) as serving,
        TcpFabric(token=TOKEN, pace=Pacer(64 * MIB)) as fabric,
    ):
        address = serving.serve(holdings)
        foreground = Foreground(fabric.pace.set_share, lambda seconds, step: None)

        def count(index: int, outcome: object) -> None:
            moved[0] += MIB

        pulling = threading.Thread(
            target=lambda: fabric.pull(address, JOB, wants, deadline=soon(), on_done=count)
        )
        pulling.start()
        eventually(lambda: moved[0] >= 4 * MIB)
        foreground.enter("a", 0.1)
        time.sleep(0.15)  # what the system had buffered arrives
        before, began = moved[0], time.monotonic()
        time.sleep(0.5)
        rate = (moved[0] - before) / (time.monotonic() - began)
        foreground.leave("a")
        pulling.join()
    assert rate <= 0.2 * 64 * MIB
    assert moved[0] == 40 * MIB
