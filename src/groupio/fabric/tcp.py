"""The fabric that every node has: plain TCP, straight between the memories of two agents.

A pull is cut into batches; a few streams take batches in turn, so a slow stream gets less to do.
Each stream asks for the next batch before the last one has come, receives into the memory of the
wants and hashes each piece right after it came, while the system receives the next one.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence

from blake3 import blake3

from groupio.errors import GroupAborted, InvalidInput
from groupio.exhaustion import start_some
from groupio.fabric import frames
from groupio.fabric.auth import PROOF_BYTES, JobKeys, Refused
from groupio.fabric.base import (
    CLOSED,
    DEADLINE,
    DIGEST,
    GONE,
    LOST,
    MISSING,
    RANGE,
    REFUSED,
    STOPPED,
    Fabric,
    FabricFailed,
    Outcome,
    Provider,
    Stop,
    Want,
    check_wants,
    failed,
)
from groupio.fabric.pacing import Pacer
from groupio.fabric.peers import Peer, Peers
from groupio.fabric.pulling import Pull, ask, wait_ms
from groupio.fabric.serving import Server
from groupio.fabric.stream import (
    PIECE_BYTES,
    Stream,
    format_address,
    is_loopback,
    parse_address,
)

STREAMS = 2
"""Streams to one peer that a pull uses at most."""

STREAMS_MAX = 16

_STATUS_ERRORS = {frames.MISSING: MISSING, frames.RANGE: RANGE}

log = logging.getLogger(__name__)


class TcpFabric(Fabric):
    """TCP between agents; see the module.

    ``host`` and ``port`` (0: any) are listened on, ``announce`` is the host name or address that
    peers are told (default: ``host``). ``token`` is the secret of all jobs; all peers need the
    same. Without one, only loopback addresses may be listened on, and each job needs its own
    (:meth:`trust`). ``verify`` False leaves out the digests, which only measurements may do.
    """

    name = "tcp"

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        announce: str | None = None,
        token: bytes | None = None,
        pace: Pacer | None = None,
        streams: int = STREAMS,
        verify: bool = True,
    ) -> None:
        if not 1 <= streams <= STREAMS_MAX:
            raise InvalidInput(f"the fabric has {streams} streams; give 1 to {STREAMS_MAX}")
        if token is not None and not token:
            raise InvalidInput("the job's token is empty; give a random one, or none at all")
        self.pace = pace or Pacer()
        self._host, self._port, self._announce = host, port, announce
        self._has_token = token is not None
        self._keys = JobKeys(token)
        self._streams = streams
        self._verify = verify
        self._peers = Peers(self._keys, self.pace, streams)
        self._server: Server | None = None

    def trust(self, job: str, token: bytes) -> None:
        """See ``Fabric``."""
        self._keys.add(job, token)

    def serve(self, provider: Provider) -> str:
        """See ``Fabric``. Also InvalidInput for a wildcard address without ``announce``."""
        if self._server is not None or self._peers.closed:
            raise InvalidInput("this fabric serves already, or was closed")
        infos = socket.getaddrinfo(
            self._host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, _, _, _, target = infos[0]
        numeric = str(target[0])
        if not self._has_token and not is_loopback(numeric):
            raise InvalidInput(
                f"the fabric may not listen on {numeric} without a token, since anybody could "
                "read the job's memory; set GROUPIO_TOKEN or GROUPIO_TOKEN_FILE"
            )
        announced = self._announce or numeric
        if not self._announce and ipaddress.ip_address(numeric.partition("%")[0]).is_unspecified:
            raise InvalidInput(f"the fabric listens on {numeric}; say which address peers can use")
        listener = socket.create_server(target[:2], family=family, backlog=128)
        try:
            self._server = self._open_server(listener, provider)
        except GroupAborted:
            listener.close()
            raise
        return format_address(announced, listener.getsockname()[1])

    def pull(
        self,
        address: str,
        job: str,
        wants: Sequence[Want],
        *,
        deadline: float,
        patience_s: float = 0.0,
        on_done: Callable[[int, Outcome], None] | None = None,
        stop: Stop | None = None,
    ) -> list[Outcome]:
        """See ``Fabric``. Also InvalidInput for an address that is not ``tcp://host:port``."""
        parse_address(address)
        check_wants(job, wants)
        pull = Pull(wants, on_done, self._streams, patience_s, deadline)
        stop = stop or Stop()
        peer = (address, job)
        self._on_streams(
            len(pull.batches),
            lambda extra: self._pull_on_one(pull, peer, deadline, stop, extra=extra),
        )
        return pull.finish_all()

    def probe(self, address: str, job: str, nbytes: int, deadline: float) -> float:
        """See ``Fabric``; uses as many streams as a pull does."""
        parse_address(address)
        check_wants(job, ())
        if not 0 < nbytes <= frames.PROBE_BYTES_MAX:
            raise InvalidInput(f"a probe has 1 to {frames.PROBE_BYTES_MAX} bytes, not {nbytes}")
        peer = (address, job)
        shares = [
            nbytes // self._streams + (i < nbytes % self._streams) for i in range(self._streams)
        ]
        failures: list[str] = []
        spans: list[tuple[float, float]] = []
        shares = [share for share in shares if share]

        def probe_on_one(extra: bool) -> None:
            del extra
            try:
                spans.append(self._probe_on_one(peer, shares.pop(), deadline))
            except OSError as error:
                failures.append(self._reason(error))

        self._on_streams(len(shares), probe_on_one)
        if failures:
            raise FabricFailed(f"the probe of {address} failed: {failures[0]}", failures[0])
        seconds = max(end for _, end in spans) - min(start for start, _ in spans)
        return nbytes / max(seconds, 1e-9)

    def close(self) -> None:
        """See ``Fabric``."""
        self._peers.close()
        if self._server is not None:
            self._server.close()

    def _open_server(self, listener: socket.socket, provider: Provider) -> Server:
        return Server(listener, self._keys, provider, self.pace)

    # -- one stream ----------------------------------------------------------------------------

    def _on_streams(self, count: int, work: Callable[[bool], None]) -> None:
        """Run ``work(extra)`` in this thread and, if there is enough to do, in further ones."""
        threads = [
            threading.Thread(target=work, args=(True,), name="fabric-pull", daemon=True)
            for _ in range(min(self._streams, count) - 1)
        ]
        # Without its extra threads a pull is slower, no more.
        with contextlib.suppress(GroupAborted):
            del threads[start_some(threads) :]
        try:
            work(False)
        finally:
            for thread in threads:
                if thread.ident is not None:
                    thread.join()

    def _pull_on_one(
        self,
        pull: Pull,
        peer: Peer,
        deadline: float,
        stop: Stop,
        *,
        extra: bool,
    ) -> None:
        try:
            stream = self._peers.take(peer, deadline, stop, extra=extra)
        except OSError as error:
            # Without its extra streams a pull is slower, no more.
            if not extra:
                pull.reason = self._why(error, stop, "no data connection to %s: %s", peer)
            return
        if stream is None:
            return
        asked: list[tuple[int, int]] = []
        usable = False
        stream.be_patient(pull.patience_s, pull.latest)
        try:
            with stop.waking(stream.shut):
                self._converse(stream, pull, peer, asked)
            usable = not stream.is_shut
        except OSError as error:
            pull.reason = self._why(error, stop, "a pull from %s failed: %s", peer)
            pull.fail(asked)
        finally:
            self._peers.give(peer, stream, usable=usable)

    def _why(self, error: OSError, stop: Stop, what: str, peer: Peer) -> str:
        """The reason of a failed pull, which is logged unless the caller wanted it."""
        if stop.is_set:
            return STOPPED
        log.warning(what, peer[0], error)
        return self._reason(error)

    def _converse(
        self, stream: Stream, pull: Pull, peer: Peer, asked: list[tuple[int, int]]
    ) -> None:
        """Ask for batches and take their answers until none is left; ``asked`` are under way."""
        ask(stream, pull, asked)
        while asked:
            ask(stream, pull, asked)
            lo, hi = asked[0]
            left = set(range(lo, hi))
            while left:
                status, tag, length = frames.ANSWER.unpack(stream.receive(frames.ANSWER.size))
                if tag not in left:
                    raise ConnectionAbortedError("the peer answered what it was not asked")
                left.remove(tag)
                pull.finish(tag, self._take_answer(stream, pull.wants[tag], status, length, peer))
            asked.pop(0)

    def _take_answer(
        self, stream: Stream, want: Want, status: int, length: int, peer: Peer
    ) -> Outcome:
        if status != frames.OK:
            if status not in _STATUS_ERRORS or length:
                raise ConnectionAbortedError("the peer sent an answer that is not of this protocol")
            return failed(_STATUS_ERRORS[status])
        if length != want.length:
            raise ConnectionAbortedError("the peer sent an answer of another length than asked")
        hasher = blake3()
        stream.receive_into(want.into.cast("B"), hasher.update if self._verify else None)
        right = want.digest if want.whole else stream.receive(PROOF_BYTES)
        if self._verify and hasher.digest() != right:
            log.error("%s sent wrong bytes for chunk %s", peer[0], want.digest.hex())
            return failed(DIGEST)
        return Outcome(ok=True, error="", bytes=length)

    def _probe_on_one(self, peer: Peer, nbytes: int, deadline: float) -> tuple[float, float]:
        """When ``nbytes`` were asked for and when they had all come."""
        stream = self._peers.take(peer, deadline, Stop(), extra=False)
        assert stream is not None
        usable = False
        try:
            start = time.monotonic()
            self._probe_stream(stream, nbytes)
            usable = True
            return start, time.monotonic()
        finally:
            self._peers.give(peer, stream, usable=usable)

    def _probe_stream(self, stream: Stream, nbytes: int) -> None:
        scratch = memoryview(bytearray(min(nbytes, PIECE_BYTES)))
        stream.send(frames.REQUEST.pack(frames.PROBE, 0, 0, wait_ms(stream), nbytes))
        if frames.ANSWER.unpack(stream.receive(frames.ANSWER.size)) != (frames.OK, 0, 0):
            raise ConnectionAbortedError("the peer sent an answer that is not of this protocol")
        while nbytes:
            nbytes -= (size := min(nbytes, PIECE_BYTES))
            stream.receive_into(scratch[:size])

    def _reason(self, error: OSError) -> str:
        if self._peers.closed:
            return CLOSED
        if isinstance(error, Refused):
            return REFUSED
        if isinstance(error, ConnectionRefusedError | ConnectionResetError | BrokenPipeError):
            return GONE
        return DEADLINE if isinstance(error, TimeoutError) else LOST
