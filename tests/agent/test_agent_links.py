"""What plans hear of a node's links."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

from groupio.agent import links as module
from groupio.agent.links import Links
from groupio.fabric.base import (
    GONE,
    LOST,
    MISSING,
    REFUSED,
    STOPPED,
    Fabric,
    FabricFailed,
    Outcome,
)
from groupio.model import NodeLink

MIB = 1 << 20
GOOD = Outcome(True, "", 8 * MIB)
BROKEN = Outcome(False, LOST, 0)


class Engine:
    """A fabric whose probes fail until they are allowed, but for those of ``living``."""

    def __init__(self) -> None:
        self.works = threading.Event()
        self.living: set[str] = set()
        self.reason = LOST
        self.probed = threading.Semaphore(0)

    def probe(self, address: str, job: str, nbytes: int, deadline: float) -> float:
        self.probed.release()
        if not self.works.is_set() and address not in self.living:
            raise FabricFailed("nothing comes", self.reason)
        return 1e9


class Told:
    """The links under test, and what they said."""

    def __init__(self, pool: ThreadPoolExecutor, **rates: float | None) -> None:
        self.engine = Engine()
        self.heard: list[NodeLink] = []
        self.news = threading.Semaphore(0)
        given: dict[str, Any] = {"uplink": None, "fabric": None, **rates}
        self.links = Links(
            "n0", "rack", **given, engine=cast(Fabric, self.engine), pool=pool, changed=self.hear
        )

    def hear(self, link: NodeLink) -> None:
        self.heard.append(link)
        self.news.release()


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadPoolExecutor]:
    monkeypatch.setattr(module, "PROBE_S", 0.01)
    with ThreadPoolExecutor(2) as pool:
        yield pool


def test_rates_are_measured_rounded_and_told_when_they_change(pool: ThreadPoolExecutor) -> None:
    told = Told(pool)
    assert told.links.link == NodeLink("n0", 1e9, 1e9, "rack")
    told.links.wrote(1 * MIB, 1e-6)
    assert told.heard == [], "too little to say anything"
    told.links.wrote(200 * MIB, 1.0)
    assert told.links.link.uplink_bytes_per_s == 2.1e8
    told.links.wrote(190 * MIB, 1.0)
    assert len(told.heard) == 1, "the best of the last ones is the same"
    told.links.pulled("tcp://n1:1", "job", [GOOD], 0.002)
    assert told.heard[-1].fabric_bytes_per_s == 4.2e9
    for _ in range(module.SAMPLES):
        told.links.wrote(50 * MIB, 1.0)
    assert told.links.link.uplink_bytes_per_s == 5.2e7


def test_a_given_rate_is_the_limit(pool: ThreadPoolExecutor) -> None:
    told = Told(pool, uplink=1e8, fabric=5e9)
    told.links.wrote(200 * MIB, 1.0)
    assert told.links.link.uplink_bytes_per_s == 1e8
    told.links.pulled("tcp://n1:1", "job", [GOOD], 0.01)
    assert told.links.link.fabric_bytes_per_s == 8.4e8, "the free share, not the port's rate"


def test_a_broken_fabric_is_left_out_until_a_probe_gets_through(pool: ThreadPoolExecutor) -> None:
    told = Told(pool)
    told.links.pulled("tcp://n1:1", "job", [Outcome(False, MISSING, 0)], 0.1)
    assert told.links.link.fabric_ok, "a chunk that is not there says nothing of the fabric"
    told.links.pulled("tcp://n1:1", "job", [GOOD, BROKEN], 0.1)
    assert not told.heard[-1].fabric_ok
    assert told.engine.probed.acquire(timeout=30)
    told.engine.works.set()
    for _ in range(2):
        assert told.news.acquire(timeout=30)
    assert told.links.link.fabric_ok


@pytest.mark.parametrize("reason", [MISSING, GONE, REFUSED, STOPPED])
def test_a_peer_that_gives_nothing_says_nothing_of_the_fabric(
    pool: ThreadPoolExecutor, reason: str
) -> None:
    told = Told(pool)
    none = Outcome(False, reason, 0)
    told.links.pulled("tcp://n1:1", "job", [none], 30.0)
    told.links.pulled("tcp://n1:1", "job", [GOOD, none], 30.0)
    assert told.heard == []
    assert told.links.link.fabric_ok
    assert told.links.link.fabric_bytes_per_s == 1e9, "the time went into waiting for the chunk"
    told.links.pulled("tcp://n1:1", "job", [GOOD, none, BROKEN], 30.0)
    assert not told.links.link.fabric_ok
    told.engine.works.set()


@pytest.mark.parametrize("reason", [GONE, REFUSED])
def test_a_peer_that_refuses_a_probe_has_been_reached(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    monkeypatch.setattr(module, "PROBES_MAX", 1_000_000)
    told = Told(pool)
    told.engine.reason = reason
    told.links.pulled("tcp://n1:1", "job", [BROKEN], 0.1)
    for _ in range(2):
        assert told.news.acquire(timeout=30)
    assert told.links.link.fabric_ok
    assert told.engine.probed.acquire(blocking=False)
    assert not told.engine.probed.acquire(blocking=False), "one probe is enough"


def test_another_peer_shows_that_the_fabric_works(pool: ThreadPoolExecutor) -> None:
    told = Told(pool)
    told.links.pulled("tcp://n1:1", "job", [BROKEN], 0.1)
    assert not told.links.link.fabric_ok
    told.links.pulled("tcp://n2:1", "job", [Outcome(True, "", 10)], 0.1)
    assert told.links.link.fabric_ok


def test_a_peer_that_lives_is_probed_where_another_one_is_silent(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PROBES_MAX", 1_000_000)
    told = Told(pool)
    for number in range(1 + module.PEERS_MAX):
        told.links.pulled(f"tcp://n{number}:1", "job", [Outcome(True, "", 10)], 0.1)
    told.links.pulled("tcp://n4:1", "job", [BROKEN], 0.1)
    assert told.news.acquire(timeout=30)
    told.engine.living.add("tcp://n0:1")
    assert not told.news.acquire(timeout=0.1), "only the last ones are probed"
    told.engine.living.add("tcp://n1:1")
    assert told.news.acquire(timeout=30)
    assert told.links.link.fabric_ok
    told.links.close()


def test_a_peer_that_is_gone_is_given_up(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PROBES_MAX", 2)
    told = Told(pool)
    told.links.pulled("tcp://n1:1", "job", [BROKEN], 0.1)
    for _ in range(2):
        assert told.news.acquire(timeout=30)
    assert told.links.link.fabric_ok


def test_no_probe_after_the_end(pool: ThreadPoolExecutor) -> None:
    told = Told(pool)
    told.links.close()
    told.links.pulled("tcp://n1:1", "job", [BROKEN], 0.1)
    assert told.links.link.fabric_ok
    assert not told.engine.probed.acquire(timeout=0.1)


def test_a_defect_in_a_probe_does_not_leave_the_fabric_out_for_ever(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told(pool)
    calls: list[str] = []
    probe = told.engine.probe

    def broken(address: str, *rest: Any) -> float:
        calls.append(address)
        if len(calls) == 1:
            raise RuntimeError("a defect")
        return probe(address, *rest)

    told.engine.works.set()
    told.engine.probe = broken  # type: ignore[method-assign]
    told.links.pulled("tcp://n1:1", "job", [BROKEN], 1.0)
    assert told.news.acquire(timeout=20)
    assert told.news.acquire(timeout=20)
    assert [link.fabric_ok for link in told.heard] == [False, True]
    assert len(calls) == 2
