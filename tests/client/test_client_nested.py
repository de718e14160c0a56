"""Calls inside other calls of one thread: too many saves, finalizers, wrong input, close."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from fake_agent import PAUSE_S, Background, FakeAgent, Peer

import groupio
from groupio.client import nested_saves
from groupio.protocol import messages as msg

Connect = Callable[..., groupio.Client]


class InAnyOrder:
    """A peer whose messages are taken by kind: saves that overlap have no order of their own."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._take = peer.take
        self._kept: list[Any] = []
        peer.take = self.take

    def take(self, kind: type[Any], timeout_s: float = PAUSE_S) -> Any:
        for message in self._kept:
            if isinstance(message, kind):
                self._kept.remove(message)
                return message
        while not isinstance(message := self._take(object, timeout_s), kind):
            self._kept.append(message)
        return message


def during_a_save(
    client: groupio.Client, peer: Any, background: Background, inside: Callable[[], Any]
) -> tuple[groupio.SaveHandle, Any, Any]:
    """Run ``inside`` in a handler while the main thread waits in a save; its handle, its
    ``OpenSave``, and what ``inside`` returned."""
    found: Future[Any] = Future()
    opened: Future[Any] = Future()
    main = threading.get_ident()
    InAnyOrder(peer)

    def on_signal(number: int, frame: Any) -> None:
        try:
            found.set_result(inside())
        except BaseException as error:  # noqa: BLE001  raised in the test
            found.set_exception(error)

    def play() -> None:
        opened.set_result(peer.take(msg.OpenSave))
        signal.pthread_kill(main, signal.SIGUSR1)
        found.exception(20)
        peer.receive(opened.result())

    before = signal.signal(signal.SIGUSR1, on_signal)
    try:
        played = background.submit(play)
        handle = client.save({"outer": b"x" * 1000}, epoch=1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    played.result(20)
    return handle, opened.result(20), found.result(20)


def test_a_handler_that_saves_in_a_loop_is_refused_typed(
    agent: FakeAgent, connect: Connect, background: Background
) -> None:
    client = connect(settings={"close_timeout_s": 20})
    peer = agent.peer()
    most = nested_saves.NESTED_MAX

    def loop() -> list[groupio.SaveHandle]:
        return [client.save({"n": b"y" * n}, epoch=10 + n) for n in range(most + 3)]

    handle, opened, made = during_a_save(client, peer, background, loop)
    assert handle.error is None
    for refused in made[most:]:
        assert isinstance(refused.error, groupio.StagingFull)
        assert "signal handlers" in str(refused.error)
    peer.reach(opened, "staged", "durable")
    numbers = set()
    for _ in made[:most]:
        opened = peer.take(msg.OpenSave)
        numbers.add(opened.epoch)
        assert peer.receive(opened)["n"] == b"y" * (opened.epoch - 10)
        peer.reach(opened, "staged", "durable")
    assert numbers == {one.epoch for one in made[:most]}
    for one in made[:most]:
        assert one.wait(timeout_s=20).durable


def test_close_in_a_handler_waits_for_the_save_that_it_interrupted(
    agent: FakeAgent, connect: Connect, background: Background
) -> None:
    client = connect(settings={"close_timeout_s": 20})
    peer = agent.peer()
    handle, opened, _ = during_a_save(client, peer, background, client.close)
    assert handle.error is None
    peer.reach(opened, "staged", "durable")
    assert handle.wait(timeout_s=20).durable
    peer.take(msg.Bye)
    with pytest.raises(groupio.InvalidInput, match="closed"):
        client.save({"a": 1}, epoch=2)


def test_wrong_input_in_a_handler_raises_there_only(
    agent: FakeAgent, connect: Connect, background: Background
) -> None:
    client = connect()
    peer = agent.peer()

    def wrong() -> str:
        with pytest.raises(groupio.InvalidInput) as caught:
            client.save({"a": object()}, epoch=2)
        return str(caught.value)

    handle, opened, said = during_a_save(client, peer, background, wrong)
    assert "a" in said
    peer.reach(opened, "staged", "durable")
    assert handle.wait(timeout_s=20).durable


def test_a_finalizer_that_saves_in_the_middle_of_a_save(
    agent: FakeAgent, connect: Connect, background: Background
) -> None:
    client = connect(settings={"close_timeout_s": 20})
    peer = agent.peer()
    made: list[groupio.SaveHandle] = []

    class Dying:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            made.append(client.save({"last": b"words"}, epoch=7))

    def collect() -> None:
        Dying()
        gc.collect()

    handle, opened, _ = during_a_save(client, peer, background, collect)
    assert handle.error is None
    peer.reach(opened, "staged", "durable")
    opened = peer.take(msg.OpenSave)
    assert peer.receive(opened) == {"last": b"words"}
    peer.reach(opened, "staged", "durable")
    assert made[0].wait(timeout_s=20).durable
