"""Chunks that a read pulls from the agents of other nodes."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from blake3 import blake3

from groupio.agent import read_sources
from groupio.agent.read_sources import Part, PeerSource
from groupio.fabric.tcp import TcpFabric
from groupio.testing.holdings import JOB, TOKEN, Holdings, eventually


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
