"""Saves that no controller takes up: who is told what, and when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from groupio.agent import unjoined
from groupio.agent.job import Job
from groupio.agent.unjoined import GRACE_S, REFUSED_S, Unjoined
from groupio.errors import GroupIOError, GroupTimeout, InvalidInput
from groupio.protocol import effects as fx
from groupio.protocol import events as ev

PROCESS = ev.Process(1, 1)


class World:
    """A job with saves, a clock, and what members and the controller are told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.told: list[tuple[fx.MemberSeat, GroupIOError]] = []
        self.heard: list[Any] = []
        self.machine = SimpleNamespace(groups={})
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(unjoined, "time", clock)
        monkeypatch.setattr("groupio.agent.job.time", clock)
        self.job = Job("/store", SimpleNamespace())  # type: ignore[arg-type]
        self.job.joining = SimpleNamespace(tell=self.heard.append)  # type: ignore[assignment]
        self.it = Unjoined(self, self.job)  # type: ignore[arg-type]

    def obey(self, job: Job, effect: fx.TellFailed) -> None:
        job.over(effect)
        self.told.append((effect.seat, effect.error))

    def open(self, save_id: int, deadline_s: float = 60.0) -> ev.MemberOpened:
        opened = ev.MemberOpened(
            node="n0",
            client="c",
            process=PROCESS,
            rank=3,
            world_size=4,
            save_id=save_id,
            epoch=7,
            deadline_s=deadline_s,
            elapsed_s=1.0,
            at=self.now,
            total_bytes=1,
            bytes_logical=1,
            items_id=b"i",
        )
        self.job.tell(opened)
        self.heard.clear()
        return opened

    def admit(self, opened: ev.MemberOpened) -> None:
        lease = SimpleNamespace(seat=fx.MemberSeat(opened.rank, opened.client, opened.save_id))
        self.machine.groups[1] = SimpleNamespace(leases={opened.rank: lease})


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_members_wait_until_their_deadlines(world: World) -> None:
    world.it.note("the network is down")
    world.open(1, 10.0)
    world.open(2, 60.0)
    world.now += 10.0 - 1.0 + GRACE_S  # one second had gone before
    world.it.look()
    assert world.told == [], "a controller that is there may still say so itself"
    world.now += 0.1
    world.it.look()
    ((seat, error),) = world.told
    assert seat == fx.MemberSeat(3, "c", 1)
    assert isinstance(error, GroupTimeout)
    assert "within 10 s" in error.message
    assert "(the network is down)" in error.message
    assert error.epoch == 7
    assert world.heard == [ev.MemberFailed("c", 1, error)], "whoever rules later knows it"
    world.it.look()
    assert len(world.told) == 1, "once"
    assert list(world.job.opens) == [("c", 2)]


def test_the_reason_is_left_out_when_none_is_known(world: World) -> None:
    world.it.note("gone by now")
    world.it.over()
    world.open(1, 1.0)
    world.now += 5
    world.it.look()
    assert "reached. Look" in world.told[0][1].message


def test_saves_with_memory_are_the_controllers(world: World) -> None:
    first, second = world.open(1, 1.0), world.open(2, 1.0)
    world.admit(first)
    assert [one.save_id for one in world.it.waiting()] == [2]
    world.now += 100
    (waiting,) = world.it.waiting()
    assert waiting == replace(second, elapsed_s=101.0, at=world.now)
    world.it.look()
    assert [seat.save_id for seat, _ in world.told] == [2]


def test_a_refusal_is_told_after_a_while_whatever_the_deadline(world: World) -> None:
    world.open(1)
    world.open(2)
    why = InvalidInput("two agents call themselves node n0")
    world.it.refused(why)
    world.now += REFUSED_S - 0.1
    world.it.refused(why)  # refused again and again: the time runs from the first
    world.it.look()
    assert world.told == []
    world.now += 0.1
    world.it.look()
    errors = [error for _, error in world.told]
    assert [str(error) for error in errors] == [why.message] * 2
    assert [type(error) for error in errors] == [InvalidInput] * 2
    assert len({id(error) for error in (why, *errors)}) == 3, "each has an error of its own"


def test_a_refusal_says_more_than_a_deadline(world: World) -> None:
    world.open(1, 2.0)
    why = InvalidInput("two agents call themselves node n0")
    world.it.refused(why)
    world.now += 5.0
    world.it.look()
    assert [error for _, error in world.told] == [why]


def test_what_was_refused_before_a_controller_took_the_agent_is_over(world: World) -> None:
    world.it.refused(InvalidInput("no"))
    world.it.over()
    world.open(1)
    world.now += REFUSED_S
    world.it.look()
    assert world.told == []
    world.it.refused(InvalidInput("no"))
    world.it.look()
    assert world.told == [], "a new refusal has its own time"


def test_a_draining_agent_names_what_waits(world: World) -> None:
    first = world.open(1)
    world.open(2)
    world.admit(first)
    (failed,) = world.it.drain()
    assert (failed.client, failed.save_id) == ("c", 2)
    assert world.told == []
