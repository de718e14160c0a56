"""The thread that keeps a lease of etcd: whatever ends it, its holder hears why, once."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest

from groupio.controller import etcd_lease
from groupio.controller.etcd_http import NoSuchLeaseError
from groupio.controller.etcd_lease import Lease
from groupio.errors import ControllerLost, FormatError, GroupAborted


class FakeEtcd:
    """An etcd with one lease."""

    def __init__(self) -> None:
        self.kept: Any = 1
        self.revoked: list[int] = []

    def grant(self, ttl_s: int, deadline: float) -> tuple[int, int]:
        return 7, 1

    def keep_alive(self, lease: int, deadline: float) -> int:
        if isinstance(self.kept, Exception):
            raise self.kept
        return int(self.kept)

    def revoke(self, lease: int, deadline: float) -> None:
        self.revoked.append(lease)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_lease, "_ROUNDS", 50)


def kept(etcd: FakeEtcd, check: Any) -> tuple[Lease, queue.Queue[str]]:
    lost: queue.Queue[str] = queue.Queue()
    lease = Lease(etcd, 1, 0.0)  # type: ignore[arg-type]
    assert lease.is_held
    lease.start(check, lost.put)
    return lease, lost


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (0, "is over"),
        (NoSuchLeaseError(), "is over"),
        (ControllerLost("no answer"), "could not be prolonged: no answer"),
        (RuntimeError("a defect"), "cannot be kept: a defect"),
    ],
)
def test_a_lease_that_is_not_prolonged(answer: Any, why: str) -> None:
    etcd = FakeEtcd()
    etcd.kept = answer
    lease, lost = kept(etcd, lambda deadline: None)
    assert why in lost.get(timeout=20)
    lease.join()
    assert not lease.is_held
    assert lost.empty()
    assert etcd.revoked == [7]


def test_a_key_that_a_newer_release_wrote_is_not_the_holders() -> None:
    etcd = FakeEtcd()

    def check(deadline: float) -> str | None:
        raise FormatError("a newer release wrote the record")

    lease, lost = kept(etcd, check)
    assert "a newer release wrote the record" in lost.get(timeout=20)
    lease.join()
    assert not lease.is_held


def test_what_the_check_says_ends_it() -> None:
    lease, lost = kept(FakeEtcd(), lambda deadline: "its key was replaced")
    assert lost.get(timeout=20) == "its key was replaced"
    lease.join()
    assert not lease.is_held


def test_a_lease_that_no_thread_can_keep_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(GroupAborted, match="ulimit -u"):
        kept(FakeEtcd(), lambda deadline: None)


def test_an_end_by_the_owner_is_no_loss() -> None:
    etcd = FakeEtcd()
    lease, lost = kept(etcd, lambda deadline: None)
    lease.end(revoke=True)
    lease.join()
    assert lost.empty()
    assert etcd.revoked == [7]
    assert not lease.is_held
