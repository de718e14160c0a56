"""The connections that a node keeps to the peers it pulls from."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import defaultdict

from groupio.fabric.auth import JobKeys, prove_client
from groupio.fabric.base import Stop
from groupio.fabric.pacing import Pacer
from groupio.fabric.stream import Stream, parse_address, tune

CONNECT_S = 10.0
"""A peer that is not connected by then is lost, seconds."""

BUSY_MAX = 64
"""So many streams to one peer may be in use at a time; further pulls wait."""

IDLE_MAX = 512
"""So many unused connections are kept, of all peers together."""

Peer = tuple[str, str]
"""The address of a peer and the job that a connection is for."""


class FabricClosed(ConnectionError):
    """The fabric was closed while a connection was asked for or in use."""


class Peers:
    """Connections by peer: each is used by one pull at a time, and kept for the next."""

    def __init__(self, keys: JobKeys, pace: Pacer, streams: int) -> None:
        self._keys = keys
        self._pace = pace
        self._streams = streams
        self._changed = threading.Condition()
        self._closed = False
        self._idle: dict[Peer, list[Stream]] = defaultdict(list)
        self._idle_count = 0
        self._busy: dict[Peer, int] = defaultdict(int)
        self._used: set[Stream] = set()

    def take(self, peer: Peer, deadline: float, stop: Stop, *, extra: bool) -> Stream | None:
        """A stream to ``peer`` until ``deadline``; to be given back by ``give``.

        None for an ``extra`` one when enough streams of the peer are in use. ConnectionError
        when the peer cannot be reached or refuses, or at ``stop``; TimeoutError when it takes too
        long.
        """
        with stop.waking(self._wake), self._changed:
            if extra and self._busy.get(peer, 0) >= self._streams:
                return None
            while not (self._closed or stop.is_set) and self._busy.get(peer, 0) >= BUSY_MAX:
                if not self._changed.wait(deadline - time.monotonic()):
                    raise TimeoutError("too many pulls from one peer at a time")
            self._check_open(stop)
            self._busy[peer] += 1
        stream = None
        try:
            stream = self._kept(peer, deadline, stop) or self._connect(peer, deadline, stop)
            return stream
        finally:
            if stream is None:
                self._no_longer_busy(peer)

    def give(self, peer: Peer, stream: Stream, *, usable: bool) -> None:
        """End the use of a stream that was taken; it is kept if it is ``usable``."""
        stream.be_patient(0.0)
        with self._changed:
            self._used.discard(stream)
            idle = self._idle[peer]
            usable = usable and len(idle) < self._streams and self._idle_count < IDLE_MAX
            if usable and not self._closed:
                idle.append(stream)
                self._idle_count += 1
            else:
                stream.close()
        self._no_longer_busy(peer)

    def close(self) -> None:
        """Close all connections; returns when those in use were given back."""
        with self._changed:
            self._closed = True
            for stream in self._used:
                stream.shut()
            for idle in self._idle.values():
                for stream in idle:
                    stream.close()
            self._idle.clear()
            self._changed.notify_all()
            while self._busy:
                self._changed.wait()

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    def _check_open(self, stop: Stop) -> None:
        if self._closed:
            raise FabricClosed("the fabric is closed")
        if stop.is_set:
            raise ConnectionAbortedError("the pull was ended")

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _no_longer_busy(self, peer: Peer) -> None:
        with self._changed:
            self._busy[peer] -= 1
            if not self._busy[peer]:
                del self._busy[peer]
            self._changed.notify_all()

    def _kept(self, peer: Peer, deadline: float, stop: Stop) -> Stream | None:
        with self._changed:
            self._check_open(stop)
            while idle := self._idle.get(peer):
                stream = idle.pop()
                self._idle_count -= 1
                if stream.is_quiet():
                    stream.deadline = deadline
                    self._used.add(stream)
                    return stream
                stream.close()
        return None

    def _connect(self, peer: Peer, deadline: float, stop: Stop) -> Stream:
        address, job = peer
        deadline_here = min(deadline, time.monotonic() + CONNECT_S)
        host, port = parse_address(address)
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        stream = Stream(sock, self._pace, deadline_here)
        with self._changed:
            if not self._closed:
                self._used.add(stream)
        done = False
        try:
            tune(sock)
            with stop.waking(stream.shut):
                self._check_open(stop)
                sock.settimeout(max(deadline_here - time.monotonic(), 0.001))
                sock.connect(target)
                sock.settimeout(None)
                prove_client(stream, self._keys.of(job), job)
            stream.deadline = deadline
            done = True
            return stream
        except TimeoutError as error:
            if time.monotonic() >= deadline:
                raise
            raise ConnectionError(f"the peer did not connect within {CONNECT_S} s") from error
        finally:
            if not done:
                with self._changed:
                    self._used.discard(stream)
                with contextlib.suppress(OSError):
                    stream.close()
