"""The part of the fabrics' conformance suite about slow links and peers that stand still."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess

import pytest
from blake3 import blake3

from groupio.fabric.base import DEADLINE, Fabric, Outcome
from groupio.testing.holdings import JOB, MIB, Holdings, soon, want

SLOW_BYTES_PER_S = 2.0 * MIB
PATIENCE_S = 1.0


class SlowTests:
    """Tests of every fabric; ``opened`` and ``child`` are fixtures of the suite."""

    def test_a_pull_that_goes_on_is_never_late(self, opened: Callable[..., Fabric]) -> None:
        holdings = Holdings()
        wants = [want(holdings.put(os.urandom(256 << 10)), 256 << 10) for _ in range(24)]
        slow = opened(rate=SLOW_BYTES_PER_S)
        start = time.monotonic()
        outcomes = opened().pull(
            slow.serve(holdings), JOB, wants, deadline=soon(PATIENCE_S), patience_s=PATIENCE_S
        )
        assert {outcome.error for outcome in outcomes} == {""}
        assert time.monotonic() - start > 2 * PATIENCE_S, "the link was not slow"

    def test_a_peer_that_is_too_slow_is_given_up(
        self, opened: Callable[..., Fabric], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("groupio.fabric.pulling.SLOWEST_BYTES_PER_S", 1e3 * SLOW_BYTES_PER_S)
        holdings = Holdings()
        wants = [want(holdings.put(os.urandom(256 << 10)), 256 << 10) for _ in range(24)]
        slow = opened(rate=SLOW_BYTES_PER_S)
        outcomes = opened().pull(
            slow.serve(holdings), JOB, wants, deadline=soon(PATIENCE_S), patience_s=PATIENCE_S
        )
        assert {outcome.error for outcome in outcomes} == {"", DEADLINE}

    def test_own_pace_is_not_the_peers_fault(self, opened: Callable[..., Fabric]) -> None:
        holdings = Holdings()
        wants = [want(holdings.put(os.urandom(256 << 10)), 256 << 10) for _ in range(16)]
        slow, address = opened(rate=SLOW_BYTES_PER_S), opened().serve(holdings)
        outcomes = slow.pull(address, JOB, wants, deadline=soon(0.5), patience_s=0.5)
        assert {outcome.error for outcome in outcomes} == {""}

    def test_a_chunk_that_does_not_come_ends_a_patient_pull(
        self, opened: Callable[..., Fabric]
    ) -> None:
        holdings = Holdings()
        digest: bytes = blake3(b"never comes").digest()
        holdings.expect(digest)
        wants = [want(holdings.put(b"here"), 4), want(digest, 11)]
        start = time.monotonic()
        outcomes = opened().pull(
            opened().serve(holdings), JOB, wants, deadline=soon(0.5), patience_s=0.5
        )
        assert [outcome.ok for outcome in outcomes] == [True, False]
        assert 0.3 < time.monotonic() - start < 5

    def test_a_peer_that_stops_ends_a_patient_pull(
        self,
        opened: Callable[..., Fabric],
        child: Callable[..., tuple[BaseProcess, str, list[bytes]]],
    ) -> None:
        process, address, digests = child(256 << 10, 64, 16.0 * MIB)
        pid = process.pid
        assert pid is not None
        stopped_at: list[float] = []

        def on_done(index: int, outcome: Outcome) -> None:
            if outcome.ok and not stopped_at:
                os.kill(pid, signal.SIGSTOP)
                stopped_at.append(time.monotonic())

        wants = [want(digest, 256 << 10) for digest in digests]
        outcomes = opened().pull(
            address, JOB, wants, deadline=soon(1.0), patience_s=1.0, on_done=on_done
        )
        assert {outcome.error for outcome in outcomes} == {"", DEADLINE}
        assert 0.8 < time.monotonic() - stopped_at[0] < 10
