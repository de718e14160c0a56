"""The conformance suite of fabrics: subclass it, say how to open one, and run pytest.

::

    class TestMyFabric(FabricSuite):
        @staticmethod
        def open_fabric(*, token: bytes | None, pace: Pacer) -> Fabric:
            return MyFabric(token=token, pace=pace)

Fabrics of one test are nodes of one job, all on this machine. The class must be importable from
a new process by its module's name, since some tests kill the peer's process.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import pytest
from blake3 import blake3

from groupio.errors import InvalidInput
from groupio.fabric.base import (
    CLOSED,
    DEADLINE,
    DIGEST,
    GONE,
    MISSING,
    RANGE,
    REFUSED,
    Fabric,
    FabricFailed,
    Outcome,
    Want,
)
from groupio.fabric.pacing import Pacer
from groupio.model import CHUNK_BYTES
from groupio.testing.fabric_slow import SlowTests
from groupio.testing.fabric_stops import StopTests
from groupio.testing.holdings import JOB, MIB, TOKEN, Holdings, eventually, soon, want

SIZES = (0, 1, 63, 64, 4096, 65_535, 65_536, 65_537, MIB, MIB + 1, CHUNK_BYTES - 1, CHUNK_BYTES)


def serve_in_child(
    suite: type[FabricSuite], size: int, count: int, rate: float | None, pipe: Connection
) -> None:
    """Serve ``count`` chunks of ``size`` bytes at ``rate`` until this process is killed."""
    holdings = Holdings()
    digests = [holdings.put(random.Random(seed).randbytes(size)) for seed in range(count)]
    fabric = suite.open_fabric(token=TOKEN, pace=Pacer(rate))
    pipe.send((fabric.serve(holdings), digests))
    pipe.recv()


class FabricSuite(StopTests, SlowTests, abc.ABC):
    """Tests that every fabric passes; see the module for how to use them."""

    @staticmethod
    @abc.abstractmethod
    def open_fabric(*, token: bytes | None, pace: Pacer) -> Fabric:
        """A new fabric on a loopback address, of a node of its own."""

    @pytest.fixture
    def opened(self) -> Iterator[Callable[..., Fabric]]:
        """Opens fabrics; closes them at the end."""
        with contextlib.ExitStack() as stack:

            def open_one(*, token: bytes | None = TOKEN, rate: float | None = None) -> Fabric:
                return stack.enter_context(self.open_fabric(token=token, pace=Pacer(rate)))

            yield open_one

    @pytest.fixture
    def child(self) -> Iterator[Callable[..., tuple[BaseProcess, str, list[bytes]]]]:
        """Serves chunks from another process; kills it at the end."""
        processes: list[BaseProcess] = []

        def start(
            size: int, count: int, rate: float | None
        ) -> tuple[BaseProcess, str, list[bytes]]:
            spawning = multiprocessing.get_context("spawn")
            ours, theirs = spawning.Pipe()
            arguments = (type(self), size, count, rate, theirs)
            process = spawning.Process(target=serve_in_child, args=arguments, daemon=True)
            process.start()
            processes.append(process)
            assert ours.poll(30), "the child did not start in time"
            address, digests = ours.recv()
            self._pipes.append(ours)
            return process, address, digests

        self._pipes: list[Connection] = []
        yield start
        for process in processes:
            process.kill()
            process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()

    # Bytes

    def test_equal_bytes_of_all_sizes(self, opened: Callable[..., Fabric]) -> None:
        holdings, fabric = Holdings(), opened()
        chunks = [os.urandom(size) for size in SIZES]
        wants = [want(holdings.put(chunk), len(chunk)) for chunk in chunks]
        address = opened().serve(holdings)
        told: dict[int, Outcome] = {}
        outcomes = fabric.pull(address, JOB, wants, deadline=soon(), on_done=told.__setitem__)
        assert outcomes == [Outcome(ok=True, error="", bytes=size) for size in SIZES]
        assert [told[index] for index in range(len(wants))] == outcomes
        assert [bytes(w.into) for w in wants] == chunks
        eventually(lambda: holdings.pinned == 0)
        assert fabric.pull(address, JOB, [], deadline=soon()) == []

    def test_parts(self, opened: Callable[..., Fabric]) -> None:
        holdings, chunk = Holdings(), os.urandom(300_000)
        digest = holdings.put(chunk)
        spans = [(0, 300_000), (0, 1), (299_999, 1), (1000, 200_000), (300_000, 0)]
        wants = [want(digest, length, offset, whole=False) for offset, length in spans]
        outcomes = opened().pull(opened().serve(holdings), JOB, wants, deadline=soon())
        assert [outcome.error for outcome in outcomes] == [""] * len(spans)
        assert [bytes(w.into) for w in wants] == [chunk[lo : lo + n] for lo, n in spans]

    def test_huge_batch_keeps_its_order(self, opened: Callable[..., Fabric]) -> None:
        holdings = Holdings()
        chunks = [index.to_bytes(8, "little") * 8 for index in range(20_000)]
        wants = [want(holdings.put(chunk), 64) for chunk in chunks]
        absent = [blake3(bytes([index])).digest() for index in range(100)]
        mixed = wants[:9000] + [want(digest, 64) for digest in absent] + wants[9000:]
        outcomes = opened().pull(opened().serve(holdings), JOB, mixed, deadline=soon())
        assert [o.error for o in outcomes[9000:9100]] == [MISSING] * 100
        assert all(o.ok for o in outcomes[:9000] + outcomes[9100:])
        assert [bytes(w.into) for w in wants] == chunks

    def test_many_concurrent_pulls(self, opened: Callable[..., Fabric]) -> None:
        holdings = Holdings()
        chunks = [os.urandom(200_000 + index) for index in range(24)]
        digests = [holdings.put(chunk) for chunk in chunks]
        addresses = [opened().serve(holdings) for _ in range(2)]
        fabric = opened()
        wrong: list[object] = []

        def pull(seed: int) -> None:
            order = random.Random(seed).sample(range(24), 24)
            wants = [want(digests[index], len(chunks[index])) for index in order]
            outcomes = fabric.pull(addresses[seed % 2], JOB, wants, deadline=soon())
            wrong.extend(outcome for outcome in outcomes if not outcome.ok)
            wrong.extend(
                index
                for index, w in zip(order, wants, strict=True)
                if bytes(w.into) != chunks[index]
            )

        threads = [threading.Thread(target=pull, args=(seed,)) for seed in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert wrong == []
        eventually(lambda: holdings.pinned == 0)

    # Chunks that are not as asked for

    def test_missing_chunk_fails_alone_and_at_once(self, opened: Callable[..., Fabric]) -> None:
        holdings = Holdings()
        here = want(holdings.put(b"here"), 4)
        absent = want(blake3(b"absent").digest(), 6)
        start = time.monotonic()
        outcomes = opened().pull(
            opened().serve(holdings), JOB, [absent, here, absent], deadline=soon()
        )
        assert [outcome.error for outcome in outcomes] == [MISSING, "", MISSING]
        assert bytes(here.into) == b"here"
        assert time.monotonic() - start < 10

    def test_wrong_bytes_are_detected(self, opened: Callable[..., Fabric]) -> None:
        holdings = Holdings()
        chunk = bytearray(os.urandom(2 * MIB))
        digest: bytes = blake3(chunk).digest()
        chunk[-1] ^= 1
        holdings.put(bytes(chunk), digest)
        right = want(holdings.put(b"right"), 5)
        address, fabric = opened().serve(holdings), opened()
        for _ in range(2):
            wants = [want(digest, 2 * MIB), right]
            outcomes = fabric.pull(address, JOB, wants, deadline=soon())
            assert outcomes == [Outcome(ok=False, error=DIGEST, bytes=0), Outcome(True, "", 5)]

    def test_wrong_lengths_are_refused(self, opened: Callable[..., Fabric]) -> None:
        holdings = Holdings()
        digest = holdings.put(bytes(100))
        wants = [
            want(digest, 99),
            want(digest, 101),
            want(digest, 50, 51, whole=False),
            want(digest, 1, CHUNK_BYTES - 1, whole=False),
            want(digest, 100),
        ]
        outcomes = opened().pull(opened().serve(holdings), JOB, wants, deadline=soon())
        assert [outcome.error for outcome in outcomes] == [RANGE] * 4 + [""]
        eventually(lambda: holdings.pinned == 0)

    def test_impossible_wants_are_invalid(self, opened: Callable[..., Fabric]) -> None:
        fabric, address = opened(), opened().serve(Holdings())
        digest: bytes = blake3(b"").digest()
        memory = memoryview(bytearray(8))
        bad: Sequence[Want] = [
            Want(digest[:31], 0, 8, memory),
            Want(digest, -1, 8, memory, False),
            Want(digest, 1, 8, memory),
            Want(digest, 0, 7, memory),
            Want(digest, 0, 8, memoryview(bytes(8))),
            Want(digest, 0, 4, memory[::2]),
            Want(digest, CHUNK_BYTES, 8, memory, False),
        ]
        for one in bad:
            with pytest.raises(InvalidInput):
                fabric.pull(address, JOB, [one], deadline=soon())
        for job in ("", "j" * 256):
            with pytest.raises(InvalidInput):
                fabric.pull(address, job, [], deadline=soon())

    # Chunks on their way

    def test_expected_chunk_is_waited_for_and_stops_no_other(
        self, opened: Callable[..., Fabric]
    ) -> None:
        holdings, chunk = Holdings(), os.urandom(MIB)
        digest: bytes = blake3(chunk).digest()
        holdings.expect(digest)
        others = [want(holdings.put(bytes([index]) * 1000), 1000) for index in range(200)]
        wants = [want(digest, MIB), *others]
        done: list[int] = []

        def on_done(index: int, outcome: Outcome) -> None:
            done.append(index)
            if len(done) == len(others):
                holdings.put(chunk)

        outcomes = opened().pull(
            opened().serve(holdings), JOB, wants, deadline=soon(), on_done=on_done
        )
        assert all(outcome.ok for outcome in outcomes)
        assert done[-1] == 0
        assert bytes(wants[0].into) == chunk

    def test_chunk_that_is_given_up_is_missing(self, opened: Callable[..., Fabric]) -> None:
        holdings = Holdings()
        digests = [blake3(bytes([index])).digest() for index in range(2)]
        for digest in digests:
            holdings.expect(digest)
        timer = threading.Timer(0.1, holdings.give_up, [digests[0]])
        timer.start()
        start = time.monotonic()
        wants = [want(digest, 1) for digest in digests]
        outcomes = opened().pull(opened().serve(holdings), JOB, wants, deadline=soon(1.0))
        timer.join()
        assert outcomes[0].error == MISSING
        assert outcomes[1].error in (MISSING, DEADLINE)
        assert 0.5 < time.monotonic() - start < 5

    # Peers that fail

    def test_peer_dies_mid_transfer(
        self,
        opened: Callable[..., Fabric],
        child: Callable[..., tuple[BaseProcess, str, list[bytes]]],
    ) -> None:
        process, address, digests = child(256 << 10, 64, 16 * MIB)
        wants = [want(digest, 256 << 10) for digest in digests]
        start = time.monotonic()

        def on_done(index: int, outcome: Outcome) -> None:
            if outcome.ok and process.is_alive():
                process.kill()

        outcomes = opened().pull(address, JOB, wants, deadline=soon(), on_done=on_done)
        assert time.monotonic() - start < 15
        assert {outcome.error for outcome in outcomes} == {"", GONE}
        for index, (w, outcome) in enumerate(zip(wants, outcomes, strict=True)):
            if outcome.ok:
                assert bytes(w.into) == random.Random(index).randbytes(256 << 10)
        again = opened().pull(address, JOB, wants[:1], deadline=soon(5))
        assert again[0].error == GONE

    def test_stopped_peer_hits_the_deadline(
        self,
        opened: Callable[..., Fabric],
        child: Callable[..., tuple[BaseProcess, str, list[bytes]]],
    ) -> None:
        process, address, digests = child(CHUNK_BYTES, 2, 4 * MIB)
        assert process.pid is not None
        fabric = opened()
        small = want(digests[0], 100, 0, whole=False)
        assert fabric.pull(address, JOB, [small], deadline=soon())[0].ok
        os.kill(process.pid, signal.SIGSTOP)
        start = time.monotonic()
        wants = [want(digest, CHUNK_BYTES) for digest in digests]
        outcomes = fabric.pull(address, JOB, wants, deadline=soon(0.5))
        assert {outcome.error for outcome in outcomes} == {DEADLINE}
        assert 0.4 < time.monotonic() - start < 5
        os.kill(process.pid, signal.SIGCONT)
        outcomes = fabric.pull(address, JOB, wants, deadline=soon())
        assert all(outcome.ok for outcome in outcomes)

    def test_slow_peer_hits_the_deadline(self, opened: Callable[..., Fabric]) -> None:
        holdings = Holdings()
        wants = [want(holdings.put(os.urandom(CHUNK_BYTES)), CHUNK_BYTES) for _ in range(8)]
        slow = opened(rate=2 * MIB)
        start = time.monotonic()
        outcomes = opened().pull(slow.serve(holdings), JOB, wants, deadline=soon(0.5))
        assert DEADLINE in {outcome.error for outcome in outcomes} <= {DEADLINE, ""}
        assert 0.4 < time.monotonic() - start < 5
        slow.pace.set_rate(None)
        eventually(lambda: holdings.pinned == 0)

    def test_absent_peer_is_gone(self, opened: Callable[..., Fabric]) -> None:
        gone = opened()
        address = gone.serve(Holdings())
        gone.close()
        outcomes = opened().pull(address, JOB, [want(bytes(32), 1)], deadline=soon(5))
        assert outcomes[0].error == GONE
        with pytest.raises(FabricFailed) as error:
            opened().probe(address, JOB, 100, soon(5))
        assert error.value.reason == GONE

    # Who may ask for what

    @pytest.mark.parametrize(("theirs", "ours"), [(TOKEN, b"no"), (TOKEN, None), (None, TOKEN)])
    def test_wrong_token_is_refused(
        self,
        opened: Callable[..., Fabric],
        caplog: pytest.LogCaptureFixture,
        theirs: bytes | None,
        ours: bytes | None,
    ) -> None:
        holdings = Holdings()
        wants = [want(holdings.put(b"secret"), 6)]
        address = opened(token=theirs).serve(holdings)
        with caplog.at_level(logging.WARNING):
            outcomes = opened(token=ours).pull(address, JOB, wants, deadline=soon())
            eventually(lambda: "refused" in caplog.text)
        assert outcomes == [Outcome(ok=False, error=REFUSED, bytes=0)]
        assert bytes(wants[0].into) == b"\xee" * 6
        assert holdings.asked == []
        assert all(token.decode() not in caplog.text for token in (TOKEN,))
        with pytest.raises(FabricFailed, match=REFUSED):
            opened(token=ours).probe(address, JOB, 10, soon())

    def test_chunks_of_another_job_are_not_here(self, opened: Callable[..., Fabric]) -> None:
        holdings, fabric = Holdings(), opened()
        wants = [want(holdings.put(b"secret"), 6)]
        address = opened().serve(holdings)
        outcomes = fabric.pull(address, "other", wants, deadline=soon())
        assert outcomes == [Outcome(ok=False, error=MISSING, bytes=0)]
        assert bytes(wants[0].into) == b"\xee" * 6
        assert {job for job, _ in holdings.asked} == {"other"}
        assert fabric.pull(address, JOB, wants, deadline=soon())[0].ok

    # Pace

    @pytest.mark.parametrize("side", ["sends", "receives"])
    def test_pause_and_resume(self, opened: Callable[..., Fabric], side: str) -> None:
        holdings, serving, fabric = Holdings(), opened(), opened()
        paused = serving if side == "sends" else fabric
        wants = [want(holdings.put(os.urandom(MIB)), MIB) for _ in range(64)]
        address = serving.serve(holdings)
        done: list[int] = []

        def on_done(index: int, outcome: Outcome) -> None:
            done.append(index)
            if len(done) == 4:
                paused.pace.set_share(0)

        outcomes: list[Outcome] = []
        thread = threading.Thread(
            target=lambda: outcomes.extend(
                fabric.pull(address, JOB, wants, deadline=soon(), on_done=on_done)
            )
        )
        thread.start()
        eventually(lambda: len(done) >= 4)
        time.sleep(0.3)  # what the system had buffered arrives
        before = len(done)
        time.sleep(0.3)
        assert len(done) == before < len(wants)
        paused.pace.set_share(1)
        thread.join(timeout=30)
        assert len(outcomes) == len(wants)
        assert all(outcome.ok for outcome in outcomes)

    def test_rate_is_kept(self, opened: Callable[..., Fabric]) -> None:
        holdings, fabric = Holdings(), opened(rate=32 * MIB)
        wants = [want(holdings.put(os.urandom(MIB)), MIB) for _ in range(16)]
        address = opened().serve(holdings)
        start = time.monotonic()
        outcomes = fabric.pull(address, JOB, wants, deadline=soon())
        assert all(outcome.ok for outcome in outcomes)
        assert time.monotonic() - start > 0.35
        assert fabric.probe(address, JOB, 8 * MIB, soon()) < 48 * MIB

    # The end

    def test_close_while_serving(self, opened: Callable[..., Fabric]) -> None:
        holdings = Holdings()
        wants = [want(holdings.put(os.urandom(MIB)), MIB) for _ in range(32)]
        serving, fabric = opened(rate=16 * MIB), opened()
        address = serving.serve(holdings)
        timer = threading.Timer(0.3, serving.close)
        timer.start()
        start = time.monotonic()
        outcomes = fabric.pull(address, JOB, wants, deadline=soon())
        timer.join()
        assert GONE in {outcome.error for outcome in outcomes} <= {"", GONE}
        assert time.monotonic() - start < 10
        assert holdings.pinned == 0

    def test_close_while_pulling(self, opened: Callable[..., Fabric]) -> None:
        holdings, chunk = Holdings(), b"never comes"
        digest: bytes = blake3(chunk).digest()
        holdings.expect(digest)
        address, fabric = opened().serve(holdings), opened()
        timer = threading.Timer(0.3, fabric.close)
        timer.start()
        start = time.monotonic()
        outcomes = fabric.pull(address, JOB, [want(digest, len(chunk))], deadline=soon())
        timer.join()
        assert outcomes[0].error == CLOSED
        assert time.monotonic() - start < 10
        fabric.close()
        outcomes = fabric.pull(address, JOB, [want(digest, len(chunk))], deadline=soon())
        assert outcomes[0].error == CLOSED
        with pytest.raises(InvalidInput):
            fabric.serve(holdings)

    def test_jobs_with_tokens_of_their_own(self, opened: Callable[..., Fabric]) -> None:
        """Who knows the token of one job gets the chunks of that job only."""
        holdings, chunk = Holdings(), os.urandom(1000)
        wants = [want(holdings.put(chunk), 1000)]
        serving, fabric, stranger = (opened(token=None) for _ in range(3))
        address = serving.serve(holdings)

        def error(one: Fabric, job: str = JOB) -> str:
            return one.pull(address, job, wants, deadline=soon())[0].error

        assert error(stranger) == error(fabric) == REFUSED, "no token is no key that all have"
        serving.trust(JOB, TOKEN)
        serving.trust("theirs", b"their token")
        stranger.trust(JOB, b"their token")
        stranger.trust("theirs", b"their token")
        fabric.trust(JOB, TOKEN)
        assert error(stranger) == error(stranger, "unknown") == REFUSED
        assert error(fabric, "theirs") == REFUSED
        assert error(fabric) == ""
        assert bytes(wants[0].into) == chunk
        assert error(stranger, "theirs") != REFUSED

    def test_changed_token_of_a_job(self, opened: Callable[..., Fabric]) -> None:
        holdings = Holdings()
        wants = [want(holdings.put(b"x"), 1)]
        serving, old, new = opened(), opened(), opened(token=None)
        address = serving.serve(holdings)
        serving.trust(JOB, b"changed")
        new.trust(JOB, b"changed")
        assert old.pull(address, JOB, wants, deadline=soon())[0].error == REFUSED
        assert new.pull(address, JOB, wants, deadline=soon())[0].ok

    def test_serves_once(self, opened: Callable[..., Fabric]) -> None:
        fabric = opened()
        fabric.serve(Holdings())
        with pytest.raises(InvalidInput):
            fabric.serve(Holdings())

    def test_nothing_leaks(self) -> None:
        def once() -> None:
            holdings = Holdings()
            here = holdings.put(os.urandom(MIB))
            with (
                self.open_fabric(token=TOKEN, pace=Pacer()) as serving,
                self.open_fabric(token=TOKEN, pace=Pacer()) as fabric,
                self.open_fabric(token=b"no", pace=Pacer()) as stranger,
            ):
                address = serving.serve(holdings)
                for _ in range(10):
                    wants = [want(here, MIB), want(bytes(32), 5)]
                    fabric.pull(address, JOB, wants, deadline=soon())
                    stranger.pull(address, JOB, wants, deadline=soon())
                fabric.pull(address, JOB, wants, deadline=soon(0))
                serving.close()
                fabric.pull(address, JOB, wants, deadline=soon(5))
            assert holdings.pinned == 0

        once()  # what the first use of a library keeps for good is no leak
        fds, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
        once()
        once()
        eventually(lambda: threading.active_count() <= threads)
        eventually(lambda: len(os.listdir("/proc/self/fd")) <= fds)
