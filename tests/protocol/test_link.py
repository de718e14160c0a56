"""Sessions over a lossy transport, case by case."""

from __future__ import annotations

import dataclasses

import pytest
from link_world import FAST, LinkWorld, Told

from groupio.errors import FormatError, InvalidInput
from groupio.protocol import link as lk
from groupio.protocol import linkframe
from groupio.protocol.link import Link
from groupio.protocol.linkconfig import LinkConfig
from groupio.protocol.linkframe import (
    Frame,
    FrameKind,
    bye,
    decode_frame,
    encode_frame,
    life_of,
    reject,
)
from groupio.protocol.listener import Listener


def connected(**options: object) -> tuple[LinkWorld, Told, Told]:
    world = LinkWorld(1, **options)  # type: ignore[arg-type]
    a = world.dial()
    world.run(0.1)
    assert a.opened == b"from b"
    b = world.other(a)
    assert b.opened == b"from a"
    return world, a, b


def kinds(effects: list[lk.Effect]) -> list[FrameKind]:
    return [effect.frame.kind for effect in effects if isinstance(effect, lk.Transmit)]


def test_messages_go_both_ways_and_idle_ends_stay_up() -> None:
    world, a, b = connected()
    world.send(a.link, b"one")
    world.send(a.link, b"")
    world.send(b.link, b"a message of more than one fragment")
    world.run(60)
    assert b.messages == [b"one", b""]
    assert a.messages == [b"a message of more than one fragment"]
    assert not a.ended
    assert not b.ended
    assert a.link.backlog_bytes == a.link.held_bytes == 0
    assert world.frames < 60 / FAST.heartbeat_s * 2 + 60, "heartbeats only"
    assert a.link.peer_life == "bb"
    assert b.link.peer_life == "aa"


def test_what_is_sent_before_the_session_stands_waits_for_it() -> None:
    world = LinkWorld(1)
    a = world.dial()
    world.send(a.link, b"early")
    assert a.link.backlog_bytes == 5
    world.run(0.1)
    assert world.other(a).messages == [b"early"]


def test_nobody_answers() -> None:
    world = LinkWorld(1)
    world.cut = {"bb"}
    a = world.dial()
    world.run(10)
    assert a.opened is None
    assert a.lost == "the peer did not answer for 4.0 s"
    half = [told for name, told in world.told.items() if name.startswith("bb")]
    assert half
    assert all(told.ended and told.opened is None for told in half)
    assert len(world.listener) == 0


def test_close_tells_the_peer_and_nobody_else() -> None:
    world, a, b = connected()
    world.close(a.link)
    world.run(1)
    assert b.lost == "closed by the peer"
    assert a.lost is None
    assert a.ended
    assert a.link.handle(lk.Send(world.now, b"x")) == []


def test_a_dialling_end_that_closes_early_tells_nobody() -> None:
    link = Link("aa.1", 0.0, config=FAST)
    link.handle(lk.Tick(0.0))
    assert link.handle(lk.Close(0.0)) == []
    assert link.ended


@pytest.mark.parametrize("cut", [{"aa"}, {"bb"}, {"aa", "bb"}], ids=["to b", "to a", "both"])
def test_a_cut_ends_both_sides_in_time(cut: set[str]) -> None:
    world, a, b = connected()
    world.run(7.77)
    world.cut = cut
    at = world.now
    world.run(60)
    assert a.lost
    assert b.lost
    bound = 2 * (FAST.silence_s + world.delay_s)
    assert max(a.lost_at, b.lost_at) <= at + bound


def test_the_deaf_side_tells_the_other_why() -> None:
    world, a, b = connected()
    world.cut = {"aa"}
    world.run(10)
    assert b.lost == "nothing was heard of the peer for 4.0 s"
    assert a.lost == f"the other side gave up: {b.lost}"


def test_a_peer_that_lost_the_session_says_so() -> None:
    world, a, b = connected()
    world.cut = {"bb"}
    world.close(b.link)  # its BYE is lost
    world.run(0.2)
    world.cut = set()
    world.run(1)
    assert a.lost == "there is no such session"


def test_a_late_open_makes_no_second_session() -> None:
    world, a, b = connected()
    world.close(b.link)
    late = Frame(a.link.own, "", FrameKind.OPEN, payload=b"from a")
    world.arrive(late)
    world.run(10)
    assert a.lost == "closed by the peer"
    second = [t for n, t in world.told.items() if n.startswith("bb") and t is not b]
    assert [t.opened for t in second] == [None]
    assert all(t.ended for t in second)


def test_a_second_listening_end_is_sent_away() -> None:
    link = Link("aa.1", 0.0, config=FAST)
    link.handle(lk.Tick(0.0))
    first = Frame("bb.1", "aa.1", FrameKind.ACCEPT)
    assert lk.Opened(b"") in link.handle(lk.Received(0.1, first))
    second = Frame("bb.2", "aa.1", FrameKind.ACCEPT)
    (answer,) = link.handle(lk.Received(0.1, second))
    assert answer == lk.Transmit(bye("aa.1", "bb.2", "the peer has another session"))
    assert kinds(link.handle(lk.Received(0.2, first))) == [FrameKind.ACK], "the answer was lost"


def test_frames_of_other_ends_change_nothing() -> None:
    link = Link("aa.2", 0.0, config=FAST)
    link.handle(lk.Tick(0.0))
    for frame in (
        Frame("bb.1", "aa.1", FrameKind.ACCEPT),
        Frame("bb.1", "aa.2", FrameKind.ACK),
        Frame("bb.1", "aa.2", FrameKind.DATA, 1, payload=b"x"),
        Frame("", "aa.2", FrameKind.ACCEPT),
        Frame("bb.1", "", FrameKind.OPEN),
    ):
        assert link.handle(lk.Received(0.1, frame)) == []
    link.handle(lk.Received(0.1, Frame("bb.1", "aa.2", FrameKind.ACCEPT)))
    assert link.handle(lk.Received(0.1, bye("bb.2", "aa.2", "who?"))) == []
    assert not link.ended


def test_a_refused_open_ends_at_once() -> None:
    link = Link("aa.2", 0.0, config=FAST)
    link.handle(lk.Tick(0.0))
    opening = Frame("aa.2", "", FrameKind.OPEN)
    answer = reject(opening, "there are too many sessions")
    assert answer is not None
    assert link.handle(lk.Received(0.1, answer)) == [lk.Lost("there are too many sessions")]


def test_nobody_answers_a_bye() -> None:
    assert reject(bye("aa.1", "bb.1", "over")) is None
    assert reject(Frame("", "bb.1", FrameKind.ACK)) is None


def test_an_unread_reason_is_still_a_reason() -> None:
    world, a, b = connected()
    world.arrive(bye(b.link.own, a.link.own, ""))
    assert a.lost == "a BYE"


def test_a_dialled_end_takes_no_open() -> None:
    world, a, b = connected()
    frame = Frame(a.link.own, "", FrameKind.OPEN)
    for link in (a.link, b.link):
        assert kinds(link.handle(lk.Received(world.now, frame))) == []


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ([("ACK", 0, 7, False, b"")], "frame 7 acknowledged that was never sent"),
        ([("DATA", 1, 0, False, b"12345")], "a fragment of 5 bytes instead of 4"),
        ([("DATA", 1, 0, True, b"123")], "a fragment of 3 bytes instead of 4"),
        ([("DATA", n, 0, True, b"1234") for n in range(1, 12)], "a message of 44 bytes or more"),
        (
            [("DATA", n, 0, True, b"1234") for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 10)],
            "a message of 44 bytes or more",
        ),
    ],
)
def test_a_peer_that_breaks_the_protocol(
    frames: list[tuple[str, int, int, bool, bytes]], why: str
) -> None:
    world, a, b = connected()
    for kind, seq, ack, more, payload in frames:
        frame = Frame(a.link.own, b.link.own, FrameKind[kind], seq, ack, more, payload)
        world.arrive(frame)
    assert b.lost == f"the peer broke the protocol: {why}"
    assert b.link.held_bytes == 0


def test_frames_out_of_order_are_kept_within_the_window() -> None:
    world, a, b = connected()

    def data(seq: int) -> None:
        world.arrive(Frame(a.link.own, b.link.own, FrameKind.DATA, seq, payload=b"123%d" % seq))

    for seq in (2, 2, 3, 4):
        data(seq)
    assert b.link.held_bytes == 8, "frame 4 is beyond the window of 3"
    assert b.messages == []
    data(1)
    assert b.messages == [b"1231", b"1232", b"1233"]
    data(2)
    data(4)
    assert b.messages[-1] == b"1234"
    assert len(b.messages) == 4


def test_a_full_window_of_bytes_keeps_no_more() -> None:
    config = dataclasses.replace(FAST, window_frames=100)
    world, a, b = connected(config=config)
    for seq in (2, 3, 4, 5):
        world.arrive(Frame(a.link.own, b.link.own, FrameKind.DATA, seq, payload=b"1234"))
    assert b.link.held_bytes == 12


def test_a_peer_that_acknowledges_nothing_is_given_up() -> None:
    link = Link("bb.1", 0.0, peer="aa.1", config=FAST)
    link.handle(lk.Received(0.0, Frame("aa.1", "", FrameKind.OPEN)))
    beat = Frame("aa.1", "bb.1", FrameKind.ACK)
    link.handle(lk.Received(0.0, beat))
    link.handle(lk.Send(0.0, b"x"))
    at, effects = 0.0, []
    while not link.ended:
        at += 0.5
        effects = link.handle(lk.Tick(at)) + link.handle(lk.Received(at, beat))
    assert effects[-1] == lk.Lost(f"the peer acknowledged nothing for {FAST.stall_s:.1f} s")


def test_a_queue_that_nobody_reads_ends_the_session() -> None:
    config = dataclasses.replace(FAST, queue_bytes=100, queue_frames=20)
    for payload in (b"x" * 40, b""):
        world, a, _ = connected(config=config)
        world.cut = {"aa"}
        while not a.ended:
            world.send(a.link, payload)
            assert a.link.backlog_bytes <= 100 + FAST.window_bytes
        assert a.lost
        assert a.lost.endswith("bytes unread")
        assert a.link.backlog_bytes == 0


def test_too_long_a_message_is_refused_and_the_session_stays() -> None:
    world, a, _ = connected()
    with pytest.raises(InvalidInput, match="41 bytes exceeds the limit of 40 bytes"):
        world.send(a.link, b"x" * 41)
    assert not a.ended
    with pytest.raises(InvalidInput, match="hello"):
        Link("aa.1", 0.0, hello=bytes(linkframe.HELLO_BYTES_MAX + 1))


def test_lost_frames_come_again_in_few_round_trips() -> None:
    config = dataclasses.replace(FAST, window_frames=100, window_bytes=400)
    world, a, b = connected(config=config)
    world.cut = {"aa"}
    expected = [b"%d" % number for number in range(60)]
    for payload in expected:
        world.send(a.link, payload)
    world.cut = set()
    at, frames = world.now, world.data_frames
    world.run(5, until=lambda: len(b.messages) == 60)
    assert b.messages == expected
    assert world.now - at < FAST.retry_s + 6 * (2 * world.delay_s + FAST.ack_delay_s)
    assert world.data_frames - frames < 60 + 12, "each of them only once more"


def listening(now: float = 0.0, config: LinkConfig = FAST) -> Link:
    """A listening end whose session stands."""
    link = Link("bb.1", now, peer="aa.1", config=config)
    link.handle(lk.Received(now, Frame("aa.1", "", FrameKind.OPEN)))
    link.handle(lk.Received(now, Frame("aa.1", "bb.1", FrameKind.ACK)))
    assert link.opened
    return link


def test_no_more_is_under_way_than_the_window_has_room_for() -> None:
    link = listening(config=dataclasses.replace(FAST, window_frames=100))
    sent = [kind for _ in range(10) for kind in kinds(link.handle(lk.Send(0.0, b"1234")))]
    assert sent == [FrameKind.DATA] * 3, "12 bytes"
    link = listening(config=dataclasses.replace(FAST, window_bytes=400))
    sent = [kind for _ in range(10) for kind in kinds(link.handle(lk.Send(0.0, b"1")))]
    assert sent == [FrameKind.DATA] * 3, "3 frames"


def test_waits_for_an_acknowledgement_grow_until_one_comes() -> None:
    link = listening()
    link.handle(lk.Send(0.0, b"x"))
    link.handle(lk.Send(0.0, b"y"))
    retries = []
    for tenth in range(1, 40):
        at = tenth / 10
        if FrameKind.DATA in kinds(link.handle(lk.Tick(at))):
            retries.append(at)
        if at in (1.5, 2.2):
            ack = 1 if at == 1.5 else 2
            link.handle(lk.Received(at, Frame("aa.1", "bb.1", FrameKind.ACK, ack=ack)))
    assert retries == pytest.approx([0.2, 0.4, 0.8, 1.4, 1.7, 1.9])


def test_a_clock_that_goes_back_makes_nobody_deaf() -> None:
    link = listening(5.0)
    link.handle(lk.Received(1.0, Frame("aa.1", "bb.1", FrameKind.ACK)))
    for now in (2.0, 7.0, 8.9):
        assert not any(isinstance(effect, lk.Lost) for effect in link.handle(lk.Tick(now)))
    assert isinstance(link.handle(lk.Tick(9.0))[-1], lk.Lost)


def test_a_lost_acknowledgement_doubles_nothing() -> None:
    world, a, b = connected()
    world.cut = {"bb"}
    world.send(a.link, b"x")
    world.run(1)
    world.cut = set()
    world.run(3)
    assert b.messages == [b"x"]
    assert a.link.backlog_bytes == 0


def test_a_process_that_was_paused_reads_before_it_judges() -> None:
    link = Link("bb.1", 0.0, peer="aa.1", config=FAST)
    link.handle(lk.Received(0.0, Frame("aa.1", "", FrameKind.OPEN)))
    beat = Frame("aa.1", "bb.1", FrameKind.ACK)
    link.handle(lk.Received(0.0, beat))
    link.handle(lk.Tick(0.5))
    assert not any(isinstance(e, lk.Lost) for e in link.handle(lk.Tick(30.0)))
    link.handle(lk.Received(30.0, beat))
    assert not link.ended
    link.handle(lk.Tick(60.0))
    assert not link.ended, "excused again after it heard something"
    assert any(isinstance(e, lk.Lost) for e in link.handle(lk.Tick(90.0))), "but only once"


def test_an_early_timer_is_set_again() -> None:
    link = Link("aa.1", 5.0, config=FAST)
    link.handle(lk.Tick(5.0))
    (again,) = link.handle(lk.Tick(5.01))
    assert isinstance(again, lk.StartTimer)
    assert again.delay_s == pytest.approx(FAST.retry_s - 0.01)
    assert link.handle(lk.Send(4.0, b"x")) == [], "a clock that goes back counts as standing"


def test_an_acknowledgement_waits_for_data_but_not_for_long() -> None:
    world, a, b = connected()
    b.link.handle(lk.Tick(world.now))
    frame = Frame(a.link.own, b.link.own, FrameKind.DATA, 1, payload=b"")
    config = dataclasses.replace(FAST, window_frames=100)
    b.link.config = config
    effects = b.link.handle(lk.Received(world.now, frame))
    assert effects == [lk.Deliver(b""), lk.StartTimer(pytest.approx(FAST.ack_delay_s))]
    (ack,) = kinds(b.link.handle(lk.Tick(world.now + FAST.ack_delay_s)))
    assert ack is FrameKind.ACK


# -- the listener ---------------------------------------------------------


def test_the_listener_has_room_for_so_many() -> None:
    numbers = iter(range(100))
    listener = Listener("bb", lambda: next(numbers), ends_max=2)
    made = [listener.route(0.0, Frame(f"aa.{n}", "", FrameKind.OPEN)) for n in (1, 1, 2, 3)]
    assert made[0] is made[1] is not None
    assert made[2] is not None
    assert made[3] is None
    assert len(listener) == 2
    listener.drop(made[2])
    assert listener.route(0.0, Frame("aa.3", "", FrameKind.OPEN)) is not None
    assert listener.route(0.0, Frame("", "", FrameKind.OPEN)) is None
    assert listener.route(0.0, Frame("aa.1", "bb.9", FrameKind.ACK)) is None
    assert listener.route(0.0, Frame("aa.1", made[0].own, FrameKind.ACK)) is made[0]


# -- frames ---------------------------------------------------------


def test_frames_survive_the_wire() -> None:
    frame = Frame("aa.1", "bb.2", FrameKind.DATA, 7, 3, True, b"\x00\xff")
    assert decode_frame(encode_frame(frame)) == frame
    assert decode_frame(memoryview(encode_frame(frame))) == frame
    assert life_of("aa.1") == "aa"
    assert life_of("") == ""


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x93\xa1a\xa1b\x09",
        encode_frame(Frame("a" * 97, "b", FrameKind.ACK)),
        encode_frame(Frame("a", "b", FrameKind.DATA, -1)),
        encode_frame(Frame("a", "b", FrameKind.DATA, 1, (1 << 53) + 1)),
        b"\x93\xa1\xff\xa1b\x03",
        b"\x91" * 2000,
        bytes(linkframe.FRAME_BYTES_MAX + 1),
    ],
)
def test_what_is_no_frame_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError, match="a frame of"):
        decode_frame(data)


def test_a_long_reason_is_cut() -> None:
    assert len(bye("a", "b", "x" * 9999).payload) == linkframe.REASON_CHARS_MAX


def test_a_configuration_that_cannot_work_is_a_defect() -> None:
    with pytest.raises(AssertionError):
        LinkConfig(heartbeat_s=10)
