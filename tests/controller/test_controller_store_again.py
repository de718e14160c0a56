"""A store that was away is opened anew by its path, if it is the same store."""

from __future__ import annotations

import errno
import gc
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "plan"))
from plan_help import raw, report

from dead_handles import DeadHandles
from groupio.agent.identity import Writer
from groupio.backend.posix import PosixBackend
from groupio.controller.by_store import StoreCoordinator
from groupio.controller.store import JobStore
from groupio.errors import GroupIOError, IntegrityError, StorageError
from groupio.format.items import encode_items, items_id
from groupio.format.records import parse_key, segment_name
from groupio.model import DecisionKey, Lineage, SegmentRef
from groupio.protocol import effects as fx
from groupio.protocol.reasons import is_away, may_return
from open_files import open_files

WRITER = Writer.of_this_process()
ITEMS = [raw("a", 100), raw("b", 200)]
BODY = b"s" * 8192

AWAY = [
    errno.ESTALE,
    errno.ENOTCONN,
    errno.ENODEV,
    errno.ECONNABORTED,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.ESHUTDOWN,
    errno.ETIMEDOUT,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
]


def key(epoch: int) -> DecisionKey:
    return DecisionKey(1, epoch, 1)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JobStore]:
    made = JobStore(str(tmp_path / "store"), "job", "n0", WRITER)
    made.open(())
    made.create_lineage(Lineage(1, 0, -1, 0.0))
    yield made
    made.close()


def segment(store: JobStore, epoch: int) -> str:
    """A durable segment of the attempt; nothing here looks at what is in it."""
    name = segment_name(key(epoch), "n0", 0)
    file = store.backend.create_segment(name)
    file.write_tail(0, BODY)
    file.sync_close(len(BODY))
    store.backend.sync_folder("segments")
    return name


def order(epoch: int, name: str) -> fx.PrepareEpoch:
    found = report("n0", {0: (ITEMS, ["p", "q"])})
    (member,) = found.members
    found = replace(
        found,
        segments=(SegmentRef(name, len(BODY), True),),
        members=(replace(member, items_id=items_id(encode_items(member.items))),),
    )
    return fx.PrepareEpoch(1, key(epoch), epoch, 1, (found,), (), {})


def see(*_: Any) -> None:
    return None


def publish(store: JobStore, epoch: int) -> None:
    store.publish(fx.PublishInflight(1, key(epoch), epoch, 1))


def decide(store: JobStore, epoch: int, *, commit: bool = True) -> tuple[bool, bool]:
    return store.decide(fx.Decide(1, key(epoch), commit, epoch, "", ()))


def in_time(call: Callable[[], Any]) -> Any:
    """What the call answers at the first or the second try; the first fails as away if it does."""
    try:
        return call()
    except StorageError as error:
        if not is_away(error):
            raise
    return call()


def content(path: Path) -> dict[str, tuple[int, bytes]]:
    """Everything below ``path``, to see that nobody wrote there."""
    return {
        str(one.relative_to(path)): (
            one.stat().st_mtime_ns,
            one.read_bytes() if one.is_file() else b"",
        )
        for one in [path, *path.rglob("*")]
    }


def committed(path: str) -> set[int]:
    with PosixBackend.open(path, create=False) as found:
        keys = [parse_key(name) for name in found.list("epochs")]
    return {one.epoch for one in keys if one is not None}


@pytest.mark.parametrize("error", AWAY, ids=lambda number: errno.errorcode[number])
@pytest.mark.parametrize("step", range(6))
def test_each_step_of_a_save_goes_on_with_new_handles(
    store: JobStore, monkeypatch: pytest.MonkeyPatch, error: int, step: int
) -> None:
    """The mount dies ahead of each step in turn; all are tried once more at most."""
    with monkeypatch.context() as patch:
        dead = DeadHandles(patch, store.path, error)
        name = ""

        def write() -> None:
            nonlocal name
            name = segment(store, 3)

        steps: list[Callable[[], Any]] = [
            lambda: publish(store, 3),
            write,
            lambda: store.prepare(order(3, name), see),
            lambda: decide(store, 3),
            lambda: store.forget(key(3)),
            lambda: store.open((key(3),)),
        ]
        answers = []
        for number, one in enumerate(steps):
            if number == step:
                dead.cut()
                before = store.backend
                if one is write:
                    with pytest.raises(StorageError):
                        write()
                    store.renew()
                    write()
                    continue
            answers.append(in_time(one))
        assert dead.failed
        assert (True, True) in answers
        store.learn(key(3))
        store.learn(key(3))
    assert store.backend is not before
    assert committed(store.path) == {3}
    assert store.saved.epochs == 1
    assert store.known.index is not None, "later epochs refer to its chunks"


def test_dead_handles_are_closed_with_their_last_user(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(store, 1)
    count = len(open_files(store.path))
    with monkeypatch.context() as patch:
        dead = DeadHandles(patch, store.path, errno.ESTALE)
        for epoch in range(2, 7):
            dead.cut()
            publish(store, epoch)
    gc.collect()  # errors of the calls that failed
    assert len(open_files(store.path)) <= count


@pytest.mark.parametrize("error", [errno.ESTALE, errno.ENOTCONN])
def test_an_abort_is_decided_when_the_store_is_back(
    store: JobStore, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    with monkeypatch.context() as patch:
        dead = DeadHandles(patch, store.path, error)
        publish(store, 3)
        dead.cut()
        assert in_time(lambda: decide(store, 3, commit=False)) == (False, True)
        assert decide(store, 3, commit=False) == (False, False)


def test_old_handles_stay_dead_for_who_has_them(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was begun through them fails; nothing of it is made durable through new ones."""
    with monkeypatch.context() as patch:
        dead = DeadHandles(patch, store.path, errno.ESTALE)
        old = store.backend
        file = old.create_segment("s")
        file.write_tail(0, BODY)
        dead.cut()
        fresh = store.current()
        assert fresh is not old
        assert store.current() is fresh
        with pytest.raises(StorageError):
            file.sync_close(len(BODY))
        with pytest.raises(StorageError):
            old.sync_folder("segments", force=True)
        with pytest.raises(StorageError):
            old.sync_folder("segments")
        file.abort()
        fresh.sync_folder("segments")
        assert fresh.put_if_absent("epochs", str(key(1)), b"x")


# Is it the same store? -------------------------------------------------------------------------


def stranger(store: JobStore, where: Path) -> Path:
    other = JobStore(str(where), "job", "n0", WRITER)
    other.open(())
    assert other.store_id != store.store_id
    other.close()
    return where


@pytest.mark.parametrize("dies", [True, False], ids=["its handles die", "its handles live"])
@pytest.mark.parametrize("place", ["another store", "an empty directory", "nothing"])
def test_what_is_there_instead_is_never_written_to(
    store: JobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, dies: bool
) -> None:
    path = Path(store.path)
    publish(store, 3)
    name = segment(store, 3)
    with monkeypatch.context() as patch:
        dead = DeadHandles(patch, store.path, errno.ESTALE)
        if dies:
            dead.cut()
        path.rename(tmp_path / "kept")
        if place == "another store":
            stranger(store, path)
        elif place == "an empty directory":
            path.mkdir()
        before = content(path) if path.exists() else {}
        calls: list[Callable[[], Any]] = [
            lambda: publish(store, 4),
            lambda: store.prepare(order(3, name), see),
            lambda: store.open((key(3),)),
            store.current,
        ]
        if dies:
            calls += [lambda: decide(store, 3, commit=False), lambda: store.open((key(3),))]
        for call in calls * 2:
            with pytest.raises(StorageError) as caught:
                call()
            assert is_away(caught.value)
        with pytest.raises(StorageError) as caught:
            publish(store, 4)
        assert caught.value.errno == errno.EREMCHG
        assert not may_return(caught.value), "new saves do not wait for it"
        assert (content(path) if path.exists() else {}) == before
        if path.exists():
            shutil.rmtree(path)
        (tmp_path / "kept").rename(path)
        in_time(lambda: store.prepare(order(3, name), see))
        assert decide(store, 3) == (True, True)
    assert committed(store.path) == {3}


@pytest.mark.parametrize("place", ["another store", "an empty directory", "nothing"])
def test_nor_is_a_new_store_made_there_when_nothing_is_under_way(
    store: JobStore, tmp_path: Path, place: str
) -> None:
    """As below a mount point whose file system is gone: what was saved there would be hidden."""
    path = Path(store.path)
    path.rename(tmp_path / "kept")
    if place == "another store":
        stranger(store, path)
    elif place == "an empty directory":
        path.mkdir()
    before = content(path) if path.exists() else {}
    for _ in range(3):
        with pytest.raises(StorageError) as caught:
            store.open(())
        assert caught.value.errno == errno.EREMCHG
    assert (content(path) if path.exists() else {}) == before
    if path.exists():
        shutil.rmtree(path)
    (tmp_path / "kept").rename(path)
    assert store.open(()).store_id == store.store_id
    publish(store, 3)


def test_a_store_that_was_removed_is_not_waited_for(store: JobStore) -> None:
    shutil.rmtree(store.path)
    with pytest.raises(StorageError) as caught:
        publish(store, 3)
    assert caught.value.errno == errno.ENOENT
    before = store.store_id
    store.open(())
    assert store.store_id != before


def test_an_older_copy_of_the_store_lacks_what_was_written(store: JobStore, tmp_path: Path) -> None:
    """It has the same id; the epoch is refused, for its segments are not there."""
    publish(store, 3)
    shutil.copytree(store.path, tmp_path / "copy")
    name = segment(store, 3)
    Path(store.path).rename(tmp_path / "kept")
    (tmp_path / "copy").rename(store.path)
    with pytest.raises(IntegrityError, match="is gone"):
        store.prepare(order(3, name), see)
    assert committed(store.path) == set()
    # A new attempt writes it again.
    name = segment(store, 3)
    store.prepare(order(3, name), see)
    assert decide(store, 3) == (True, True)


def test_a_folder_that_is_not_its_own_is_refused(store: JobStore, tmp_path: Path) -> None:
    (Path(store.path) / "epochs").rename(tmp_path / "epochs")
    with pytest.raises(StorageError) as caught:
        publish(store, 3)
    assert caught.value.errno == errno.EREMCHG
    (Path(store.path) / "epochs").mkdir()
    with pytest.raises(StorageError) as caught:
        publish(store, 3)
    assert caught.value.errno == errno.EREMCHG
    (Path(store.path) / "epochs").rmdir()
    (tmp_path / "epochs").rename(Path(store.path) / "epochs")
    publish(store, 3)


def test_a_store_that_could_not_be_opened_at_first_is_opened_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:

        def fails(fd: int) -> None:
            raise OSError(errno.ESTALE, "gone")

        patch.setattr(os, "fsync", fails)
        for name in ("open", "follow"):
            made = JobStore(str(tmp_path / name), "job", "n0", WRITER)
            with pytest.raises(StorageError):
                made.open(()) if name == "open" else made.follow(create=True)
            assert made._backend is None
    for name in ("open", "follow"):
        made = JobStore(str(tmp_path / name), "job", "n0", WRITER)
        made.open(()) if name == "open" else made.follow(create=True)
        made.close()


def test_a_prepared_record_of_another_is_not_taken_for_ones_own(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New handles do not know which record is there; what was decided says it."""
    publish(store, 3)
    name = segment(store, 3)
    store.prepare(order(3, name), see)
    other = JobStore(store.path, "job", "n0", WRITER)
    other.follow(create=False)
    other.prepare(order(3, name), see)
    with monkeypatch.context() as patch:
        DeadHandles(patch, store.path, errno.ESTALE).cut()
        assert in_time(lambda: decide(store, 3)) == (True, False)
    assert store.saved.epochs == 0
    other.close()


def test_nor_one_of_another_where_handles_became_new_while_the_own_was_written(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another group's writer may find meanwhile that the store was away."""
    publish(store, 3)
    name = segment(store, 3)
    prepare = PosixBackend.prepare

    def slow(backend: PosixBackend, *args: Any) -> None:
        prepare(backend, *args)
        store.after(StorageError("away", path="x", errno=errno.ESTALE))

    with monkeypatch.context() as patch:
        patch.setattr(PosixBackend, "prepare", slow)
        store.prepare(order(3, name), see)
    other = JobStore(store.path, "job", "n0", WRITER)
    other.follow(create=False)
    other.prepare(order(3, name), see)
    assert decide(store, 3) == (True, False)
    assert store.saved.epochs == 0
    other.close()


def test_an_attempt_is_ones_own_however_often_its_answers_are_lost(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = StorageError("away", path="x", errno=errno.ETIMEDOUT)
    put = PosixBackend.put

    def lost(backend: PosixBackend, *args: Any, **named: Any) -> None:
        put(backend, *args, **named)
        raise away

    def fails(*_: Any) -> None:
        raise away

    for name, call in (("put", lost), ("read", fails), ("read", fails)):
        with monkeypatch.context() as patch:
            patch.setattr(PosixBackend, name, call)
            with pytest.raises(StorageError) as caught:
                publish(store, 3)
            assert caught.value is away
    publish(store, 3)
    assert store._unheard == {}


# Who else has handles --------------------------------------------------------------------------


def test_who_rules_is_asked_through_new_handles(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = "a" * 32
    with monkeypatch.context() as patch:
        dead = DeadHandles(patch, store.path, errno.ENOTCONN)
        with StoreCoordinator(store.backend, after=store.after) as one:
            rule = one.campaign("n0", life, "tcp://h:1", time.monotonic() + 5, over=0)
            dead.cut()
            assert one.keep()
            dead.cut()
            assert one.current(time.monotonic() + 5) == rule
            dead.cut()
            again = one.campaign("n0", life, "tcp://h:1", time.monotonic() + 5, over=rule.term)
            assert again.term == rule.term + 1
            dead.cut()
            one.resign()
            assert one.current(time.monotonic() + 5) is None
        with StoreCoordinator(store.backend) as other:
            dead.cut()
            with pytest.raises(StorageError):
                other.current(time.monotonic() + 5)


def test_an_error_that_says_nothing_of_an_absence_opens_nothing(
    store: JobStore, caplog: pytest.LogCaptureFixture
) -> None:
    before = store.backend
    with caplog.at_level(logging.WARNING):
        assert store.after(StorageError("broken", path="x", errno=errno.EIO)) is before
        store.doubt(GroupIOError("nothing"))
        store.renew()
    assert store.backend is before
    assert "anew" not in caplog.text
