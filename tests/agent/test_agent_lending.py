"""The node's staging memory at work: opened, filled ahead of use, lent, and given back."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from groupio.agent import lending
from groupio.agent.arena import MemberArena
from groupio.agent.lending import Memory, yield_to_others
from groupio.errors import StagingFull
from groupio.model import PAGE_BYTES, DecisionKey
from groupio.plan.layout import Wave
from groupio.protocol import effects as fx
from groupio.protocol import messages as msg

MIB = 1 << 20


class World:
    """A driver with one client; steps that threads post are run when the test says so."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, tuple[int, ...]]] = []
        self.posted: list[Any] = []
        self.changed = threading.Condition()
        self.clients = {"c": SimpleNamespace(client="c")}
        self.memory = Memory(self)  # type: ignore[arg-type]

    def send(self, peer: Any, message: Any, fds: tuple[int, ...] = ()) -> None:
        assert peer is self.clients["c"]
        self.sent.append((message, fds))

    def post(self, step: Any) -> None:
        with self.changed:
            self.posted.append(step)
            self.changed.notify_all()

    def step(self) -> None:
        """Run the next step that a thread posted."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.posted, 20)
            step = self.posted.pop(0)
        step()

    def open(self, arena: int = 1, client: str = "c") -> MemberArena:
        self.memory.execute(fx.OpenArena(arena, client))
        return self.memory.arenas[arena]

    @property
    def messages(self) -> list[Any]:
        return [message for message, _ in self.sent]


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.memory.shut()
    made.memory.close()


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Filling memory goes on, slice by slice, until it is stopped or the test lets it end."""
    state = SimpleNamespace(begun=threading.Event(), free=threading.Event(), slices=0, error=None)

    def populate(arena: MemberArena, offset: int, length: int, *, should_stop: Any) -> None:
        state.begun.set()
        until = time.monotonic() + 20
        while not (should_stop() or state.free.is_set()) and time.monotonic() < until:
            state.slices += 1
            time.sleep(0.002)
        if state.error is not None:
            raise state.error

    monkeypatch.setattr(MemberArena, "populate", populate)
    yield state
    state.free.set()


def grant(client: str = "c", low: int = 0, high: int = 2 * MIB) -> fx.GrantLease:
    wave = Wave(3, 5, low, high)
    return fx.GrantLease(client, 9, 1, DecisionKey(1, 7, 1), 1, 2 * MIB, 1, 2, wave)


def test_a_client_gets_its_arena(world: World) -> None:
    arena = world.open()
    assert world.sent == [(msg.Arena(), (arena.fd,))]
    world.open(0, "")  # the agent's own
    world.open(2, "gone")
    assert len(world.sent) == 1


def test_a_lease_is_mapped_and_granted(world: World) -> None:
    arena = world.open()
    world.memory.execute(grant())
    assert world.messages[-1] == msg.Grant(
        save_id=9,
        key=DecisionKey(1, 7, 1),
        wave=1,
        waves=2,
        offset=2 * MIB,
        virt_lo=0,
        virt_hi=2 * MIB,
        chunk_lo=3,
        chunk_hi=5,
    )
    assert os.fstat(arena.fd).st_size == 4 * MIB
    world.memory.execute(grant(high=0))
    assert world.messages[-1].virt_hi == 0, "a save without bytes has nothing to map"
    world.memory.execute(grant("gone"))
    assert len(world.messages) == 3


def test_memory_is_filled_ahead_and_the_client_told(world: World) -> None:
    arena = world.open()
    world.memory.execute(fx.Populate(1, 0, 2 * MIB, "c"))
    world.step()
    assert arena.resident_bytes() >= 2 * MIB
    assert world.messages[-1] == msg.Standby(0, 2 * MIB)
    world.memory.execute(fx.Populate(1, 2 * MIB, 2 * MIB, "gone"))
    world.step()
    assert len(world.messages) == 2
    world.memory.execute(fx.Punch(1, 0, 2 * MIB))
    assert arena.resident_bytes() == 2 * MIB
    assert world.memory._populates == {}


def test_filling_stops_when_the_memory_is_given_back(world: World, stuck: Any) -> None:
    world.open()
    world.memory.execute(fx.Populate(1, 0, 2 * MIB, "c"))
    world.memory.execute(fx.Populate(1, 4 * MIB, 2 * MIB, "c"))
    assert stuck.begun.wait(20)
    world.memory.execute(fx.Punch(1, 4 * MIB, 2 * MIB))  # has not begun
    world.memory.execute(fx.Punch(1, 0, 2 * MIB))
    world.step()
    world.step()
    assert world.messages == [msg.Arena()]
    assert world.memory.arenas[1].resident_bytes() == 0
    assert world.memory._populates == {}


def test_the_place_may_be_wanted_again_before_the_thread_knows(world: World, stuck: Any) -> None:
    world.open()
    world.memory.execute(fx.Populate(1, 0, 2 * MIB, "c"))
    assert stuck.begun.wait(20)
    world.memory.execute(fx.Punch(1, 0, 2 * MIB))
    world.memory.execute(fx.Populate(1, 0, 4 * MIB, "c"))
    world.step()
    assert list(world.memory._populates) == [(1, 0)], "the second one's"
    stuck.free.set()
    world.step()
    assert world.messages == [msg.Arena(), msg.Standby(0, 4 * MIB)]
    assert world.memory._populates == {}


def test_filling_stops_when_the_arena_is_closed(world: World, stuck: Any) -> None:
    arena = world.open()
    world.open(2)
    world.memory.execute(fx.Populate(2, 0, 2 * MIB, "c"))
    world.memory.execute(fx.Populate(1, 0, 2 * MIB, "c"))
    assert stuck.begun.wait(20)
    world.memory.execute(fx.CloseArena(1))
    assert arena.fd == -1
    assert list(world.memory.arenas) == [2]
    stuck.free.set()
    world.step()
    world.step()
    assert world.messages[2:] == [msg.Standby(0, 2 * MIB)], "the other one's"


def test_an_agent_that_ends_does_not_wait_for_memory_to_be_filled(world: World, stuck: Any) -> None:
    """At 64 GiB that would be half a minute, and memory that others need."""
    world.open()
    world.memory.execute(fx.Populate(1, 0, 2 * MIB, "c"))
    world.memory.execute(fx.Populate(1, 2 * MIB, 2 * MIB, "c"))
    assert stuck.begun.wait(20)
    world.memory.shut()
    began = time.monotonic()
    world.memory._populating.shutdown(wait=True)
    assert time.monotonic() - began < 10
    assert not stuck.free.is_set()
    world.memory.close()
    assert world.memory.arenas[1].fd == -1


@pytest.mark.parametrize(
    "error",
    [StagingFull("no memory", needed=1), OSError(5, "x"), ValueError("closed"), RuntimeError("y")],
)
def test_memory_that_cannot_be_filled_is_no_reason_to_stop(
    world: World, stuck: Any, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    lending.log.addHandler(handler)
    world.open()
    stuck.error = error
    stuck.free.set()
    world.memory.execute(fx.Populate(1, 0, 2 * MIB, "c"))
    world.step()
    lending.log.removeHandler(handler)
    assert len(said) == 1
    assert "not prepared" in said[0]
    assert world.messages == [msg.Arena()]
    assert world.memory._populates == {}
    stuck.error = None
    world.memory.execute(fx.Populate(1, 0, 2 * MIB, "c"))
    world.step()
    assert world.messages[-1] == msg.Standby(0, 2 * MIB), "the thread lives"


def test_bytes_are_seen_at_any_place(world: World) -> None:
    arena = world.open()
    arena.map(0, 4 * PAGE_BYTES)[:] = bytes(range(256)) * (4 * PAGE_BYTES // 256)
    view = world.memory.view(1, PAGE_BYTES + 3, PAGE_BYTES)
    assert view is not None
    assert bytes(view[:5]) == bytes([3, 4, 5, 6, 7])
    assert len(view) == PAGE_BYTES
    assert world.memory.view(7, 0, 1) is None


def test_an_arena_that_was_closed_just_now_shows_nothing(world: World) -> None:
    """Not zeros, which a map without a file would be."""
    arena = world.open()
    arena.map(0, PAGE_BYTES)
    arena.close()  # between the look into the table and the map
    assert world.memory.view(1, 0, 10) is None
    assert world.memory.view(1, 8 * PAGE_BYTES, 10) is None
    with pytest.raises(ValueError, match="closed"):
        arena.map(0, PAGE_BYTES)


def test_the_thread_gives_way() -> None:
    nice: list[int] = []

    def look() -> None:
        before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        yield_to_others()
        nice.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) - before)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert 0 < nice[0] <= 5
