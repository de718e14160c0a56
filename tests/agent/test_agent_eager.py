"""A flush that writes at once is done anew, from memory, after the store was away."""

from __future__ import annotations

import errno
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from agent_tools import WAIT_S, Outcomes, Saved, Store, add_all, saved, tensor
from test_agent_pipeline import MIXED, FaultyBackend

from groupio.agent.eager import EagerFlush
from groupio.agent.pipeline import FlushJob
from groupio.backend.segments import PosixSegment
from groupio.errors import GroupIOError, StorageError

AWAY = StorageError("the server is being restarted", path="/store", errno=errno.ETIMEDOUT)


class Server:
    """A store behind a server that may be away, and an eager flush to it."""

    def __init__(self, store: Store, *, up_for: int, write: bool = True) -> None:
        self.store, self.write = store, write
        self.away, self.writes_left, self.looks = False, up_for, 0
        self.jobs: list[FlushJob] = []
        self.steps: list[Callable[[], None]] = []
        self.held = False
        self.outcomes = Outcomes()
        self.backend: Any = FaultyBackend(store.backend, self.before_write)
        self.flush = EagerFlush(
            self.make, look=self.look, run=self.run, failed=lambda e: self.outcomes.error(e)
        )

    def make(self, first_seq: int) -> FlushJob:
        job, _ = self.store.job(
            1,
            backend=self.backend,
            write=self.write,
            framed=True,
            first_seq=first_seq,
            outcomes=self.outcomes,
        )
        self.jobs.append(job)
        return job

    def before_write(self, offset: int) -> None:
        self.writes_left -= 1
        if self.writes_left < 0:
            self.away = True
        if self.away:
            raise AWAY

    def look(self) -> None:
        self.looks += 1
        if self.away:
            raise AWAY

    def run(self, step: Callable[[], None]) -> None:
        """As the store's thread does it; or later, when the test says so."""
        if self.held:
            self.steps.append(step)
        else:
            step()

    def begin(self, *members: Saved) -> None:
        for rank, member in enumerate(members):
            add_all(self.flush, rank, member)  # type: ignore[arg-type]
        self.flush.finish()

    def failed(self) -> list[GroupIOError]:
        """The errors that came up to now, once there is one."""
        assert self.outcomes.over.wait(WAIT_S)
        self.outcomes.over.clear()
        errors, self.outcomes.errors = self.outcomes.errors, []
        return errors

    def returns(self) -> None:
        self.away, self.writes_left = False, 1 << 30


@pytest.fixture
def members() -> list[Saved]:
    return [saved(MIXED, seed) for seed in (1, 1, 2)]


@pytest.mark.parametrize("up_for", [0, 1, 2])
def test_everything_is_written_anew_in_another_segment(
    store: Store, members: list[Saved], up_for: int
) -> None:
    server = Server(store, up_for=up_for)
    server.begin(*members)
    assert server.failed() == [AWAY]
    server.returns()
    server.flush.repeat()
    report = server.outcomes.result()
    store.check(report, members)
    # The failed one had its first segment, whatever became of it: that name is never used again.
    assert [ref.name for ref in report.segments] == store.segments()
    assert report.segments[0].name.endswith("-0001.seg")
    assert server.flush.framed
    assert server.flush.counts().new_bytes == int(report.chunks.lengths.sum())


def test_nothing_is_hashed_while_it_is_away(store: Store, members: list[Saved]) -> None:
    server = Server(store, up_for=1)
    server.begin(*members)
    assert server.failed() == [AWAY]
    for looks in (1, 2):
        server.flush.repeat()
        assert server.failed() == [AWAY]
        assert (server.looks, len(server.jobs)) == (looks, 1)
    server.returns()
    server.flush.repeat()
    store.check(server.outcomes.result(), members)
    assert len(store.segments()) == 1


def test_it_may_go_away_again(store: Store, members: list[Saved]) -> None:
    server = Server(store, up_for=1)
    server.begin(*members)
    assert server.failed() == [AWAY]
    server.away, server.writes_left = False, 1
    server.flush.repeat()
    assert server.failed() == [AWAY]
    server.returns()
    server.flush.repeat()
    report = server.outcomes.result()
    store.check(report, members)
    assert [ref.name for ref in report.segments] == store.segments()
    assert len(server.jobs) == 3


def test_a_cancelled_repetition_does_nothing(store: Store) -> None:
    server = Server(store, up_for=0)
    server.begin(saved([tensor("w", 1 << 20)], 1))
    assert server.failed() == [AWAY]
    server.returns()
    server.held = True
    server.flush.repeat()
    idle: list[str] = []
    server.flush.cancel(lambda: idle.append("idle"))
    assert idle == []
    for step in server.steps:
        step()
    assert idle == ["idle"]
    assert len(server.jobs) == 1
    assert server.outcomes.errors == []
    server.flush.cancel(lambda: idle.append("again"))
    assert idle == ["idle", "again"]


def test_an_error_that_comes_too_late_is_not_told(store: Store) -> None:
    server = Server(store, up_for=0)
    server.begin(saved([tensor("w", 1 << 20)], 1))
    assert server.failed() == [AWAY]
    server.held = True
    server.flush.repeat()
    idle = threading.Event()
    server.flush.cancel(idle.set)
    for step in server.steps:
        step()
    assert idle.is_set()
    assert server.outcomes.errors == []


def test_an_internal_error_is_typed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(store, up_for=0)
    server.begin(saved([tensor("w", 1 << 20)], 1))
    assert server.failed() == [AWAY]

    def bad() -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(server.flush, "_look", bad)
    server.flush.repeat()
    (error,) = server.failed()
    assert "internal error (ZeroDivisionError: oops)" in error.message


def test_a_segment_that_cannot_be_deleted_is_tried_again(
    store: Store, members: list[Saved], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(store, up_for=1)
    server.begin(*members)
    assert server.failed() == [AWAY]
    server.returns()

    def refused(folder: str, name: str) -> None:
        raise StorageError("not now", path=name)

    with monkeypatch.context() as patch:
        patch.setattr(server.backend, "delete", refused, raising=False)
        patch.setattr(PosixSegment, "abort", lambda segment: None)
        server.flush.repeat()
        report = server.outcomes.result()
        assert len(store.segments()) == 2
    store.check(report, members)
    assert not server.flush.swept
    server.flush.sweep()
    assert server.flush.swept
    assert store.segments() == [ref.name for ref in report.segments]
    server.flush.delete_segments()
    assert store.segments() == []


def test_a_file_of_which_the_store_did_not_say_that_it_is_there_does_not_stay(
    store: Store, members: list[Saved], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(store, up_for=1 << 30)
    create = server.backend.create_segment

    def lost(name: str) -> None:
        create(name)
        raise AWAY

    with monkeypatch.context() as patch:
        patch.setattr(server.backend, "create_segment", lost, raising=False)
        server.begin(*members)
        assert server.failed() == [AWAY]
    assert len(store.segments()) == 1
    server.flush.repeat()
    report = server.outcomes.result()
    store.check(report, members)
    assert store.segments() == [ref.name for ref in report.segments]


@pytest.mark.parametrize("cancelled", [False, True])
def test_an_error_keeps_no_view_of_the_memory(store: Store, cancelled: bool) -> None:
    server = Server(store, up_for=0)
    server.begin(saved([tensor("w", 1 << 20)], 1))
    assert server.failed() == [AWAY]

    def look() -> None:
        raise StorageError("still away", path="/store", errno=errno.ESTALE)

    server.flush._look = look
    server.held = cancelled
    gc.collect()
    gc.disable()
    try:
        server.flush.repeat()
        idle = threading.Event()
        server.flush.cancel(idle.set)
        while server.steps:
            server.steps.pop()()
        assert idle.wait(WAIT_S)
        (told,) = server.outcomes.errors or [None]
        assert (told is None) == cancelled
        flush = weakref.ref(server.flush)
        del server.flush
        assert flush() is None
    finally:
        gc.enable()
