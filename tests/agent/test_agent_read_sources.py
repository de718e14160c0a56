"""Chunks that a read pulls from the agents of other nodes."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from blake3 import blake3

from groupio.agent import read_sources
from groupio.agent.read_sources import Part, PeerSource
from groupio.fabric.base import Want
from groupio.fabric.pacing import Pacer
from groupio.fabric.tcp import TcpFabric
from groupio.testing.holdings import JOB, MIB, TOKEN, Holdings, eventually


def test_a_read_that_ends_waits_for_no_pull(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_sources, "PULL_S", 300.0)
    holdings, chunk = Holdings(), b"never comes"
    digest = blake3(chunk).digest()
    holdings.expect(digest)
    epoch = SimpleNamespace(
        table=SimpleNamespace(lengths=np.full(2, len(chunk))), digest=lambda row: digest
    )
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def hear(source: str, rows: Sequence[int], why: str) -> None:
        told.put((source, list(rows), why))

    with TcpFabric(token=TOKEN) as serving, TcpFabric(token=TOKEN) as fabric:
        address = serving.serve(holdings)
        source = PeerSource("n1", cast(Any, epoch), JOB, fabric, address, hear)
        for row in range(2):
            source.pull([Part(row, 0, len(chunk), memoryview(bytearray(len(chunk))))])
            eventually(lambda: bool(holdings.asked))
        source.close()
        ended = [told.get(timeout=60) for _ in range(2)]
        assert sorted(ended) == [("n1", [0], "lost"), ("n1", [1], "lost")]


def test_a_slow_peer_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_sources, "PULL_S", 0.5)
    holdings, size = Holdings(), 256 << 10
    digests = [holdings.put(random.Random(row).randbytes(size)) for row in range(16)]
    epoch = SimpleNamespace(
        table=SimpleNamespace(lengths=np.full(len(digests), size)), digest=digests.__getitem__
    )
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def hear(source: str, rows: Sequence[int], why: str) -> None:
        told.put((list(rows), why))

    slow = TcpFabric(token=TOKEN, pace=Pacer(2.0 * MIB))
    with slow as serving, TcpFabric(token=TOKEN) as fabric:
        source = PeerSource("n1", cast(Any, epoch), JOB, fabric, serving.serve(holdings), hear)
        parts = [Part(row, 0, size, memoryview(bytearray(size))) for row in range(len(digests))]
        source.pull(parts)
        ended = [told.get(timeout=60) for _ in parts]
        assert sorted(ended) == [([row], "") for row in range(len(digests))]
        source.close()


def test_without_a_thread_what_is_pulled_counts_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    fabric: Any = None
    epoch: Any = None
    source = PeerSource("n1", epoch, JOB, fabric, "tcp://h:1", lambda *what: told.append(what))

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    for row in range(2):
        source.pull([Part(row, 0, 1, memoryview(bytearray(1)))])
    assert told == [("n1", [0], "lost"), ("n1", [1], "lost")]
    # Another pull that is under way takes them.
    source._active = 1
    source.pull([Part(2, 0, 1, memoryview(bytearray(1)))])
    assert len(told) == 2
    assert [part.row for part in source._waiting] == [2]


def test_a_pull_goes_on_with_the_streams_that_it_can_have(monkeypatch: pytest.MonkeyPatch) -> None:
    holdings, size = Holdings(), 4 * MIB
    digests = [holdings.put(random.Random(row).randbytes(size)) for row in range(4)]
    with TcpFabric(token=TOKEN) as serving, TcpFabric(token=TOKEN) as fabric:
        address = serving.serve(holdings)
        real = threading.Thread.start

        def start(thread: threading.Thread) -> None:
            if thread.name == "fabric-pull":
                raise RuntimeError("can't start new thread")
            real(thread)

        monkeypatch.setattr(threading.Thread, "start", start)
        wants = [Want(digest, 0, size, memoryview(bytearray(size))) for digest in digests]
        outcomes = fabric.pull(address, JOB, wants, deadline=time.monotonic() + 60)
        assert all(outcome.ok for outcome in outcomes)
