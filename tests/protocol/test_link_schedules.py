"""Whatever the network does: in order, once, nothing lost, or lost on both sides in time."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from link_world import FAST, LinkWorld, Told

ROUGH = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 1 << 30),
        "drop": st.sampled_from([0.0, 0.05, 0.3, 0.5]),
        "double": st.sampled_from([0.0, 0.3, 1.0]),
        "delay_s": st.sampled_from([0.0, 0.01, 0.3, 0.9]),
    }
)
SIZES = st.lists(st.integers(0, 40), max_size=25)
CONFIGS = st.sampled_from(
    [
        FAST,
        dataclasses.replace(FAST, window_frames=1),
        dataclasses.replace(FAST, window_bytes=4),
        dataclasses.replace(FAST, ack_delay_s=0.0, window_frames=64, window_bytes=400),
    ]
)


def payloads(who: str, sizes: list[int]) -> list[bytes]:
    return [f"{who}{n:03d}".encode().ljust(size, b".")[:40] for n, size in enumerate(sizes)]


def check(world: LinkWorld, sent: dict[str, list[bytes]]) -> None:
    """What any session may have told its user at any time."""
    openers: dict[str, str] = {}
    for name, told in world.told.items():
        if told.opened is not None:
            assert openers.setdefault(told.link.peer, name) == name, "two ends share one peer"
        expected = sent.get(told.link.peer, [])
        assert told.messages == expected[: len(told.messages)]
    config = world.config
    assert world.held_most <= config.window_bytes + config.message_bytes + config.fragment_bytes


@settings(max_examples=120, deadline=None)
@given(ROUGH, CONFIGS, SIZES, SIZES)
def test_all_arrives_once_and_in_order_or_both_sides_are_lost(
    rough: dict[str, Any], config: Any, to_b: list[int], to_a: list[int]
) -> None:
    world = LinkWorld(config=config, **rough)
    a = world.dial()
    sent: dict[str, list[bytes]] = {a.link.own: []}
    for payload in payloads("a", to_b):
        world.send(a.link, payload)
        sent[a.link.own].append(payload)
        world.run(world.random.choice([0.0, 0.05, 0.4]))
    world.run(30, until=lambda: a.opened is not None or a.ended)
    b: Told | None = world.told.get(a.link.peer)
    for payload in payloads("b", to_a) if b is not None and not b.ended else ():
        world.send(b.link, payload)
        sent.setdefault(b.link.own, []).append(payload)
    check(world, sent)
    world.drop = 0.0
    world.delay_s = min(world.delay_s, 0.05)
    world.run(60)
    check(world, sent)
    if a.opened is None:
        assert a.ended
        return
    b = world.other(a)
    assert a.ended == b.ended
    if not a.ended:
        assert b.messages == payloads("a", to_b)
        assert a.messages == payloads("b", to_a)
        assert a.link.backlog_bytes == b.link.backlog_bytes == 0
    else:
        assert a.lost
    others = [t for t in world.told.values() if t not in (a, b)]
    assert all(t.ended and t.opened is None for t in others)


@settings(max_examples=80, deadline=None)
@given(ROUGH, SIZES, st.sampled_from(["aa", "bb", "aabb"]), st.floats(0, 5), st.integers(1, 3))
def test_a_cut_ends_every_session_on_both_sides_within_the_bound(
    rough: dict[str, Any], sizes: list[int], cut: str, before_s: float, dials: int
) -> None:
    world = LinkWorld(**rough)
    ends = [world.dial() for _ in range(dials)]
    for told in ends:
        for payload in payloads("a", sizes):
            world.send(told.link, payload)
    world.run(before_s)
    world.cut = {cut[:2], cut[-2:]}
    at, delay_s = world.now, world.delay_s
    world.run(60)
    bound = 2 * (FAST.silence_s + delay_s)
    for told in world.told.values():
        assert told.lost, "cut in any direction: nobody goes on"
        assert told.lost_at <= at + bound + 1e-6
    assert len(world.listener) == 0
    assert not any(world.told[name].link.backlog_bytes for name in world.told)


@settings(max_examples=50, deadline=None)
@given(ROUGH)
def test_a_new_session_of_the_same_lives_takes_nothing_of_the_old(rough: dict[str, Any]) -> None:
    world = LinkWorld(**rough)
    sent: dict[str, list[bytes]] = {}
    for turn in range(4):
        told = world.dial()
        sent[told.link.own] = payloads(f"{turn}", [9] * 6)
        for payload in sent[told.link.own]:
            world.send(told.link, payload)
        world.run(world.random.uniform(0, 1.5))
        if not told.ended:
            world.close(told.link)
        check(world, sent)
    world.run(30)
    check(world, sent)
    assert all(told.ended for told in world.told.values())
