"""The conformance suite of backends: subclass it, say how to open a store, and run pytest.

::

    class TestMyBackend(BackendSuite):
        def open_backend(self, place: Path, *, create: bool) -> Backend:
            return MyBackend.open(place / "store", create=create)

Each test gets an empty directory as ``place``; two backends opened with the same place are two
processes that use the same store.
"""

from __future__ import annotations

import abc
import mmap
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from groupio.backend.base import (
    EPOCHS,
    FOLDERS,
    INFLIGHT,
    PREPARED,
    ROOT,
    SEGMENTS,
    Backend,
)
from groupio.errors import GroupIOError, IntegrityError, InvalidInput, NotFound, StorageError
from groupio.model import PAGE_BYTES, DecisionKey

KEY = DecisionKey(lineage=1, epoch=7, attempt=1)

BAD_NAMES = (
    "",
    ".",
    "..",
    "../x",
    "a/b",
    "/etc/x",
    ".hidden",
    "-x",
    "a\0b",
    "a\nb",
    "é",
    "x" * 256,
)

T = TypeVar("T")


def pages(count: int, fill: int = 1) -> memoryview:
    """``count`` pages of page-aligned memory, each filled with its own byte value."""
    memory = mmap.mmap(-1, count * PAGE_BYTES)
    for page in range(count):
        memory[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] = (
            bytes([(fill + page) % 256]) * PAGE_BYTES
        )
    return memoryview(memory)


def together(*calls: Callable[[], T]) -> list[T]:
    """Run ``calls`` in threads that start at one moment; their results, or the first error."""
    barrier = threading.Barrier(len(calls))
    results: dict[int, T] = {}
    errors: list[Exception] = []

    def run(index: int) -> None:
        try:
            barrier.wait(timeout=30)
            results[index] = calls[index]()
        except Exception as error:  # noqa: BLE001  shown by the raise below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    if errors:
        raise errors[0]
    return [results[index] for index in range(len(calls))]


class BackendSuite(abc.ABC):
    """Tests that every backend passes; see the module for how to use them."""

    @abc.abstractmethod
    def open_backend(self, place: Path, *, create: bool) -> Backend:
        """Open the store of this test."""

    @pytest.fixture
    def opened(self, tmp_path: Path) -> Iterator[Callable[..., Backend]]:
        """Opens further backends on the store of this test; closes them at the end."""
        backends: list[Backend] = []

        def open_one(*, create: bool = True) -> Backend:
            backends.append(self.open_backend(tmp_path, create=create))
            return backends[-1]

        yield open_one
        for backend in backends:
            backend.close()

    @pytest.fixture
    def store(self, opened: Callable[..., Backend]) -> Backend:
        """An empty store."""
        return opened()

    # The store itself

    def test_absent_store_is_not_found(self, opened: Callable[..., Backend]) -> None:
        with pytest.raises(NotFound):
            opened(create=False)

    def test_store_record_is_made_once(
        self, store: Backend, opened: Callable[..., Backend]
    ) -> None:
        with pytest.raises(NotFound):
            store.store_record()
        with pytest.raises(NotFound):
            _ = store.identity
        made = store.ensure_store_record("job")
        assert store.ensure_store_record("other") == made
        other = opened(create=False)
        assert other.store_record() == made
        assert other.identity == store.identity
        assert store.identity[0] == made.store_id
        store.check_identity()

    def test_racing_creators_agree(self, opened: Callable[..., Backend]) -> None:
        stores = [opened() for _ in range(4)]
        records = together(*(partial(s.ensure_store_record, "job") for s in stores))
        assert len({record.store_id for record in records}) == 1

    def test_info_names_the_modes(self, store: Backend) -> None:
        info = store.info()
        assert info.writable
        assert info.io_mode in ("direct", "buffered")
        assert info.commit_mode in ("link", "rename_noreplace")
        assert info.path == store.path
        assert all(store.list(folder) == [] for folder in (ROOT, *FOLDERS)[1:])

    def test_unknown_folder_is_refused(self, store: Backend) -> None:
        with pytest.raises(InvalidInput):
            store.list("elsewhere")

    @pytest.mark.parametrize("name", BAD_NAMES)
    def test_bad_names_are_refused_everywhere(self, store: Backend, name: str) -> None:
        calls: list[Callable[[], object]] = [
            lambda: store.exists(EPOCHS, name),
            lambda: store.size(EPOCHS, name),
            lambda: store.sizes(EPOCHS, [name]),
            lambda: store.read(EPOCHS, name),
            lambda: store.read_into(EPOCHS, name, 0, memoryview(bytearray(1))),
            lambda: store.reader(EPOCHS, name),
            lambda: store.delete(EPOCHS, name),
            lambda: store.put(EPOCHS, name, b"", durable=False),
            lambda: store.put_if_absent(EPOCHS, name, b""),
            lambda: store.create_segment(name),
        ]
        for call in calls:
            with pytest.raises(InvalidInput):
                call()

    # Records

    @pytest.mark.parametrize("durable", [False, True])
    def test_record_round_trip(self, store: Backend, durable: bool) -> None:
        data = bytes(range(256)) * 40
        store.put(INFLIGHT, "b", data, durable=durable)
        store.put(INFLIGHT, "a", b"", durable=durable)
        assert store.list(INFLIGHT) == ["a", "b"]
        assert store.exists(INFLIGHT, "b")
        assert store.size(INFLIGHT, "b") == len(data)
        assert store.sizes(INFLIGHT, ["b", "none"]) == {"b": len(data), "none": -1}
        assert store.read(INFLIGHT, "a") == b""
        assert store.read(INFLIGHT, "b") == data
        assert store.read(INFLIGHT, "b", 5, 300) == data[5:305]
        with store.reader(INFLIGHT, "b") as reader:
            assert reader.size == len(data)
            assert reader.read(256, 4) == data[:4]
            view = bytearray(10)
            reader.read_into(250, memoryview(view))
            assert view == data[250:260]

    def test_put_never_replaces(self, store: Backend) -> None:
        store.put(INFLIGHT, "x", b"first", durable=True)
        with pytest.raises(StorageError, match="exists"):
            store.put(INFLIGHT, "x", b"second", durable=False)
        assert not store.put_if_absent(INFLIGHT, "x", b"third")
        assert store.read(INFLIGHT, "x") == b"first"
        assert store.list(INFLIGHT) == ["x"]

    def test_identities_are_those_of_the_names(self, store: Backend) -> None:
        """One listing tells a file from another that had its name before."""
        for name in ("b", "a"):
            store.put(EPOCHS, name, b"x", durable=False)
        found = store.identities(EPOCHS)
        assert list(found) == store.list(EPOCHS) == ["a", "b"]
        assert found == store.identities(EPOCHS)
        assert store.identities(SEGMENTS) == {}

    def test_a_derived_file_is_replaced(self, store: Backend) -> None:
        """The newest counts, whole."""
        for data in (b"old and longer", b"new"):
            store.replace(ROOT, "derived", data)
            assert store.read(ROOT, "derived") == data

    def test_delete_is_idempotent(self, store: Backend) -> None:
        store.put(INFLIGHT, "x", b"data", durable=False)
        store.delete(INFLIGHT, "x")
        store.delete(INFLIGHT, "x")
        assert not store.exists(INFLIGHT, "x")
        assert store.put_if_absent(INFLIGHT, "x", b"again")

    def test_absent_and_short_are_different(self, store: Backend) -> None:
        with pytest.raises(NotFound) as absent:
            store.read(EPOCHS, "x")
        assert absent.value.path is not None
        assert absent.value.path.endswith("epochs/x")
        with pytest.raises(IntegrityError):
            store.reader(SEGMENTS, "x")
        view = memoryview(bytearray(8))
        with pytest.raises(IntegrityError):
            store.read_into(EPOCHS, "x", 0, view)
        store.put(EPOCHS, "x", b"12345678", durable=False)
        store.read_into(EPOCHS, "x", 0, view)
        assert bytes(view) == b"12345678"
        for offset, length in ((1, 8), (9, 0), (1 << 62, 1 << 62), (-1, 1), (0, -1), (0, 1 << 60)):
            with pytest.raises(IntegrityError) as short:
                store.read(EPOCHS, "x", offset, length)
            assert short.value.path is not None
        with pytest.raises(IntegrityError):
            store.read_into(EPOCHS, "x", 1, view)

    def test_one_of_many_creators_wins(self, opened: Callable[..., Backend]) -> None:
        stores = [opened() for _ in range(8)]
        contents = [bytes([index]) * 5000 for index in range(8)]
        won = together(
            *(
                partial(s.put_if_absent, EPOCHS, "x", data)
                for s, data in zip(stores, contents, strict=True)
            )
        )
        assert won.count(True) == 1
        assert stores[0].read(EPOCHS, "x") == contents[won.index(True)]
        assert stores[0].list(EPOCHS) == ["x"]

    # Decisions

    def test_prepared_record_becomes_the_decision(self, store: Backend) -> None:
        store.prepare(KEY, b"commit")
        assert store.list(EPOCHS) == []
        assert store.list(PREPARED) == [str(KEY)]
        assert store.commit_prepared(KEY)
        assert store.read(EPOCHS, str(KEY)) == b"commit"
        assert store.list(PREPARED) == []

    def test_commit_may_be_repeated(self, store: Backend) -> None:
        store.prepare(KEY, b"old")
        store.prepare(KEY, b"commit")
        assert store.commit_prepared(KEY)
        assert store.commit_prepared(KEY)
        store.prepare(KEY, b"too late")
        assert not store.commit_prepared(KEY)
        assert store.read(EPOCHS, str(KEY)) == b"commit"
        assert store.list(PREPARED) == []

    def test_commit_needs_a_prepared_record(self, store: Backend) -> None:
        with pytest.raises(NotFound) as error:
            store.commit_prepared(KEY)
        assert error.value.epoch == KEY.epoch

    def test_abort_wins_when_first(self, store: Backend) -> None:
        store.prepare(KEY, b"commit")
        assert store.put_if_absent(EPOCHS, str(KEY), b"abort")
        assert not store.commit_prepared(KEY)
        assert store.read(EPOCHS, str(KEY)) == b"abort"

    def test_abort_loses_when_second(self, store: Backend) -> None:
        store.prepare(KEY, b"commit")
        assert store.commit_prepared(KEY)
        assert not store.put_if_absent(EPOCHS, str(KEY), b"abort")
        assert store.read(EPOCHS, str(KEY)) == b"commit"

    def test_next_controller_completes(
        self, store: Backend, opened: Callable[..., Backend]
    ) -> None:
        store.prepare(KEY, b"commit")
        other = opened(create=False)
        assert other.commit_prepared(KEY)
        assert store.commit_prepared(KEY)
        assert other.read(EPOCHS, str(KEY)) == b"commit"

    def test_record_of_another_controller_is_not_mine(
        self, store: Backend, opened: Callable[..., Backend]
    ) -> None:
        other = opened()
        store.prepare(KEY, b"mine")
        other.prepare(KEY, b"theirs")
        assert not store.commit_prepared(KEY)
        assert store.read(EPOCHS, str(KEY)) == b"theirs"
        assert other.commit_prepared(KEY)

    def test_racing_controllers_decide_once(self, opened: Callable[..., Backend]) -> None:
        for attempt in range(1, 9):
            key = DecisionKey(lineage=1, epoch=1, attempt=attempt)
            first, second = opened(), opened()
            first.prepare(key, b"commit")
            committed, aborted = together(
                partial(first.commit_prepared, key),
                partial(second.put_if_absent, EPOCHS, str(key), b"abort"),
            )
            assert committed != aborted
            assert first.read(EPOCHS, str(key)) == (b"commit" if committed else b"abort")

    # Segments

    def test_segment_round_trip(self, store: Backend) -> None:
        segment = store.create_segment("s.seg")
        assert segment.io_mode in ("direct", "buffered")
        assert segment.name == "s.seg"
        data = pages(6)
        together(
            lambda: segment.write(3 * PAGE_BYTES, [data[3 * PAGE_BYTES :]]),
            lambda: segment.write(0, [data[:PAGE_BYTES], data[PAGE_BYTES : 3 * PAGE_BYTES]]),
        )
        segment.write(0, [])
        segment.write_tail(6 * PAGE_BYTES, b"tail")
        segment.sync_close(6 * PAGE_BYTES + 4)
        store.sync_folder(SEGMENTS)
        store.sync_folder(SEGMENTS)
        assert store.list(SEGMENTS) == ["s.seg"]
        assert store.read(SEGMENTS, "s.seg") == bytes(data) + b"tail"
        segment.abort()
        assert store.exists(SEGMENTS, "s.seg")

    def test_many_views_in_one_write(self, store: Backend) -> None:
        segment = store.create_segment("s.seg")
        page = pages(1)
        segment.write(0, [page] * 2500)
        segment.sync_close(2500 * PAGE_BYTES)
        assert store.read(SEGMENTS, "s.seg") == bytes(page) * 2500

    def test_segment_name_is_taken_once(self, store: Backend) -> None:
        segment = store.create_segment("s.seg")
        with pytest.raises(StorageError):
            store.create_segment("s.seg")
        segment.abort()

    def test_segment_of_wrong_size_fails(self, store: Backend) -> None:
        segment = store.create_segment("s.seg")
        segment.write(0, [pages(2)])
        with pytest.raises(StorageError):
            segment.sync_close(3 * PAGE_BYTES)
        with pytest.raises(GroupIOError):
            segment.sync_close(2 * PAGE_BYTES)
        segment.abort()
        assert store.list(SEGMENTS) == []

    def test_aborted_segment_is_gone(self, store: Backend) -> None:
        segment = store.create_segment("s.seg")
        segment.write(0, [pages(2)])
        segment.abort()
        segment.abort()
        assert store.list(SEGMENTS) == []
        with pytest.raises(GroupIOError):
            segment.write(0, [pages(1)])
        with pytest.raises(GroupIOError):
            segment.sync_close(0)
