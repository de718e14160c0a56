"""The serving side of the TCP fabric: listen, admit, and answer from what the node holds."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from blake3 import blake3

from groupio.exhaustion import start_some
from groupio.fabric import frames
from groupio.fabric.auth import JobKeys, Refused, prove_server
from groupio.fabric.base import Provider, Served
from groupio.fabric.pacing import Pacer
from groupio.fabric.stream import BUFFER_BYTES, PIECE_BYTES, Stream, format_address, tune
from groupio.model import CHUNK_BYTES
from groupio.seldom import REFUSED_LOG_S, Seldom

HANDSHAKE_S = 10.0
"""A client that has not proved itself by then is refused, seconds."""

HOLD_S = 60.0
"""A chunk's memory is held at most so long, seconds, for a client that takes nothing of it; then
the connection ends. No agent waits longer for bytes that it pulls."""

HOLD_MAX_S = 600.0
"""And so long, seconds, for one that takes a little now and then: a group that is over needs its
memory back. It is 7 kB/s for the longest chunk."""

STRANGERS_MAX = 64
"""So many connections may be in their handshake at a time; further ones are closed."""

CONNECTIONS_MAX = 2048
"""So many connections are served at a time; further ones are closed."""

IDLE_S = 600.0
"""A connection without requests is closed after this time, seconds."""

SWEEP_CHUNKS = 64
"""After so many chunks in a row that are not here, the server waits a little."""

WAIT_MIN_S = 0.001
WAIT_MAX_S = 0.016

_OUTBOX_BYTES = 256 << 10
_OUTBOX_VIEWS = 384
_NOTHING = memoryview(bytes(PIECE_BYTES))

log = logging.getLogger(__name__)


class Row(NamedTuple):
    """A want of a client."""

    tag: int
    digest: bytes
    offset: int
    length: int
    whole: bool


class Server:
    """Serves ``provider`` on a listening socket, with a thread for each connection."""

    def __init__(
        self, listener: socket.socket, keys: JobKeys, provider: Provider, pace: Pacer
    ) -> None:
        self._listener = listener
        self._keys = keys
        self._provider = provider
        self._pace = pace
        self._lock = threading.Lock()
        self._closed = False
        self._refused = Seldom(REFUSED_LOG_S)
        self._strangers = 0
        self._streams: dict[Stream, threading.Thread] = {}
        self._acceptor = threading.Thread(target=self._accept, name="fabric-accept", daemon=True)
        start_some([self._acceptor])

    def close(self) -> None:
        """End the listener and all connections, and wait for their threads."""
        with self._lock:
            self._closed = True
            threads = list(self._streams.values())
            for stream in self._streams:
                stream.shut()
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it is not needed to end the accept where the system does not have it
        self._acceptor.join()
        self._listener.close()
        for thread in threads:
            thread.join()

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, address = self._listener.accept()
            except OSError as error:
                if not self._closed:
                    log.warning("the fabric cannot accept a connection: %s", error)
                    time.sleep(0.1)  # out of descriptors, for example
                continue
            peer = format_address(*address[:2])
            try:
                tune(sock)
                self._start(sock, peer)
            except (OSError, RuntimeError) as error:
                log.warning("the fabric cannot serve %s: %s", peer, error)
                sock.close()

    def _start(self, sock: socket.socket, peer: str) -> None:
        stream = Stream(sock, self._pace, time.monotonic() + HANDSHAKE_S)
        thread = threading.Thread(
            target=self._attend, args=(stream, peer), name="fabric-serve", daemon=True
        )
        with self._lock:
            full = self._strangers >= STRANGERS_MAX or len(self._streams) >= CONNECTIONS_MAX
            if self._closed or full:
                sock.close()
                return
            thread.start()
            self._strangers += 1
            self._streams[stream] = thread

    def _attend(self, stream: Stream, peer: str) -> None:
        try:
            job = self._admit(stream, peer)
            while job is not None:
                stream.patience_s = 0.0
                stream.deadline = time.monotonic() + IDLE_S
                self._answer(stream, job)
        except (TimeoutError, ConnectionError) as error:
            log.debug("the connection of %s ends: %s", peer, error)
        except OSError as error:
            log.warning("the connection of %s failed: %s", peer, error)
        except Exception:  # of the provider; the other connections go on
            log.exception("serving %s failed", peer)
        finally:
            stream.close()
            with self._lock:
                self._streams.pop(stream, None)

    def _admit(self, stream: Stream, peer: str) -> str | None:
        try:
            return prove_server(stream, self._keys.of)
        except (Refused, TimeoutError, ConnectionError):
            if not self._closed and self._refused.is_due(peer.rpartition(":")[0]):
                log.warning("refused a data connection from %s", peer)
            return None
        finally:
            with self._lock:
                self._strangers -= 1

    def _answer(self, stream: Stream, job: str) -> None:
        request = frames.REQUEST.unpack(stream.receive(frames.REQUEST.size))
        kind, count, first, wait_ms, nbytes = request
        wait_s = min(wait_ms, frames.WAIT_MS_MAX) / 1000
        # The client gives up a little later than it lets us wait for chunks; it knows whether
        # that is for good or only without progress, and hangs up.
        stream.patience_s = wait_s * 1.25 + 1.0
        stream.deadline = time.monotonic() + stream.patience_s
        outbox = self.open_outbox(stream)
        try:
            if kind == frames.PROBE and nbytes <= frames.PROBE_BYTES_MAX:
                outbox.send_nothing(first, nbytes)
            elif kind == frames.PULL and 0 < count <= min(frames.WANTS_MAX, frames.TAGS - first):
                rows = frames.WANT.iter_unpack(stream.receive(count * frames.WANT.size))
                wants = deque(
                    Row(tag, digest, offset, length, bool(whole))
                    for tag, (digest, offset, length, whole) in enumerate(rows, first)
                )
                self._serve(outbox, job, wants, wait_s)
            else:
                raise ConnectionAbortedError("the peer sent a request that is not of this protocol")
        except BaseException:
            # Before the memory is released: nothing else may complete what was half sent.
            stream.shut()
            raise
        finally:
            outbox.release()

    def _serve(self, outbox: Outbox, job: str, wants: deque[Row], patience_s: float) -> None:
        """Answer all ``wants``: those that are here first, the others as they come.

        When none has come for ``patience_s`` seconds the rest is missing.
        """
        absent, slice_s = 0, WAIT_MIN_S
        until = time.monotonic() + patience_s
        while wants:
            row = wants.popleft()
            wait_s = 0.0
            if absent > min(len(wants), SWEEP_CHUNKS):
                outbox.flush()
                absent, wait_s = 0, slice_s
                slice_s = min(2 * slice_s, WAIT_MAX_S)
            served, gone = self._find(job, row.digest, wait_s)
            if served is not None:
                absent, slice_s = 0, WAIT_MIN_S
                outbox.add(row, served)
                until = time.monotonic() + patience_s
            elif gone or self._closed or time.monotonic() >= until:
                outbox.refuse(row.tag, frames.MISSING)
            else:
                wants.append(row)
                absent += 1
        outbox.flush()

    def open_outbox(self, stream: Stream) -> Outbox:
        """What takes the answers to one request of ``stream``."""
        return Outbox(stream)

    def _find(self, job: str, digest: bytes, wait_s: float) -> tuple[Served | None, bool]:
        """The chunk, or whether asking again makes no sense."""
        try:
            served = self._provider.find(job, digest, wait_s)
            return served, served is None and not self._provider.expects(job, digest)
        except Exception:  # one chunk's trouble must not end the others
            log.exception("looking up chunk %s of job %r failed", digest.hex(), job)
            return None, True


class Outbox:
    """Answers on their way: small ones leave together, large ones straight from their memory."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._views: list[memoryview] = []
        self._bytes = 0
        self._releases: list[Callable[[], None]] = []

    def add(self, row: Row, served: Served) -> None:
        """Answer ``row`` with its bytes of ``served``, which is released when they are sent."""
        try:
            self._make_room()
        except BaseException:
            served.release()
            raise
        self._releases.append(served.release)
        size, end = served.view.nbytes, row.offset + row.length
        if size > CHUNK_BYTES or (end != size if row.whole else end > size):
            self._append(frames.ANSWER.pack(frames.RANGE, row.tag, 0))
            return
        view = served.view.cast("B")[row.offset : end]
        self._append(frames.ANSWER.pack(frames.OK, row.tag, row.length))
        self._views.append(view)
        self._bytes += row.length
        if not row.whole:
            self._append(blake3(view).digest())
        if row.length >= BUFFER_BYTES or self._bytes >= _OUTBOX_BYTES:
            self.flush()

    def refuse(self, tag: int, status: int) -> None:
        """Answer ``tag`` without bytes."""
        self._make_room()
        self._append(frames.ANSWER.pack(status, tag, 0))

    def send_nothing(self, tag: int, nbytes: int) -> None:
        """Answer ``tag`` with so many zeros, paced as others."""
        self._stream.send(frames.ANSWER.pack(frames.OK, tag, 0))
        while nbytes:
            nbytes -= (size := min(nbytes, PIECE_BYTES))
            self._stream.send_paced([_NOTHING[:size]])

    def _make_room(self) -> None:
        if len(self._views) >= _OUTBOX_VIEWS:
            self.flush()

    def _append(self, data: bytes) -> None:
        self._views.append(memoryview(data))
        self._bytes += len(data)

    def flush(self) -> None:
        """Send all answers and release what they were made of, within HOLD_S to HOLD_MAX_S."""
        if self._views:
            with self._stream.within(HOLD_S, HOLD_MAX_S):
                self._stream.send_paced(self._views)
        self.release()

    def release(self) -> None:
        """Drop all answers and release what they are made of."""
        self._views.clear()
        self._bytes = 0
        releases, self._releases = self._releases, []
        for release in releases:
            release()
