"""A peer whose connection ended is asked whether it lives, and soon given up if it says nothing."""

from __future__ import annotations

import dataclasses

import pytest
from link_world import FAST, LinkWorld, Told

from groupio.protocol import link as lk
from groupio.protocol.link import Link
from groupio.protocol.linkframe import Frame, FrameKind

DOUBT_S = FAST.doubt_s


def connected(**options: object) -> tuple[LinkWorld, Told, Told]:
    world = LinkWorld(1, **options)  # type: ignore[arg-type]
    a = world.dial()
    world.run(0.1)
    return world, a, world.other(a)


def lose_way(world: LinkWorld, told: Told) -> None:
    world.feed(told.link, lk.Unreachable(world.now))


def sent(effects: list[lk.Effect]) -> list[FrameKind]:
    return [effect.frame.kind for effect in effects if isinstance(effect, lk.Transmit)]


@pytest.mark.parametrize("side", [0, 1], ids=["dialling", "listening"])
def test_a_dead_peer_is_lost_long_before_silence_says_so(side: int) -> None:
    world, *ends = connected()
    one, dead = ends[side], ends[1 - side]
    world.run(3)
    world.cut = {"aa", "bb"}
    world.close(dead.link)
    at = world.now
    lose_way(world, one)
    world.run(60)
    assert one.lost_at == pytest.approx(at + DOUBT_S, abs=0.01)
    assert FAST.silence_s / 2 > DOUBT_S
    assert one.link.vanished
    assert one.lost is not None
    assert one.lost.startswith("its connection was closed, and it was silent for 1.")


def test_silence_without_an_end_of_the_connection_takes_its_time() -> None:
    world, a, b = connected()
    world.cut = {"aa", "bb"}
    at = world.now
    world.run(60)
    assert min(a.lost_at, b.lost_at) > at + FAST.silence_s - FAST.heartbeat_s
    assert not a.link.vanished
    assert not b.link.vanished


def test_a_sign_of_life_ends_the_doubt() -> None:
    world, a, b = connected()
    before = world.frames
    lose_way(world, a)
    world.run(0.05)
    assert world.frames - before == 2, "one question, answered at once"
    world.run(30)
    assert not a.ended
    assert not b.ended
    world.send(a.link, b"on")
    world.run(0.1)
    assert b.messages == [b"on"]


def test_a_connection_that_comes_back_in_time_loses_nothing() -> None:
    world, a, b = connected()
    for number in range(6):
        world.cut = {"aa", "bb"}
        lose_way(world, a)
        lose_way(world, b)
        world.send(a.link, b"up %d" % number)
        world.send(b.link, b"down %d" % number)
        world.run(0.7 * DOUBT_S)
        world.cut = set()
        world.run(1)
    assert b.messages == [b"up %d" % n for n in range(6)]
    assert a.messages == [b"down %d" % n for n in range(6)]
    world.run(60)
    assert not a.ended
    assert not b.ended


def test_a_second_hint_changes_nothing() -> None:
    world, a, _ = connected()
    world.cut = {"aa", "bb"}
    at = world.now
    for _ in range(8):
        lose_way(world, a)
        world.feed(a.link, lk.Ask(world.now))
        world.run(0.1)
    world.run(60)
    assert a.lost_at == pytest.approx(at + DOUBT_S, abs=0.01)


def test_an_end_is_asked_without_being_in_doubt() -> None:
    world, a, _ = connected()
    before = world.frames
    world.feed(a.link, lk.Ask(world.now))
    world.run(0.05)
    assert world.frames - before == 2
    world.cut = {"aa", "bb"}
    world.feed(a.link, lk.Ask(world.now))
    world.run(2 * DOUBT_S)
    assert not a.ended


def test_nobody_takes_a_connection() -> None:
    world = LinkWorld(1)
    world.cut = {"bb"}
    a = world.dial()
    at = world.now
    world.run(0.3)
    lose_way(world, a)
    before = world.frames
    world.run(0.6 * DOUBT_S)
    assert world.frames - before <= 2, "it is only dialled again"
    lose_way(world, a)
    world.run(60)
    assert a.opened is None
    assert a.link.vanished
    assert a.lost == "it takes no connection, and it was silent for 1.3 s"
    assert a.lost_at == pytest.approx(at + 0.3 + DOUBT_S, abs=0.01)


def test_a_connection_that_is_taken_at_last() -> None:
    world = LinkWorld(1)
    world.cut = {"bb"}
    a = world.dial()
    lose_way(world, a)
    world.run(0.6 * DOUBT_S)
    world.cut = set()
    world.run(10)
    assert a.opened == b"from b"
    assert not a.ended


def test_before_the_session_stands_there_is_nobody_to_ask() -> None:
    link = Link("aa.1", 0.0, config=FAST)
    link.handle(lk.Tick(0.0))
    assert link.handle(lk.Ask(0.1)) == []
    half = Link("bb.1", 0.0, peer="aa.1", config=FAST)
    half.handle(lk.Received(0.0, Frame("aa.1", "", FrameKind.OPEN)))
    assert half.handle(lk.Unreachable(0.1)) == []


def standing() -> Link:
    link = Link("aa.1", 0.0, config=dataclasses.replace(FAST, silence_s=60))
    link.handle(lk.Tick(0.0))
    link.handle(lk.Received(0.0, Frame("bb.1", "aa.1", FrameKind.ACCEPT)))
    return link


def test_time_in_which_this_process_could_not_listen_does_not_count() -> None:
    link = standing()
    now = 0.1
    assert sent(link.handle(lk.Unreachable(now))) == [FrameKind.PROBE]
    for _ in range(FAST.probes + 1):
        now += 2.5 * FAST.probe_s
        assert sent(link.handle(lk.Tick(now))) == [FrameKind.PROBE]
    for _ in range(FAST.probes - 1):
        now += FAST.probe_s
        assert FrameKind.PROBE in sent(link.handle(lk.Tick(now)))
        assert not link.ended
    now += FAST.probe_s
    assert any(isinstance(effect, lk.Lost) for effect in link.handle(lk.Tick(now)))
    assert link.vanished


def test_an_answer_that_waited_in_this_process_counts() -> None:
    link = standing()
    link.handle(lk.Unreachable(0.1))
    link.handle(lk.Received(5.0, Frame("bb.1", "aa.1", FrameKind.ACK)))
    link.handle(lk.Tick(5.0))
    link.handle(lk.Tick(5.0 + 2 * DOUBT_S))
    assert not link.ended


@pytest.mark.parametrize("seed", range(20))
def test_hints_at_any_time_over_a_lossy_way(seed: int) -> None:
    world = LinkWorld(seed, drop=0.1, double=0.1)
    a = world.dial()
    world.run(2)
    b = world.other(a)
    for number in range(40):
        world.send(a.link, b"up %d" % number)
        world.send(b.link, b"down %d" % number)
        lose_way(world, world.random.choice((a, b)))
        world.run(world.random.uniform(0, 0.5))
    world.run(10)
    assert b.messages == [b"up %d" % n for n in range(40)]
    assert a.messages == [b"down %d" % n for n in range(40)]
    assert not a.ended
    assert not b.ended
