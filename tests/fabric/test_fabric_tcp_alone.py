"""What only the TCP fabric can get wrong: frames, limits, connections, addresses."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from blake3 import blake3

from groupio.bench import fabric as bench
from groupio.errors import InvalidInput
from groupio.fabric import frames
from groupio.fabric.auth import key_of, prove_client, prove_server
from groupio.fabric.base import (
    DEADLINE,
    DIGEST,
    LOST,
    MISSING,
    STOPPED,
    FabricFailed,
    Outcome,
    Served,
    Stop,
    Want,
)
from groupio.fabric.pacing import Pacer
from groupio.fabric.serving import Outbox, Row
from groupio.fabric.stream import (
    BUFFER_BYTES,
    LOWER_EFFORT,
    Stream,
    format_address,
    parse_address,
    tune,
)
from groupio.fabric.tcp import TcpFabric
from groupio.model import CHUNK_BYTES
from groupio.testing.holdings import JOB, MIB, TOKEN, Holdings, eventually, soon, want


@contextlib.contextmanager
def serving(holdings: Holdings, **options: Any) -> Iterator[tuple[TcpFabric, str]]:
    """A fabric that serves ``holdings``, and its address."""
    with TcpFabric(token=TOKEN, **options) as fabric:
        yield fabric, fabric.serve(holdings)


def dial(address: str, key: bytes = key_of(TOKEN), job: str = JOB) -> Stream:
    """A connection to ``address`` that is past its handshake."""
    sock = socket.create_connection(parse_address(address))
    stream = Stream(sock, Pacer(), soon(10))
    prove_client(stream, key, job)
    return stream


class Liar:
    """A server that knows the token and says what the test makes it say, once."""

    def __init__(self, *says: bytes) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = format_address(*self._listener.getsockname())
        self._says = says
        self._thread = threading.Thread(target=self._talk)
        self._thread.start()

    def _talk(self) -> None:
        sock, _ = self._listener.accept()
        stream = Stream(sock, Pacer(), soon(10))
        try:
            prove_server(stream, lambda job: key_of(TOKEN))
            stream.receive(frames.REQUEST.size + frames.WANT.size)
            for message in self._says:
                stream.send(message)
            with contextlib.suppress(ConnectionError):
                stream.receive(1)
        finally:
            stream.close()

    def __enter__(self) -> str:
        return self.address

    def __exit__(self, *_: object) -> None:
        self._thread.join(timeout=10)
        self._listener.close()


@pytest.mark.parametrize(
    "answer",
    [
        frames.ANSWER.pack(frames.OK, 1, 8),  # a tag that was not asked for
        frames.ANSWER.pack(frames.OK, 0, 9) + bytes(9),  # more bytes than were asked for
        frames.ANSWER.pack(frames.OK, 0, 4_000_000_000),
        frames.ANSWER.pack(frames.MISSING, 0, 8) + bytes(8),
        frames.ANSWER.pack(77, 0, 0),
        b"HTTP/1.1 200 OK\r\n" + bytes(100),
    ],
)
def test_liar_never_writes_past_a_want(answer: bytes) -> None:
    memory = memoryview(bytearray(b"\xee" * 24))
    one = Want(blake3(b"12345678").digest(), 0, 8, memory[8:16])
    with Liar(answer) as address, TcpFabric(token=TOKEN) as fabric:
        outcomes = fabric.pull(address, JOB, [one], deadline=soon(5))
    assert outcomes[0].error == LOST
    assert bytes(memory) == b"\xee" * 24


def test_part_with_a_wrong_digest_is_detected() -> None:
    one = want(blake3(b"whatever").digest(), 8, whole=False)
    says = frames.ANSWER.pack(frames.OK, 0, 8) + b"12345678"
    for digest, error in ((blake3(b"12345678").digest(), ""), (bytes(32), DIGEST)):
        with Liar(says + digest) as address, TcpFabric(token=TOKEN) as fabric:
            assert fabric.pull(address, JOB, [one], deadline=soon(5))[0].error == error


def test_liar_that_answers_twice_is_dropped() -> None:
    says = frames.ANSWER.pack(frames.MISSING, 0, 0)
    with Liar(says * 2) as address, TcpFabric(token=TOKEN) as fabric:
        assert fabric.pull(address, JOB, [want(bytes(32), 8)], deadline=soon(5))[0].error == MISSING
        # Its connection said something unasked and is not used again; a new one is not accepted.
        outcomes = fabric.pull(address, JOB, [want(bytes(32), 8)], deadline=soon(0.3))
        assert outcomes[0].error in (DEADLINE, LOST)


@pytest.mark.parametrize(
    "request_bytes",
    [
        frames.REQUEST.pack(frames.PULL, 0, 0, 0, 0),
        frames.REQUEST.pack(frames.PULL, frames.WANTS_MAX + 1, 0, 0, 0),
        frames.REQUEST.pack(frames.PULL, 2, frames.TAGS - 1, 0, 0),
        frames.REQUEST.pack(frames.PULL, 0xFFFFFFFF, 0, 0, 0),
        frames.REQUEST.pack(frames.PROBE, 0, 0, 0, frames.PROBE_BYTES_MAX + 1),
        frames.REQUEST.pack(9, 1, 0, 0, 0),
        b"\xff" * frames.REQUEST.size,
    ],
)
def test_request_over_the_limits_ends_its_connection_alone(request_bytes: bytes) -> None:
    holdings = Holdings()
    one = want(holdings.put(b"12345678"), 8)
    with serving(holdings) as (_, address), TcpFabric(token=TOKEN) as fabric:
        stream = dial(address)
        stream.send(request_bytes)
        with pytest.raises(ConnectionError):
            stream.receive(1)
        stream.close()
        assert fabric.pull(address, JOB, [one], deadline=soon(5))[0].ok


def test_strangers_are_logged_and_cannot_keep_others_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("groupio.fabric.serving.HANDSHAKE_S", 0.3)
    monkeypatch.setattr("groupio.fabric.serving.STRANGERS_MAX", 4)
    holdings = Holdings()
    one = want(holdings.put(b"12345678"), 8)
    with serving(holdings) as (_, address), TcpFabric(token=TOKEN) as fabric:
        silent = [socket.create_connection(parse_address(address)) for _ in range(6)]
        for sock in silent:
            sock.settimeout(5)
            assert sock.recv(1) == b""
        said = "refused a data connection from "
        eventually(lambda: said in caplog.text)
        names = [format_address(*sock.getsockname()) for sock in silent]
        assert any(said + name in caplog.text for name in names)
        assert fabric.pull(address, JOB, [one], deadline=soon(5))[0].ok
        for sock in silent:
            sock.close()
        assert caplog.text.count(said) == 1, "the log is not theirs to fill"


def test_connections_are_kept_and_survive_a_restart_of_the_peer() -> None:
    holdings = Holdings()
    one = want(holdings.put(b"12345678"), 8)
    with TcpFabric(token=TOKEN) as fabric:
        with serving(holdings) as (first, address):
            for _ in range(5):
                assert fabric.pull(address, JOB, [one], deadline=soon(5))[0].ok
            assert first._server is not None
            assert len(first._server._streams) == 1
            port = parse_address(address)[1]
        with serving(holdings, port=port) as (_, again):
            assert again == address
            assert fabric.pull(address, JOB, [one], deadline=soon(5))[0].ok


def test_large_pull_uses_all_streams_and_no_more() -> None:
    holdings = Holdings()
    wants = [want(holdings.put(os.urandom(MIB)), MIB) for _ in range(24)]
    with (
        serving(holdings, pace=Pacer(64.0 * MIB)) as (server, address),
        TcpFabric(token=TOKEN, streams=3) as fabric,
    ):
        threads = [
            threading.Thread(target=fabric.pull, args=(address, JOB, wants), kwargs=kwargs)
            for kwargs in ({"deadline": soon(20)}, {"deadline": soon(20)})
        ]
        for thread in threads:
            thread.start()
        assert server._server is not None
        streams = server._server._streams
        most = 0
        while any(thread.is_alive() for thread in threads):
            most = max(most, len(streams))
            time.sleep(0.002)
        # Each pull has one stream in any case, and all together three more at most: not six.
        assert 3 <= most <= 5
        assert [bytes(w.into) for w in wants] == [holdings._chunks[w.digest] for w in wants]


def test_trouble_of_the_provider_is_that_of_one_chunk(caplog: pytest.LogCaptureFixture) -> None:
    class Troubled(Holdings):
        def find(self, job: str, digest: bytes, wait_s: float) -> Served | None:
            if digest == bytes(32):
                raise RuntimeError("the arena is gone")
            return super().find(job, digest, wait_s)

    holdings = Troubled()
    one = want(holdings.put(b"12345678"), 8)
    with serving(holdings) as (_, address), TcpFabric(token=TOKEN) as fabric:
        outcomes = fabric.pull(address, JOB, [want(bytes(32), 8), one], deadline=soon(5))
    assert [outcome.error for outcome in outcomes] == [MISSING, ""]
    assert "the arena is gone" in caplog.text


def test_chunks_behind_many_expected_ones_come() -> None:
    """More chunks are on their way than the server looks at in a row, and the last one is here."""
    holdings = Holdings()
    absent = [blake3(bytes([index])).digest() for index in range(150)]
    for digest in absent:
        holdings.expect(digest)
    here = want(holdings.put(b"12345678"), 8)
    wants = [*(want(digest, 1) for digest in absent), here]

    def on_done(index: int, outcome: Outcome) -> None:
        if index == 150:
            for number in range(150):
                holdings.put(bytes([number]))

    with serving(holdings) as (_, address), TcpFabric(token=TOKEN) as fabric:
        outcomes = fabric.pull(address, JOB, wants, deadline=soon(10), on_done=on_done)
    assert all(outcome.ok for outcome in outcomes)


def test_data_sockets_are_of_the_lowest_priority() -> None:
    with serving(Holdings()) as (server, address):
        stream = dial(address)
        assert server._server is not None
        tune(stream._sock)
        end = time.monotonic() + 10
        # The dialling end does not wait for the thread that takes the connection in.
        while not server._server._streams and time.monotonic() < end:
            time.sleep(0.001)
        (theirs,) = server._server._streams
        for sock in (stream._sock, theirs._sock):
            assert sock.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) == LOWER_EFFORT
        stream.close()


def test_probe_measures_the_paced_rate() -> None:
    with (
        serving(Holdings(), pace=Pacer(20.0 * MIB)) as (_, address),
        TcpFabric(token=TOKEN) as fabric,
    ):
        rate = fabric.probe(address, JOB, 8 * MIB, soon(20))
        assert 10 * MIB < rate < 30 * MIB
        with pytest.raises(FabricFailed) as error:
            fabric.probe(address, JOB, 64 * MIB, soon(0.2))
        assert error.value.reason == DEADLINE
        assert fabric.probe(address, JOB, 1, soon(20)) > 0


def test_ipv6() -> None:
    holdings = Holdings()
    one = want(holdings.put(b"12345678"), 8)
    with serving(holdings, host="::1") as (_, address), TcpFabric(token=TOKEN) as fabric:
        assert address.startswith("tcp://[::1]:")
        assert fabric.pull(address, JOB, [one], deadline=soon(5))[0].ok


def test_no_listening_beyond_loopback_without_a_token() -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1"):
        fabric = TcpFabric(host=host, announce="node")
        with fabric, pytest.raises(InvalidInput, match="token"):
            fabric.serve(Holdings())
    with TcpFabric(host="localhost") as fabric:
        assert fabric.serve(Holdings()).startswith("tcp://")


def test_wildcard_needs_a_name_to_announce() -> None:
    fabric = TcpFabric(host="0.0.0.0", token=TOKEN)
    with fabric, pytest.raises(InvalidInput, match="say which address"):
        fabric.serve(Holdings())
    with TcpFabric(host="0.0.0.0", announce="127.0.0.1", token=TOKEN) as fabric:
        holdings = Holdings()
        address = fabric.serve(holdings)
        one = want(holdings.put(b"12345678"), 8)
        assert fabric.pull(address, JOB, [one], deadline=soon(5))[0].ok


@pytest.mark.parametrize(
    "address",
    ["", "tcp://", "tcp://host", "tcp://host:0", "tcp://host:99999", "host:1", "http://host:1",
     "tcp://u@host:1", "tcp://host:1/path", "tcp://[::1", f"tcp://{'a' * 64}:1", "tcp://a\0:1"],
)  # fmt: skip
def test_bad_addresses_are_invalid(address: str) -> None:
    with TcpFabric() as fabric, pytest.raises(InvalidInput, match="address"):
        fabric.pull(address, JOB, [], deadline=soon())


def test_bad_options_are_invalid() -> None:
    for options in ({"streams": 0}, {"streams": 17}, {"token": b""}):
        with pytest.raises(InvalidInput):
            TcpFabric(**options)
    with TcpFabric() as fabric:
        for nbytes in (0, frames.PROBE_BYTES_MAX + 1):
            with pytest.raises(InvalidInput):
                fabric.probe("tcp://127.0.0.1:1", JOB, nbytes, soon())


def test_name_that_is_no_host_is_lost() -> None:
    with TcpFabric() as fabric:
        outcomes = fabric.pull("tcp://no.such.host.invalid:1", JOB, [want(bytes(32), 1)],
                               deadline=soon(20))  # fmt: skip
        assert outcomes[0].error == LOST


def test_stop_ends_a_handshake_and_a_wait_for_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("groupio.fabric.peers.BUSY_MAX", 1)
    monkeypatch.setattr("groupio.fabric.peers.CONNECT_S", 300.0)
    stops, results, threads = [Stop(), Stop()], list[Outcome](), []
    with socket.create_server(("127.0.0.1", 0)) as silent, TcpFabric(token=TOKEN) as fabric:
        address = format_address(*silent.getsockname())

        def pull(stop: Stop) -> None:
            one = want(bytes(32), 8)
            results.extend(fabric.pull(address, JOB, [one], deadline=soon(300), stop=stop))

        for stop in stops:
            threads.append(threading.Thread(target=pull, args=(stop,)))
            threads[-1].start()
            eventually(lambda: bool(fabric._peers._used))  # the second one waits for its turn
        time.sleep(0.1)
        for stop, thread in zip(reversed(stops), reversed(threads), strict=True):
            stop.set()
            thread.join(timeout=60)
        assert [outcome.error for outcome in results] == [STOPPED] * 2


def test_connection_ends_before_the_memory_of_a_stuck_send_is_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("groupio.fabric.serving.HOLD_S", 0.3)
    ended: list[bool] = []

    class Watched(Holdings):
        def _release(self) -> None:
            assert fabric._server is not None
            ended.extend(stream.is_shut for stream in fabric._server._streams)
            super()._release()

    holdings = Watched()
    digest = holdings.put(bytes(CHUNK_BYTES))
    with serving(holdings) as (fabric, address), socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        sock.connect(parse_address(address))
        stream = Stream(sock, Pacer(), soon(60))
        prove_client(stream, key_of(TOKEN), JOB)
        request = frames.REQUEST.pack(frames.PULL, 1, 0, frames.WAIT_MS_MAX, 0)
        stream.send(request + frames.WANT.pack(digest, 0, CHUNK_BYTES, 1))
        eventually(lambda: ended == [True])
        assert holdings.pinned == 0


def test_a_client_that_reads_slowly_keeps_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("groupio.fabric.serving.HOLD_S", 1.0)
    holdings = Holdings()
    chunk = os.urandom(CHUNK_BYTES)
    digest = holdings.put(chunk)
    with serving(holdings) as (_, address), socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        sock.connect(parse_address(address))
        stream = Stream(sock, Pacer(), soon(60))
        prove_client(stream, key_of(TOKEN), JOB)
        # The answer takes longer than any of the waits that the server knows of.
        request = frames.REQUEST.pack(frames.PULL, 1, 0, 100, 0)
        stream.send(request + frames.WANT.pack(digest, 0, CHUNK_BYTES, 1))
        stream.receive(frames.ANSWER.size)
        got = bytearray()
        while len(got) < CHUNK_BYTES:
            got += stream.receive(BUFFER_BYTES)
            time.sleep(0.03 if holdings.pinned else 0)
        assert got == chunk


def test_memory_comes_back_from_a_client_that_takes_a_little_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("groupio.fabric.serving.HOLD_S", 0.5)
    monkeypatch.setattr("groupio.fabric.serving.HOLD_MAX_S", 1.0)
    holdings = Holdings()
    digest = holdings.put(bytes(CHUNK_BYTES))
    with serving(holdings) as (_, address), socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 10)
        sock.connect(parse_address(address))
        stream = Stream(sock, Pacer(), soon(60))
        prove_client(stream, key_of(TOKEN), JOB)
        request = frames.REQUEST.pack(frames.PULL, 1, 0, frames.WAIT_MS_MAX, 0)
        stream.send(request + frames.WANT.pack(digest, 0, CHUNK_BYTES, 1))
        eventually(lambda: holdings.pinned == 1)
        began = time.monotonic()
        while holdings.pinned:
            sock.recv(2 << 10)
            time.sleep(0.05)
            assert time.monotonic() - began < 8
        assert time.monotonic() - began > 0.7


def test_chunk_that_finds_a_broken_connection_is_released() -> None:
    class Broken:
        def within(self, seconds: float, most_s: float) -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext()

        def send_paced(self, views: object) -> None:
            raise ConnectionResetError("the peer is gone")

    outbox = Outbox(cast(Stream, Broken()))
    lent: set[int] = set()

    def send() -> None:
        for tag in range(1000):
            lent.add(tag)
            served = Served(memoryview(b"x"), partial(lent.remove, tag))
            outbox.add(Row(tag, bytes(32), 0, 1, True), served)

    with pytest.raises(ConnectionResetError):
        send()
    outbox.release()
    assert not lent


def test_too_many_pulls_from_one_peer_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("groupio.fabric.peers.BUSY_MAX", 1)
    holdings, chunk = Holdings(), b"12345678"
    digest = blake3(chunk).digest()
    holdings.expect(digest)
    here = want(holdings.put(b"here"), 4)
    with serving(holdings) as (_, address), TcpFabric(token=TOKEN) as fabric:
        results: list[Outcome] = []
        thread = threading.Thread(
            target=lambda: results.extend(
                fabric.pull(address, JOB, [want(digest, 8)], deadline=soon(10))
            )
        )
        thread.start()
        eventually(lambda: bool(holdings.asked))
        assert fabric.pull(address, JOB, [here], deadline=soon(0.2))[0].error == DEADLINE
        holdings.put(chunk)
        assert fabric.pull(address, JOB, [here], deadline=soon(10))[0].ok
        thread.join()
        assert results[0].ok


def test_bench_measures(tmp_path: Path) -> None:
    target = tmp_path / "fabric.json"
    bench.main(["--json", str(target), "--chunks", "2", "--passes", "1", "--turns", "2"])
    result = json.loads(target.read_text())
    assert result["bytes"] == 2 * CHUNK_BYTES
    assert result["ratio_with_digests"] > 0
    assert result["ratio_without_digests"] > 0


def test_bench_figures() -> None:
    seconds = {"raw": [1.0, 2.0], "without_digests": [1.25], "with_digests": [2.0],
               "hash_one_core": [0.5]}  # fmt: skip
    cpu = {"raw": [1.5], "without_digests": [2.0], "with_digests": [2.5], "hash_one_core": [0.5]}
    result = bench.figures(1000, 2, seconds, cpu)
    assert result["ratio_without_digests"] == pytest.approx(0.8)
    assert result["allowed_bytes_per_s"] == pytest.approx(1000)
    assert result["ratio_with_digests"] == pytest.approx(0.5)
    assert result["cpu_ratio_with_digests"] == pytest.approx(0.8)
    cpu["raw"] = [2.0]
    assert bench.figures(1000, 2, seconds, cpu)["allowed_bytes_per_s"] == pytest.approx(800)
