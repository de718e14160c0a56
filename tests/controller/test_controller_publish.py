"""Records whose creation was not answered: whoever meets its own record again has succeeded."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from groupio.agent.identity import Writer
from groupio.backend.posix import PosixBackend
from groupio.controller.by_store import StoreCoordinator
from groupio.controller.store import JobStore
from groupio.errors import Outcome, StorageError
from groupio.format.records import decode_inflight
from groupio.model import DecisionKey
from groupio.protocol import effects as fx

WRITER = Writer.of_this_process()
KEY = DecisionKey(1, 7, 1)
ORDER = fx.PublishInflight(1, KEY, 3, 2, ("n0", "n1"))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JobStore]:
    made = JobStore(str(tmp_path / "store"), "job", "n0", WRITER)
    made.open(())
    yield made
    made.close()


def lose_answers(monkeypatch: pytest.MonkeyPatch, name: str, times: int = 1) -> list[str]:
    """Calls of this method do what they do, and the first of them are not answered."""
    calls: list[str] = []
    real = getattr(PosixBackend, name)

    def lossy(self: PosixBackend, folder: str, record: str, *rest: Any, **more: Any) -> Any:
        calls.append(record)
        answer = real(self, folder, record, *rest, **more)
        if len(calls) <= times:
            raise StorageError(
                "no answer", path=record, errno=errno.ETIMEDOUT, outcome=Outcome.UNKNOWN
            )
        return answer

    monkeypatch.setattr(PosixBackend, name, lossy)
    return calls


def published(store: JobStore) -> Any:
    return decode_inflight(store.backend.read("inflight", str(KEY)), "x")


def test_an_attempt_that_is_published_again_is_published(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = lose_answers(monkeypatch, "put")
    with pytest.raises(StorageError, match="no answer"):
        store.publish(ORDER)
    first = published(store)
    store.publish(ORDER)
    assert len(calls) == 2
    assert published(store) == first
    assert (first.incarnation, first.world_size, first.nodes) == (3, 2, ("n0", "n1"))
    # Once it was answered, another try of this number is another's.
    with pytest.raises(StorageError, match="exists"):
        store.publish(ORDER)


def test_an_attempt_that_was_lost_indeed_is_published_the_second_time(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = PosixBackend.put

    def fails(*_: Any, **__: Any) -> None:
        raise StorageError("away", path="x", errno=errno.EIO)

    monkeypatch.setattr(PosixBackend, "put", fails)
    with pytest.raises(StorageError, match="away"):
        store.publish(ORDER)
    monkeypatch.setattr(PosixBackend, "put", real)
    store.publish(ORDER)
    assert published(store).key == KEY


@pytest.mark.parametrize(
    "other",
    [
        fx.PublishInflight(2, KEY, 4, 2, ("n0", "n1")),
        fx.PublishInflight(2, KEY, 3, 3, ("n0", "n1")),
        fx.PublishInflight(2, KEY, 3, 2, ("n0",)),
    ],
)
def test_another_group_of_the_same_number_is_not_taken_for_it(
    store: JobStore, monkeypatch: pytest.MonkeyPatch, other: fx.PublishInflight
) -> None:
    lose_answers(monkeypatch, "put")
    with pytest.raises(StorageError, match="no answer"):
        store.publish(ORDER)
    with pytest.raises(StorageError, match="exists"):
        store.publish(other)


def test_the_record_of_another_controller_is_not_taken_for_it(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = JobStore(store.path, "job", "n0", WRITER)
    other.follow(create=False)
    other.publish(ORDER)
    with pytest.raises(StorageError, match="exists"):
        store.publish(ORDER)
    with pytest.raises(StorageError, match="exists"):
        store.publish(ORDER)
    other.close()


@pytest.mark.parametrize("rest", [b"", b"rot"])
def test_a_record_that_cannot_be_read_is_not_taken_for_it(
    store: JobStore, monkeypatch: pytest.MonkeyPatch, rest: bytes
) -> None:
    lose_answers(monkeypatch, "put")
    with pytest.raises(StorageError, match="no answer"):
        store.publish(ORDER)
    Path(store.path, "inflight", str(KEY)).write_bytes(rest)
    with pytest.raises(StorageError, match="exists"):
        store.publish(ORDER)


def test_what_is_decided_is_forgotten(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    lose_answers(monkeypatch, "put")
    with pytest.raises(StorageError):
        store.publish(ORDER)
    store.forget(KEY)
    assert store._unheard == {}
    store.publish(ORDER)


def test_a_rule_whose_record_could_not_be_looked_up_is_won_by_the_next_try(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The creation was not answered, and neither was the question whether it is there."""
    lose_answers(monkeypatch, "put_if_absent")
    real = PosixBackend.exists

    def silent(*_: Any) -> bool:
        raise StorageError("no answer either", path="x", errno=errno.ETIMEDOUT)

    monkeypatch.setattr(PosixBackend, "exists", silent)
    with StoreCoordinator(store.backend) as one:
        life = "a" * 32
        with pytest.raises(StorageError, match="no answer either"):
            one.campaign("n0", life, "tcp://h:1", time.monotonic() + 5, over=0)
        monkeypatch.setattr(PosixBackend, "exists", real)
        rule = one.campaign("n0", life, "tcp://h:1", time.monotonic() + 5, over=0)
        assert (rule.term, rule.life) == (1, life)
        assert one.keep()
