"""Full disks, failing flushes, lost answers and cut writes: typed errors and nothing half done."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from groupio.backend.base import EPOCHS, PREPARED, SEGMENTS
from groupio.backend.posix import PosixBackend
from groupio.errors import IntegrityError, InvalidInput, Outcome, StorageError, StorageFull
from groupio.model import PAGE_BYTES
from groupio.testing.backend_suite import KEY, pages


@pytest.fixture
def store(tmp_path: Path) -> Iterator[PosixBackend]:
    with PosixBackend.open(tmp_path / "store", create=True) as backend:
        yield backend


class Failing:
    """Replaces a function of ``os``: from call ``first`` on, ``times`` calls fail."""

    def __init__(self, number: int, real: Callable[..., Any], first: int = 1, times: int = 1):
        self.number, self.real, self.first, self.times = number, real, first, times
        self.calls = 0

    def __call__(self, *args: Any, **rest: Any) -> Any:
        self.calls += 1
        if self.first <= self.calls < self.first + self.times:
            raise OSError(self.number, os.strerror(self.number))
        return self.real(*args, **rest)


def fail(patch: pytest.MonkeyPatch, name: str, number: int, **rest: int) -> Failing:
    failing = Failing(number, getattr(os, name), **rest)
    patch.setattr(os, name, failing)
    return failing


# Full disk --------------------------------------------------------------------------------------


@pytest.mark.root
def test_full_disk_names_path_needed_and_free(small_disk: Path) -> None:
    with PosixBackend.open(small_disk / "store", create=True) as store:
        store.put_if_absent(EPOCHS, "before", b"kept")
        segment = store.create_segment("s.seg")
        data = pages(2048)
        with pytest.raises(StorageFull) as full:
            segment.write(0, [data])
        assert full.value.path == segment.path
        assert full.value.needed is not None
        assert 4 << 20 < full.value.needed <= 8 << 20
        assert full.value.free is not None
        assert full.value.free < 4 << 20
        assert str(full.value.needed) in full.value.message
        with pytest.raises(StorageFull) as full:
            store.prepare(KEY, bytes(5 << 20))
        assert full.value.needed == 5 << 20
        segment.abort()
        assert store.list(SEGMENTS) == store.list(PREPARED) == []
        assert store.info().free_bytes is not None
        store.prepare(KEY, b"now there is room")
        assert store.commit_prepared(KEY)
        assert store.read(EPOCHS, "before") == b"kept"
        assert not list(small_disk.rglob(".tmp-*"))


def test_quota_is_full_without_a_number(store: PosixBackend, monkeypatch: Any) -> None:
    fail(monkeypatch, "pwrite", errno.EDQUOT)
    with pytest.raises(StorageFull, match="quota") as full:
        store.put(EPOCHS, "x", b"12345", durable=False)
    assert (full.value.needed, full.value.free) == (5, None)


# Failed flushes ---------------------------------------------------------------------------------


def test_failed_flush_of_a_record_leaves_nothing(
    store: PosixBackend, monkeypatch: Any, tmp_path: Path
) -> None:
    fail(monkeypatch, "fsync", errno.EIO)
    with pytest.raises(StorageError) as error:
        store.put_if_absent(EPOCHS, "x", b"data")
    assert (error.value.errno, error.value.outcome) == (errno.EIO, Outcome.NOT_COMMITTED)
    assert list((tmp_path / "store" / EPOCHS).iterdir()) == []
    assert store.put_if_absent(EPOCHS, "x", b"data")


def test_failed_flush_of_prepared_record(
    store: PosixBackend, monkeypatch: Any, tmp_path: Path
) -> None:
    fail(monkeypatch, "fsync", errno.EIO)
    with pytest.raises(StorageError):
        store.prepare(KEY, b"commit")
    assert list((tmp_path / "store" / PREPARED).iterdir()) == []


def test_failed_flush_of_the_decision_is_unknown_and_final(
    store: PosixBackend, monkeypatch: Any
) -> None:
    store.prepare(KEY, b"commit")
    flush = fail(monkeypatch, "fsync", errno.EIO)
    for _ in range(2):
        with pytest.raises(StorageError) as error:
            store.commit_prepared(KEY)
        assert error.value.outcome == Outcome.UNKNOWN
        assert error.value.errno == errno.EIO
    assert flush.calls == 1
    # A process that opens the store anew flushes for itself and finds the decision.
    with PosixBackend.open(store.path, create=True) as other:
        assert not other.put_if_absent(EPOCHS, str(KEY), b"abort")
        assert other.read(EPOCHS, str(KEY)) == b"commit"


def test_failed_flush_of_a_segment_is_not_repeated(store: PosixBackend, monkeypatch: Any) -> None:
    segment = store.create_segment("s.seg")
    segment.write(0, [pages(1)])
    flush = fail(monkeypatch, "fsync", errno.EIO)
    for _ in range(2):
        with pytest.raises(StorageError):
            segment.sync_close(PAGE_BYTES)
    assert flush.calls == 1
    segment.abort()
    assert store.list(SEGMENTS) == []


def test_flush_of_a_clean_folder_is_left_out(store: PosixBackend, monkeypatch: Any) -> None:
    flush = fail(monkeypatch, "fsync", errno.EIO, times=0)
    store.sync_folder(SEGMENTS)
    assert flush.calls == 0
    segment = store.create_segment("s.seg")
    store.sync_folder(SEGMENTS)
    segment.sync_close(0)
    store.sync_folder(SEGMENTS)
    assert flush.calls == 2


# Lost answers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EEXIST, errno.ENOENT])
def test_lost_answer_of_a_link_is_recognised(
    store: PosixBackend, monkeypatch: Any, number: int
) -> None:
    real = os.link

    def link_and_lose(*args: Any, **rest: Any) -> None:
        real(*args, **rest)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", link_and_lose)
    assert store.put_if_absent(EPOCHS, "x", b"mine")
    store.prepare(KEY, b"commit")
    assert store.commit_prepared(KEY)


def test_refused_link_leaves_the_outcome_open(store: PosixBackend, monkeypatch: Any) -> None:
    fail(monkeypatch, "link", errno.EIO)
    store.prepare(KEY, b"commit")
    with pytest.raises(StorageError) as error:
        store.commit_prepared(KEY)
    assert error.value.outcome == Outcome.UNKNOWN
    assert store.commit_prepared(KEY)


def test_file_system_that_cannot_decide(store: PosixBackend, monkeypatch: Any) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, "no links")

    def old(*_: Any) -> None:
        raise OSError(errno.EINVAL, "no flags")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr("groupio.backend.records.rename_with", old)
    with pytest.raises(StorageError, match="neither hard links"):
        store.put_if_absent(EPOCHS, "x", b"data")
    assert store.list(EPOCHS) == []


# Cut and refused writes -------------------------------------------------------------------------


@pytest.mark.parametrize("most", [PAGE_BYTES, 3 * PAGE_BYTES + 512])
def test_cut_writes_are_continued(store: PosixBackend, monkeypatch: Any, most: int) -> None:
    real = os.pwritev

    def cut(fd: int, views: list[memoryview], offset: int) -> int:
        data = b"".join(views)[:most]
        page = pages(-(-len(data) // PAGE_BYTES))
        page[: len(data)] = data
        return min(real(fd, [page], offset), len(data))

    monkeypatch.setattr(os, "pwritev", cut)
    segment = store.create_segment("s.seg")
    data = pages(20)
    segment.write(0, [data[: 7 * PAGE_BYTES], data[7 * PAGE_BYTES :]])
    segment.sync_close(len(data))
    assert store.read(SEGMENTS, "s.seg") == bytes(data)


def test_write_that_makes_no_progress_ends(store: PosixBackend, monkeypatch: Any) -> None:
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    segment = store.create_segment("s.seg")
    with pytest.raises(StorageError) as error:
        segment.write(0, [pages(1)])
    assert error.value.errno == errno.EIO
    segment.abort()


def direct_segment(store: PosixBackend, monkeypatch: Any) -> Any:
    """A segment that believes to be in direct mode, on any disk."""
    monkeypatch.setattr(fcntl, "fcntl", lambda *_: 0)
    segment = store.create_segment("s.seg")
    assert segment.io_mode == "direct"
    return segment


def test_direct_mode_refused_at_the_first_write(store: PosixBackend, monkeypatch: Any) -> None:
    segment = direct_segment(store, monkeypatch)
    fail(monkeypatch, "pwritev", errno.EINVAL)
    data = pages(2)
    segment.write(0, [data])
    assert segment.io_mode == "buffered"
    segment.write(2 * PAGE_BYTES, [data[:100]])
    segment.sync_close(2 * PAGE_BYTES + 100)
    assert store.read(SEGMENTS, "s.seg") == bytes(data) + bytes(data)[:100]


def test_unaligned_direct_writes_are_refused(store: PosixBackend, monkeypatch: Any) -> None:
    segment = direct_segment(store, monkeypatch)
    data = pages(2)
    for offset, view in ((1, data), (0, data[:-1])):
        with pytest.raises(InvalidInput, match="write_tail"):
            segment.write(offset, [view])
    fail(monkeypatch, "pwritev", errno.EINVAL)
    with pytest.raises(InvalidInput, match="aligned"):
        segment.write(0, [data[1 : 1 + PAGE_BYTES]])
    segment.abort()


def test_file_system_without_direct_mode(store: PosixBackend, monkeypatch: Any) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(errno.EINVAL, "no direct mode")

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    segment = store.create_segment("s.seg")
    assert segment.io_mode == "buffered"
    segment.write(0, [memoryview(b"any length")])
    segment.write_tail(10, b" at all")
    segment.sync_close(17)
    assert store.read(SEGMENTS, "s.seg") == b"any length at all"
    assert store.info().io_mode == "buffered"


def test_failed_close_is_an_error(store: PosixBackend, monkeypatch: Any) -> None:
    segment = store.create_segment("s.seg")
    fail(monkeypatch, "close", errno.EIO)
    with pytest.raises(StorageError, match="close"):
        segment.sync_close(0)
    segment.abort()
    assert store.list(SEGMENTS) == []


def test_read_error_is_not_damage(store: PosixBackend, monkeypatch: Any) -> None:
    store.put(EPOCHS, "x", b"data", durable=False)
    view = memoryview(bytearray(4))
    for name in ("pread", "preadv"):
        fail(monkeypatch, name, errno.EIO)
        with pytest.raises(StorageError) as error:
            store.read(EPOCHS, "x") if name == "pread" else store.read_into(EPOCHS, "x", 0, view)
        assert error.value.errno == errno.EIO
    assert store.read(EPOCHS, "x") == b"data"


def test_cut_reads_are_continued(store: PosixBackend, monkeypatch: Any) -> None:
    data = bytes(range(256))
    store.put(EPOCHS, "x", data, durable=False)
    pread, preadv = os.pread, os.preadv
    monkeypatch.setattr(os, "pread", lambda fd, length, at: pread(fd, min(length, 100), at))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:7]], at))
    assert store.read(EPOCHS, "x", 3, 250) == data[3:253]


def test_file_cut_short_while_it_is_read(store: PosixBackend, tmp_path: Path) -> None:
    store.put(EPOCHS, "x", bytes(100), durable=False)
    with store.reader(EPOCHS, "x") as reader:
        os.truncate(tmp_path / "store" / EPOCHS / "x", 50)
        with pytest.raises(IntegrityError):
            reader.read(0, 100)
        with pytest.raises(IntegrityError):
            reader.read_into(0, memoryview(bytearray(100)))
