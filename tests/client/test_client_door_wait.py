"""A wait for DURABLE also waits, bounded, for the door that the save asked for."""

from __future__ import annotations

import threading
import time

import pytest

from groupio.client import handle as module
from groupio.client.handle import DOOR_LATE, SaveHandle
from groupio.errors import StorageError
from groupio.model import Level

SOON_S = 0.05


def durable(*, door: bool) -> SaveHandle:
    handle = SaveHandle(3, time.monotonic())
    if door:
        handle._expect_door()
    handle._reach(Level.STAGED, time.monotonic())
    handle._reach(Level.DURABLE, time.monotonic())
    return handle


def test_wait_ends_with_the_news_of_the_door() -> None:
    handle = durable(door=True)
    assert handle._awaits_door()
    assert handle.wait("staged").durable is not None
    news = threading.Timer(SOON_S, handle._door_done)
    begin = time.monotonic()
    news.start()
    assert handle.wait("durable").notes == ()
    assert SOON_S / 2 < time.monotonic() - begin < 10
    news.join()
    assert not handle._awaits_door()


def test_a_door_that_failed_is_a_note() -> None:
    handle = durable(door=True)
    handle._door_done("the disk is full")
    assert handle.wait("durable").notes == ("door: the disk is full",)
    assert handle.error is None
    handle._door_done("news that come twice")
    assert handle.times.notes == ("door: the disk is full",)


def test_waiting_for_a_door_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = durable(door=True)
    assert handle.wait("durable", SOON_S).notes == (DOOR_LATE,)
    monkeypatch.setattr(module, "DOOR_WAIT_S", SOON_S)
    assert handle.wait("durable").notes == (DOOR_LATE,)


def test_without_a_door_nobody_waits() -> None:
    begin = time.monotonic()
    assert durable(door=False).wait("durable").durable is not None
    assert time.monotonic() - begin < 5


def test_the_thread_that_brings_the_news_does_not_wait_for_it() -> None:
    handle = durable(door=True)
    handle._listener = threading.current_thread()
    assert handle.wait("durable").durable is not None


def test_a_failed_save_does_not_wait_for_a_door() -> None:
    handle = SaveHandle(3, time.monotonic())
    handle._expect_door()
    handle._fail(StorageError("gone", path="x"))
    handle._door_done("no agent")
    assert handle.times.notes == ()
    with pytest.raises(StorageError):
        handle.wait("durable")
