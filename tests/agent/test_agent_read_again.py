"""Reads for other nodes go on when the store was away and has come back."""

from __future__ import annotations

import errno
import gc
import threading
from pathlib import Path

import pytest
from agent_tools import WAIT_S, Store
from test_agent_uplink import Reading

from dead_handles import DeadHandles
from groupio.agent.read_sources import _Opened
from groupio.agent.workers import WorkerPool
from groupio.backend.posix import PosixBackend
from groupio.backend.records import PosixReader
from groupio.testing.fabric_suite import eventually
from open_files import open_files


def read_all(reading: Reading) -> set[str]:
    """Read every chunk; why some did not come."""
    reading.told.clear()
    into = reading.read()
    want = len(reading.table)
    eventually(lambda: sum(len(rows) for _, rows, _ in reading.told) == want)
    reasons = {why for _, _, why in reading.told if why}
    if not reasons:
        assert reading.rows() == list(range(want))
        assert any(any(view[:100]) for view in into)
    return reasons


@pytest.mark.parametrize("error", [errno.ESTALE, errno.ENOTCONN, errno.ENODEV])
def test_chunks_are_read_through_new_handles(
    store: Store, pool: WorkerPool, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    reading = Reading(store, pool.uplink)
    with monkeypatch.context() as patch:
        dead = DeadHandles(patch, store.path, error)
        assert read_all(reading) == set()
        count = len(open_files(str(store.path)))
        for _ in range(3):
            dead.cut()
            assert read_all(reading) == set()
        assert dead.failed >= 3
        gc.collect()
        assert len(open_files(str(store.path))) <= count
    reading.close()


def test_another_store_is_not_read(
    store: Store, pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = Reading(store, pool.uplink)
    path = Path(store.path)
    with monkeypatch.context() as patch:
        dead = DeadHandles(patch, store.path, errno.ESTALE)
        dead.cut()
        path.rename(tmp_path / "kept")
        with PosixBackend.open(path, create=True) as other:
            other.ensure_store_record("job")
        for _ in range(2):
            assert read_all(reading) == {"storage"}
        path.rename(tmp_path / "other")
        (tmp_path / "kept").rename(path)
        assert read_all(reading) == set()
    reading.close()


def test_other_errors_open_nothing(
    store: Store, pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = Reading(store, pool.uplink)
    with monkeypatch.context() as patch:
        DeadHandles(patch, store.path, errno.EIO).cut()
        for _ in range(2):
            assert read_all(reading) == {"storage"}
    reading.close()


def test_who_comes_to_what_another_thread_just_closed_reads_through_the_new(
    store: Store, pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = Reading(store, pool.uplink)
    real, late = _Opened.use, [True]

    def use(opened: _Opened, segment: int, more: int) -> bool:
        if late.pop() if late else False:
            reading.source._renew(opened)
        return real(opened, segment, more)

    monkeypatch.setattr(_Opened, "use", use)
    assert read_all(reading) == set()
    assert late == []
    reading.close()


def closes_at_once(reading: Reading, over: threading.Event) -> bool:
    """Whether the source closes while a call to the store hangs; ``over`` then ends that call."""
    closing = threading.Thread(target=reading.source.close)
    closing.start()
    closing.join(WAIT_S / 12)
    waited = closing.is_alive()
    over.set()
    closing.join(WAIT_S)
    return not waited


def test_closing_does_not_wait_for_a_store_that_hangs(
    store: Store, pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(open_files(str(store.path)))
    reading = Reading(store, pool.uplink)
    real, begun, over = PosixBackend.anew, threading.Event(), threading.Event()

    def anew(backend: PosixBackend) -> PosixBackend:
        begun.set()
        assert over.wait(WAIT_S)
        return real(backend)

    with monkeypatch.context() as patch:
        patch.setattr(PosixBackend, "anew", anew)
        DeadHandles(patch, store.path, errno.ESTALE).cut()
        reading.read()
        assert begun.wait(WAIT_S)
        assert closes_at_once(reading, over)
        reading.close()
    gc.collect()
    assert len(open_files(str(store.path))) <= before
    assert reading.told == []


def test_closing_does_not_wait_for_a_segment_that_is_being_opened(
    store: Store, pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = Reading(store, pool.uplink)
    real, begun, over = PosixBackend.reader, threading.Event(), threading.Event()

    def reader(backend: PosixBackend, folder: str, name: str) -> PosixReader:
        begun.set()
        assert over.wait(WAIT_S)
        return real(backend, folder, name)

    monkeypatch.setattr(PosixBackend, "reader", reader)
    reading.read()
    assert begun.wait(WAIT_S)
    assert closes_at_once(reading, over)
    reading.close()
