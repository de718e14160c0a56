"""What goes wrong around a real etcd: pauses, restarts, hands in its keys, other services."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from etcd_help import HOST, EtcdServer, Gate, free_port

from groupio.controller.by_etcd import EtcdCoordinator
from groupio.controller.etcd_http import Etcd, NoSuchLeaseError
from groupio.errors import ControllerLost, InvalidInput
from groupio.testing.coordinator_suite import life, run_for, soon, until

TTL_S = 2


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def scope(request: pytest.FixtureRequest) -> str:
    return str(request.node.originalname)


@pytest.fixture
def losses() -> list[str]:
    return []


@pytest.fixture
def one(server: EtcdServer, scope: str, losses: list[str]) -> Iterator[EtcdCoordinator]:
    made = EtcdCoordinator([server.endpoint], scope, ttl_s=TTL_S, on_lost=losses.append)
    with made:
        yield made


@pytest.fixture
def two(server: EtcdServer, scope: str) -> Iterator[EtcdCoordinator]:
    with EtcdCoordinator([server.endpoint], scope, ttl_s=TTL_S) as made:
        yield made


@pytest.fixture
def etcd(server: EtcdServer) -> Iterator[Etcd]:
    made = Etcd([server.endpoint])
    yield made
    made.close()


def keys(scope: str) -> tuple[bytes, bytes]:
    return f"/groupio/{scope}/controller".encode(), f"/groupio/{scope}/term".encode()


def test_a_paused_process_has_lost_when_it_wakes(
    server: EtcdServer, scope: str, two: EtcdCoordinator
) -> None:
    program = str(Path(__file__).with_name("etcd_holder.py"))
    with subprocess.Popen(
        [sys.executable, program, server.endpoint, scope, str(TTL_S)],
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "rules 1\n"
            holder.send_signal(signal.SIGSTOP)
            assert run_for(two, 2, over=1).term == 2
            holder.send_signal(signal.SIGCONT)
            assert holder.stdout.readline() == "over\n"
            assert holder.wait(timeout=30) == 0
        finally:
            holder.kill()
    assert two.keep()


def test_a_short_restart_of_etcd_ends_no_rule(tmp_path: Path, losses: list[str]) -> None:
    server = EtcdServer(tmp_path / "etcd")
    server.start()
    try:
        with EtcdCoordinator([server.endpoint], "job", ttl_s=20, on_lost=losses.append) as one:
            rule = run_for(one, 1, over=6)
            server.kill()
            server.start()
            assert one.current(soon()) == rule
            assert one.keep()
            one.resign()
            assert run_for(one, 1).term == rule.term + 1
        assert losses == []
    finally:
        server.kill()


def test_an_etcd_that_stays_away_ends_the_rule(tmp_path: Path, losses: list[str]) -> None:
    server = EtcdServer(tmp_path / "etcd")
    server.start()
    try:
        with EtcdCoordinator([server.endpoint], "job", ttl_s=1, on_lost=losses.append) as one:
            rule = run_for(one, 1)
            server.kill()
            began = time.monotonic()
            assert until(lambda: not one.keep(), 10)
            assert time.monotonic() - began < 5
            assert until(lambda: len(losses) == 1)
            server.start()
            # The same process may rule again, in a new term, once its old key is gone.
            again = run_for(one, 1)
            assert again.term > rule.term
            assert one.keep()
        assert len(losses) == 1
    finally:
        server.kill()


def test_a_revoked_lease_is_noticed_at_once(
    one: EtcdCoordinator, etcd: Etcd, scope: str, losses: list[str]
) -> None:
    run_for(one, 1)
    (ruler, _), _ = etcd.read(keys(scope), soon())
    assert ruler is not None
    etcd.revoke(ruler.lease, soon())
    etcd.revoke(ruler.lease, soon())
    assert etcd.keep_alive(ruler.lease, soon()) == 0
    assert until(lambda: losses != [], 3)
    assert not one.keep()
    assert "term 1 is over: its lease of" in losses[0]


def test_a_replaced_key_is_noticed_at_once(
    one: EtcdCoordinator, etcd: Etcd, scope: str, losses: list[str]
) -> None:
    run_for(one, 1)
    (ruler, _), _ = etcd.read(keys(scope), soon())
    assert ruler is not None
    assert etcd.swap([], [(keys(scope)[0], ruler.value, 0)], soon())
    assert until(lambda: losses != [], 3)
    assert not one.keep()
    assert "deleted or replaced" in losses[0]


def test_a_ruler_that_is_alive_is_waited_for_up_to_the_deadline(
    one: EtcdCoordinator, two: EtcdCoordinator
) -> None:
    run_for(one, 1)
    began = time.monotonic()
    with pytest.raises(ControllerLost, match=r"node1 .*of term 1 still has its lease"):
        run_for(two, 2, over=1, within=1.0)
    assert 0.9 < time.monotonic() - began < 5
    assert one.keep()


def test_a_lost_answer_to_the_transaction_is_recognised(
    one: EtcdCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    swap = one._etcd.swap
    monkeypatch.setattr(one._etcd, "swap", lambda *args: swap(*args) and swap(*args))
    assert run_for(one, 1).term == 1
    assert one.keep()


def test_a_lease_that_ends_before_the_transaction_is_granted_anew(
    one: EtcdCoordinator, etcd: Etcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    swap, leases = one._etcd.swap, []

    def late(unchanged: Any, puts: Any, deadline: float) -> bool:
        if not leases:
            etcd.revoke(puts[0][2], soon())
        leases.append(puts[0][2])
        return swap(unchanged, puts, deadline)

    monkeypatch.setattr(one._etcd, "swap", late)
    assert run_for(one, 1).term == 1
    assert len(set(leases)) == 2
    assert one.keep()


def test_keys_of_somebody_else_are_an_error(one: EtcdCoordinator, etcd: Etcd, scope: str) -> None:
    ruler, term = keys(scope)
    assert etcd.swap([(term, 0)], [(term, b"many", 0)], soon())
    with pytest.raises(ControllerLost, match="no term"):
        run_for(one, 1)
    assert etcd.swap([], [(term, b"4", 0), (ruler, b"me", 0)], soon())
    with pytest.raises(ControllerLost, match="no record of a controller"):
        one.current(soon())


def test_a_lease_that_is_over_takes_no_key(etcd: Etcd, scope: str) -> None:
    with pytest.raises(NoSuchLeaseError):
        etcd.swap([], [(scope.encode(), b"v", 12345)], soon())


def test_a_watcher_is_told_within_a_moment(one: EtcdCoordinator, two: EtcdCoordinator) -> None:
    rule = run_for(one, 1)
    heard: list[float] = []

    def watch() -> None:
        assert two.watch(rule.term, 30.0) is None
        heard.append(time.monotonic())

    thread = threading.Thread(target=watch)
    thread.start()
    time.sleep(0.5)
    began = time.monotonic()
    one.resign()
    thread.join(timeout=30)
    assert heard[0] - began < 2


def test_a_dead_or_silent_endpoint_is_passed_over(server: EtcdServer, scope: str) -> None:
    gate = Gate((HOST, server.port))
    gate.stall()
    endpoints = [f"{HOST}:{free_port()}", gate.endpoint, server.endpoint]
    try:
        etcd = Etcd(endpoints, try_s=0.3)
        assert etcd.swap([], [(scope.encode(), b"v", 0)], soon())
        began = time.monotonic()
        (found,), _ = etcd.read([scope.encode()], soon())
        assert found is not None
        assert found.value == b"v"
        assert time.monotonic() - began < 0.25  # the one that answered comes first
        etcd.close()
    finally:
        gate.shut()


def test_a_rule_given_up_by_the_clock_is_not_prolonged(
    one: EtcdCoordinator, two: EtcdCoordinator, losses: list[str]
) -> None:
    run_for(one, 1)
    lease = one._lease
    assert lease is not None
    lease._until = 0.0  # as if the last answer had come long ago
    assert not one.keep()
    lease._until = float("inf")  # the answer to a late request
    assert run_for(two, 2, over=1).term == 2
    assert not one.keep()
    assert losses == ["the rule of term 1 is over: its lease in etcd ran out"]


def test_closing_ends_a_watch_of_etcd(one: EtcdCoordinator, two: EtcdCoordinator) -> None:
    rule = run_for(one, 1)
    threading.Timer(0.5, two.close).start()
    began = time.monotonic()
    assert two.watch(rule.term, 60.0) is None
    assert time.monotonic() - began < 4


def test_closing_ends_waiting_calls(one: EtcdCoordinator, two: EtcdCoordinator) -> None:
    run_for(one, 1)
    ended: list[float] = []

    def wait() -> None:
        with pytest.raises(ControllerLost):
            two.campaign("n", life(2), "tcp://h:1", soon(60), over=1)
        ended.append(time.monotonic())

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.3)
    began = time.monotonic()
    two.close()
    thread.join(timeout=30)
    assert ended[0] - began < 3
    with pytest.raises(ControllerLost, match="closed"):
        two.current(soon(0.5))


@pytest.mark.parametrize(
    ("endpoints", "scope", "ttl_s"), [((), "job", 5), (("h:1",), "a/b", 5), (("h:1",), "job", 0)]
)
def test_a_place_that_cannot_be(endpoints: Sequence[str], scope: str, ttl_s: int) -> None:
    with pytest.raises(InvalidInput):
        EtcdCoordinator(endpoints, scope, ttl_s=ttl_s)
