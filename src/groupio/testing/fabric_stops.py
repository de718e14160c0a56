"""The part of the fabrics' conformance suite that ends pulls early."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest
from blake3 import blake3

from groupio.fabric.base import STOPPED, Fabric, Outcome, Stop
from groupio.testing.holdings import JOB, MIB, Holdings, eventually, soon, want


class StopTests:
    """Tests of every fabric; ``opened`` is the fixture of the suite."""

    def test_stop_ends_a_pull_that_waits(self, opened: Callable[..., Fabric]) -> None:
        holdings, chunk = Holdings(), b"never comes"
        digest: bytes = blake3(chunk).digest()
        holdings.expect(digest)
        here = want(holdings.put(b"here"), 4)
        address, fabric, stop = opened().serve(holdings), opened(), Stop()
        outcomes: list[Outcome] = []
        wants = [want(digest, len(chunk))]

        def pull() -> None:
            outcomes.extend(fabric.pull(address, JOB, wants, deadline=soon(300), stop=stop))

        thread = threading.Thread(target=pull)
        thread.start()
        eventually(lambda: bool(holdings.asked))
        stop.set()
        thread.join(timeout=60)
        assert outcomes == [Outcome(ok=False, error=STOPPED, bytes=0)]
        late = fabric.pull(address, JOB, [here], deadline=soon(300), stop=stop)
        assert late == [Outcome(ok=False, error=STOPPED, bytes=0)]
        assert fabric.pull(address, JOB, [here], deadline=soon())[0].ok

    @pytest.mark.parametrize("side", ["sends", "receives"])
    def test_stop_ends_a_pull_that_is_paused(
        self, opened: Callable[..., Fabric], side: str
    ) -> None:
        holdings, serving, fabric, stop = Holdings(), opened(), opened(), Stop()
        paused = serving if side == "sends" else fabric
        wants = [want(holdings.put(os.urandom(MIB)), MIB) for _ in range(64)]
        address = serving.serve(holdings)
        outcomes: list[Outcome] = []
        begun = threading.Event()

        def on_done(index: int, outcome: Outcome) -> None:
            paused.pace.set_share(0)
            begun.set()

        def pull() -> None:
            outcomes.extend(
                fabric.pull(address, JOB, wants, deadline=soon(300), on_done=on_done, stop=stop)
            )

        thread = threading.Thread(target=pull)
        thread.start()
        assert begun.wait(30)
        stop.set()
        thread.join(timeout=60)
        assert {outcome.error for outcome in outcomes} == {"", STOPPED}
        paused.pace.set_share(1)
        eventually(lambda: holdings.pinned == 0)
        assert fabric.pull(address, JOB, wants[:1], deadline=soon())[0].ok
