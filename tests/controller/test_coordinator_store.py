"""Coordination by records in the store passes the suite, with its own traps closed."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from groupio.backend.base import CONTROLLERS
from groupio.backend.posix import PosixBackend
from groupio.controller.by_store import StoreCoordinator
from groupio.controller.coordinator import Coordinator, OnLost, encode_rule
from groupio.errors import FormatError, Outcome, StorageError
from groupio.format.envelope import RecordKind, wrap
from groupio.format.records import controller_name
from groupio.testing.coordinator_suite import CoordinatorSuite, life, run_for, soon


class Trouble:
    """A backend that does something else at chosen calls."""

    def __init__(self, backend: PosixBackend, **instead: Callable[..., Any]) -> None:
        self._backend = backend
        self._instead = instead

    def __getattr__(self, name: str) -> Any:
        return self._instead.get(name) or getattr(self._backend, name)


def troubled(
    backend: PosixBackend, on_lost: OnLost | None = None, **instead: Callable[..., Any]
) -> StoreCoordinator:
    trouble: Any = Trouble(backend, **instead)
    return StoreCoordinator(trouble, poll_s=0.05, on_lost=on_lost)


class TestByStore(CoordinatorSuite):
    @pytest.fixture(autouse=True)
    def backends(self) -> Iterator[None]:
        self.is_away = False
        self.backends_of_test: list[PosixBackend] = []
        yield
        for backend in self.backends_of_test:
            backend.close()

    def open_coordinator(self, place: Path, on_lost: OnLost) -> Coordinator:
        backend = PosixBackend.open(place / "store", create=True)
        self.backends_of_test.append(backend)

        def list_names(folder: str) -> list[str]:
            if self.is_away:
                raise StorageError(
                    "the store is away, for this test took it away",
                    path=str(place),
                    errno=errno.EIO,
                )
            return backend.list(folder)

        return troubled(backend, on_lost, list=list_names)

    def silence(self, coordinator: Coordinator) -> None:
        pass  # there is no lease that silence would end

    def cut_off(self, place: Path) -> None:
        self.is_away = True


@pytest.fixture
def store(tmp_path: Path) -> Iterator[PosixBackend]:
    with PosixBackend.open(tmp_path / "store", create=True) as backend:
        yield backend


def names(store: PosixBackend) -> list[str]:
    return store.list(CONTROLLERS)


def test_each_term_has_one_durable_record(store: PosixBackend) -> None:
    one, two = StoreCoordinator(store), StoreCoordinator(store)
    run_for(one, 1)
    run_for(two, 2, over=1)
    two.resign()
    assert names(store) == ["00000001", "00000002", "00000003"]
    assert one.current(soon()) is None
    assert run_for(one, 1).term == 4


def test_a_ruler_without_a_lease_is_replaced_at_once(store: PosixBackend) -> None:
    lost: list[str] = []
    one, two = StoreCoordinator(store, on_lost=lost.append), StoreCoordinator(store)
    run_for(one, 1)
    began = time.monotonic()
    assert run_for(two, 2, over=1).term == 2
    assert time.monotonic() - began < 2
    assert one.held is not None
    assert lost == []
    assert not one.keep()
    assert lost == ["the rule of term 1 is over: term 2 is in the store"]


def test_records_of_old_terms_are_removed(store: PosixBackend) -> None:
    one = StoreCoordinator(store)
    for term in range(30):
        run_for(one, 1, over=term)
    assert names(store) == [controller_name(term) for term in range(15, 31)]
    assert one.keep()


def test_long_terms_sort_by_number(store: PosixBackend) -> None:
    one = StoreCoordinator(store)
    run_for(one, 1, over=99_999_998)
    assert run_for(one, 1, over=99_999_999).term == 100_000_000
    assert one.current(soon()) == one.held
    assert one.keep()


def test_what_is_no_record_of_a_term_is_left_alone(store: PosixBackend) -> None:
    store.put(CONTROLLERS, "README", b"x", durable=False)
    one = StoreCoordinator(store)
    assert one.current(soon()) is None
    assert run_for(one, 1).term == 1


def test_a_damaged_record_counts_as_nobody(store: PosixBackend, caplog: Any) -> None:
    one = StoreCoordinator(store)
    store.put(CONTROLLERS, controller_name(5), b"rot", durable=False)
    assert one.current(soon()) is None
    assert "damaged" in caplog.text
    assert run_for(one, 1).term == 6


def test_a_record_of_a_newer_release_is_respected(store: PosixBackend) -> None:
    store.put(CONTROLLERS, controller_name(5), wrap(RecordKind.LINEAGE, b""), durable=False)
    one = StoreCoordinator(store)
    with pytest.raises(FormatError):
        run_for(one, 1)


def test_a_record_that_was_removed_by_hand_ends_the_rule(store: PosixBackend) -> None:
    one = StoreCoordinator(store)
    run_for(one, 1)
    store.delete(CONTROLLERS, controller_name(1))
    assert not one.keep()
    assert not one.keep()


def test_a_store_without_the_folder_says_so(tmp_path: Path, store: PosixBackend) -> None:
    (tmp_path / "store" / CONTROLLERS).rmdir()
    with PosixBackend.open(tmp_path / "store", create=False) as old:
        one = StoreCoordinator(old)
        assert one.current(soon()) is None
        with pytest.raises(StorageError, match=CONTROLLERS):
            run_for(one, 1)


def test_a_candidate_that_slept_over_many_terms_makes_no_old_one_anew(
    store: PosixBackend,
) -> None:
    other = StoreCoordinator(store)
    sleeps = [True]

    def put(folder: str, name: str, data: bytes) -> bool:
        if sleeps.pop() if sleeps else False:
            for term in range(20):
                run_for(other, 2, over=term)
        return store.put_if_absent(folder, name, data)

    one = troubled(store, put_if_absent=put)
    rule = run_for(one, 1)
    assert rule == other.held
    assert not one.keep()
    assert other.keep()
    assert names(store)[0] == controller_name(5)


def test_a_lost_answer_is_recognised(store: PosixBackend) -> None:
    calls: list[str] = []

    def put(folder: str, name: str, data: bytes) -> bool:
        calls.append(name)
        made = store.put_if_absent(folder, name, data)
        if len(calls) == 1:
            raise StorageError(
                "the answer was lost", path=name, errno=errno.EIO, outcome=Outcome.UNKNOWN
            )
        return made

    one = troubled(store, put_if_absent=put)
    assert run_for(one, 1).term == 1
    assert one.keep()
    assert calls == ["00000001", "00000001"]


def test_a_failed_creation_is_an_error(store: PosixBackend) -> None:
    def put(*_: object) -> bool:
        raise StorageError("no", path="p", errno=errno.EIO, outcome=Outcome.UNKNOWN)

    one = troubled(store, put_if_absent=put)
    with pytest.raises(StorageError):
        run_for(one, 1)
    assert not one.keep()


def test_a_record_listed_late_is_waited_for(store: PosixBackend) -> None:
    """As on NFS: the creation says "exists" while listings do not show the record yet."""
    run_for(StoreCoordinator(store), 2)
    shown = time.monotonic() + 0.3

    def late(folder: str) -> list[str]:
        return store.list(folder) if time.monotonic() > shown else []

    assert run_for(troubled(store, list=late), 1).life == life(2)


def test_a_record_that_stays_hidden_is_an_error_at_the_deadline(store: PosixBackend) -> None:
    run_for(StoreCoordinator(store), 2)
    store.put(CONTROLLERS, "00000002", b"", durable=False)
    store.delete(CONTROLLERS, "00000002")
    one = troubled(store, list=lambda _: ["00000002"])
    began = time.monotonic()
    with pytest.raises(StorageError, match="cannot be found from this node") as caught:
        one.current(soon(0.3))
    assert caught.value.errno == errno.ESTALE
    assert 0.25 < time.monotonic() - began < 5


def test_old_records_that_cannot_be_removed_do_no_harm(store: PosixBackend) -> None:
    def delete(*_: object) -> None:
        raise StorageError("no", path="p", errno=errno.EACCES)

    one = troubled(store, delete=delete)
    for term in range(20):
        run_for(one, 1, over=term)
    assert one.keep()
    assert len(names(store)) == 20


def test_a_store_that_is_away_leaves_the_rule_in_doubt(store: PosixBackend) -> None:
    away = [False]

    def listing(folder: str) -> list[str]:
        if away[0]:
            raise StorageError("away", path="p", errno=errno.EIO)
        return store.list(folder)

    one = troubled(store, list=listing)
    rule = run_for(one, 1)
    away[0] = True
    with pytest.raises(StorageError):
        one.keep()
    away[0] = False
    assert one.keep()
    assert one.held == rule


def test_closing_ends_a_watch(store: PosixBackend) -> None:
    one = StoreCoordinator(store, poll_s=30.0)
    threading.Timer(0.2, one.close).start()
    began = time.monotonic()
    assert one.watch(0, 60.0) is None
    assert time.monotonic() - began < 10


def test_a_rule_in_the_store_is_a_record_with_a_checksum(store: PosixBackend) -> None:
    rule = run_for(StoreCoordinator(store), 1)
    data = store.read(CONTROLLERS, "00000001")
    assert len(data) == len(encode_rule(rule))
    assert data.startswith(b"GRPIOREC")


@pytest.mark.parametrize("by_token", [True, False])
def test_the_record_says_which_keys_its_controller_takes(tmp_path: Path, by_token: bool) -> None:
    with PosixBackend.open(tmp_path / "store", create=True) as backend:
        with StoreCoordinator(backend, by_token=by_token) as one:
            assert run_for(one, 1).by_token is by_token
        with StoreCoordinator(backend) as other:
            found = other.current(soon())
            assert found is not None
            assert found.by_token is by_token
