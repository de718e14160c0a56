"""What the crash tests found once, each as small as it can be."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from groupio.agent.arena import MemberArena
from groupio.agent.identity import Writer
from groupio.controller.store import JobStore
from groupio.errors import StorageError
from groupio.model import DecisionKey
from groupio.protocol import effects as fx
from open_files import open_files

WRITER = Writer("boot", 1, 1, "host")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JobStore]:
    made = JobStore(str(tmp_path / "store"), "job", "node", WRITER)
    made.open(())
    yield made
    made.close()


def begin(store: JobStore, epoch: int, incarnation: int = 1) -> DecisionKey:
    key = DecisionKey(1, epoch, 1)
    store.publish(fx.PublishInflight(1, key, incarnation, 2))
    return key


def abort(store: JobStore, key: DecisionKey) -> tuple[bool, bool]:
    return store.decide(fx.Decide(1, key, False, 1, "why not", (), False))


def fail_fsync(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """The next flush of ``folder`` fails, later ones do not."""
    real, identity = os.fsync, os.stat(folder)

    def fsync(fd: int) -> None:
        if os.path.samestat(os.fstat(fd), identity):
            monkeypatch.setattr(os, "fsync", real)
            raise OSError(errno.EIO, "once")
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)


def test_an_incarnation_that_only_aborted_is_not_used_again(store: JobStore) -> None:
    begin(store, 5, incarnation=7)
    for _ in range(2):  # the first recovery aborts it, the second one finds the abort
        other = JobStore(store.path, "job", "node", WRITER)
        assert other.open(()).incarnation == 7
        other.close()


def test_connecting_leaves_another_hosts_attempt_alone_and_saving_fences_it(
    store: JobStore,
) -> None:
    key = begin(store, 5)
    elsewhere = JobStore(store.path, "job", "other", Writer("its boot", 1, 1, "other host"))
    with pytest.raises(StorageError, match="in flight on host host"):
        elsewhere.open((), create=False)
    assert os.listdir(f"{store.path}/epochs") == []
    assert elsewhere.open((), create=True).aborted == (key,)
    assert abort(store, key) == (False, False)
    elsewhere.close()


def test_a_commit_does_not_forget_which_chunks_were_found_damaged(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, learned, known = begin(store, 5), [], store.known
    header = SimpleNamespace(bytes_logical=1, bytes_stored=1)
    store._prepared[key] = manifest = SimpleNamespace(header=header)  # type: ignore[assignment]
    monkeypatch.setattr(type(store.backend), "commit_prepared", lambda *_: True)
    monkeypatch.setattr(type(known), "add_epoch", lambda _, manifest: learned.append(manifest))
    assert store.decide(fx.Decide(1, key, True, 1)) == (True, True)
    assert learned == [manifest]
    assert store.known is known, "the damaged chunks are noted in it"


def test_one_failed_flush_of_a_directory_is_not_the_end(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = begin(store, 1)
    fail_fsync(monkeypatch, Path(store.path) / "epochs")
    before = store.backend
    with pytest.raises(StorageError) as caught:
        abort(store, first)
    assert caught.value.outcome == "unknown"
    # Whoever still uses the old descriptors must not believe in a later flush.
    assert not before.is_sound
    with pytest.raises(StorageError, match="earlier flush"):
        before.sync_folder("epochs", force=True)
    assert abort(store, first) == (False, False)
    assert abort(store, begin(store, 2)) == (False, True)
    assert store.backend.is_sound


def test_descriptors_of_a_store_that_was_opened_anew_are_closed(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(store, 1)
    count = len(open_files(str(store.path)))
    for epoch in range(2, 6):
        fail_fsync(monkeypatch, Path(store.path) / "segments")
        with pytest.raises(StorageError):
            store.backend.sync_folder("segments", force=True)
        begin(store, epoch)
    assert len(open_files(str(store.path))) <= count + 1


def test_a_failed_look_at_the_store_record_does_not_end_the_comparison(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pread(fd: int, length: int, offset: int) -> bytes:
        raise OSError(errno.EIO, "once")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", pread)
        with pytest.raises(StorageError) as caught:
            store.check_identity()
        assert caught.value.errno == errno.EIO
        # What a flush job needs to know of the store is known without it.
        assert len(store.store_id) == 32
    store.check_identity()
    record = Path(store.path) / "groupio.json"
    stranger = JobStore(str(Path(store.path).parent / "stranger"), "job", "node", WRITER)
    stranger.open(())
    record.write_bytes((Path(stranger.path) / "groupio.json").read_bytes())
    stranger.close()
    for _ in range(2):
        with pytest.raises(StorageError) as caught:
            store.check_identity()
        assert caught.value.errno == errno.EREMCHG


def test_an_arena_that_is_closed_while_it_is_filled_fills_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = MemberArena()
    arena.map(0, 4096)
    number = arena.fd
    victim = tmp_path / "victim"
    real = os.posix_fallocate

    def late(fd: int, offset: int, length: int) -> None:
        arena.close()
        # A file that is opened now must not get the number that is in use.
        file = os.open(victim, os.O_RDWR | os.O_CREAT)
        try:
            real(fd, offset, length)
        finally:
            os.close(file)

    monkeypatch.setattr(os, "posix_fallocate", late)
    arena.populate(0, 4096)
    assert victim.stat().st_size == 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
