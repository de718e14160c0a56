"""One TCP connection between two nodes: exact sends and receives, paced, with a deadline each."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from math import inf
from urllib.parse import urlsplit

from groupio.errors import InvalidInput
from groupio.fabric.pacing import Bucket, Pacer
from groupio.model import CHUNK_BYTES

PIECE_BYTES = 1 << 20
"""Bytes are paced and hashed in pieces of about this size, in smaller ones where the rate is low;
without a pace they move in chunks."""

BUFFER_BYTES = 64 << 10
"""What is read ahead where many small things follow each other; also the longest ``receive``."""

SEND_BUFFER_BYTES = 512 << 10
"""A stream's send buffer (the system doubles it): two streams fill 100 Gbit/s over 0.1 ms.

A larger one costs more than it brings: its bytes leave the processor's cache before they are sent,
and a pause still lets all of it through.
"""

LOWER_EFFORT = 0x04
"""The traffic class of RFC 8622 in the bits of the TOS field: below best effort."""

SILENCE_MS_MAX = 30_000
"""A peer whose system acknowledges nothing for so long is gone, milliseconds."""

_VIEWS_MAX = 512
_SHUT_CHECK_S = 0.1
_LIMIT_SLACK_S = 0.05
_TIMEVAL = struct.Struct("@ll")


class Stream:
    """A connected socket; it belongs to the stream, and one thread uses it at a time.

    ``deadline`` bounds every wait from now on, to about 0.05 s: past it, calls raise TimeoutError
    and what was half sent or received makes the stream useless. ConnectionError when the peer is
    gone.

    With ``patience_s`` (0: none) the deadline moves: whenever bytes went through it is at least so
    far off, and time in which the own pace held bytes back does not count. So what goes on is
    never late, and what stands still is found after at most twice that time.
    """

    def __init__(self, sock: socket.socket, pace: Pacer, deadline: float) -> None:
        self.deadline = deadline
        self.patience_s = 0.0
        self._latest = inf
        """The deadline never moves further than this."""
        self._sock = sock
        self._pace = pace
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._start = self._end = 0
        self._reads_ahead = True
        self._limits = dict.fromkeys((socket.SO_RCVTIMEO, socket.SO_SNDTIMEO), -1.0)
        self._shut = False

    # -- receiving -----------------------------------------------------------------------------

    def receive(self, nbytes: int) -> bytes:
        """Exactly ``nbytes`` bytes, at most BUFFER_BYTES."""
        if self._start + nbytes > BUFFER_BYTES:
            kept = self._end - self._start
            self._buffer[:kept] = bytes(self._buffer[self._start : self._end])
            self._start, self._end = 0, kept
        while self._end - self._start < nbytes:
            # Behind a header of large bytes nothing is read ahead: they go where they belong.
            until = BUFFER_BYTES if self._reads_ahead else self._start + nbytes
            self._end += self._receive_some(self._buffer[self._end : until], 0)
        data = bytes(self._buffer[self._start : self._start + nbytes])
        self._start += nbytes
        if self._start == self._end:
            self._start = self._end = 0
        return data

    def receive_into(
        self, view: memoryview, seen: Callable[[memoryview], object] | None = None
    ) -> None:
        """Fill ``view``; ``seen`` gets each piece of it while the caches still have it."""
        size = len(view)
        self._reads_ahead = size < BUFFER_BYTES
        at = min(self._end - self._start, size)
        view[:at] = self._buffer[self._start : self._start + at]
        self._start += at
        if at:
            self.take(self._pace.receiving, at)
            if seen is not None:
                seen(view[:at])
        step = _step(self._pace.receiving)
        if seen is not None:
            step = min(step, PIECE_BYTES)
        while at < size:
            piece = view[at : at + step]
            self.take(self._pace.receiving, len(piece))
            done = 0
            while done < len(piece):
                done += self._receive_some(piece[done:], socket.MSG_WAITALL)
            if seen is not None:
                seen(piece)
            at += done

    def _receive_some(self, view: memoryview, flags: int) -> int:
        self._limit(socket.SO_RCVTIMEO)
        try:
            count = self._sock.recv_into(view, len(view), flags)
        except BlockingIOError as error:
            raise TimeoutError("the peer sent nothing in time") from error
        if not count:
            raise ConnectionResetError("the peer closed the connection")
        self._progress()
        return count

    # -- sending -------------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        """Send a small message; it is not paced."""
        self._send_views([memoryview(data)])

    def send_paced(self, views: Sequence[memoryview]) -> None:
        """Send the bytes of ``views``; on return the kernel has a copy of all of them."""
        piece: list[memoryview] = []
        size = 0
        step = _step(self._pace.sending)
        for view in views:
            at = 0
            while at < len(view):
                part = view[at : at + step]
                piece.append(part)
                size += len(part)
                at += len(part)
                if size >= step or len(piece) >= _VIEWS_MAX:
                    self._send_piece(piece, size)
                    piece, size = [], 0
        if piece:
            self._send_piece(piece, size)

    def _send_piece(self, piece: list[memoryview], size: int) -> None:
        self.take(self._pace.sending, size)
        self._send_views(piece)

    def _send_views(self, views: list[memoryview]) -> None:
        while views:
            self._limit(socket.SO_SNDTIMEO)
            try:
                sent = self._sock.sendmsg(views, [], socket.MSG_NOSIGNAL)
            except BlockingIOError as error:
                raise TimeoutError("the peer read nothing in time") from error
            self._progress()
            while views and sent >= len(views[0]):
                sent -= len(views.pop(0))
            if views:
                views[0] = views[0][sent:]

    # -- waits and the end ---------------------------------------------------------------------

    def be_patient(self, seconds: float, latest: float = inf) -> None:
        """Have bytes that come move the deadline so far off (0: not), but never past ``latest``."""
        self.patience_s, self._latest = seconds, latest

    def _progress(self) -> None:
        if self.patience_s:
            self.deadline = max(
                self.deadline, min(time.monotonic() + self.patience_s, self._latest)
            )

    def _limit(self, option: int) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline has passed")
        if self._shut:
            raise ConnectionAbortedError("the stream was shut down")
        if abs(left - self._limits[option]) > _LIMIT_SLACK_S:
            self._limits[option] = left
            seconds = int(left)
            limit = _TIMEVAL.pack(seconds, max(int((left - seconds) * 1e6), 1))
            self._sock.setsockopt(socket.SOL_SOCKET, option, limit)

    def take(self, bucket: Bucket, nbytes: int) -> None:
        """Wait until ``bucket`` lets so many bytes pass, or the stream ends."""
        patient, began = self.patience_s > 0, time.monotonic()
        while True:
            check = time.monotonic() + _SHUT_CHECK_S
            try:
                bucket.take(nbytes, check if patient else min(self.deadline, check))
                break
            except TimeoutError:
                if self._shut or (not patient and time.monotonic() >= self.deadline):
                    raise
        self._latest += time.monotonic() - began
        self._progress()

    def is_quiet(self) -> bool:
        """Whether the peer is still there and has sent nothing more."""
        if self._start != self._end:
            return False
        try:
            self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    @property
    def is_shut(self) -> bool:
        """Whether ``shut`` was called."""
        return self._shut

    @contextlib.contextmanager
    def within(self, seconds: float, most_s: float) -> Iterator[None]:
        """Bound the waits in the context by so many seconds, too; after an error for good.

        The patience of a stream that has one is no longer than that meanwhile, and moves the
        deadline to ``most_s`` seconds from now and what the own pace takes, no further.
        """
        now, before = time.monotonic(), (self.deadline, self.patience_s, self._latest)
        self.deadline = min(self.deadline, now + seconds)
        self.be_patient(min(self.patience_s, seconds), min(self._latest, now + most_s))
        yield
        self.deadline, self.patience_s, self._latest = before
        self._progress()

    def shut(self) -> None:
        """End all waits on the stream, from any thread; its user then closes it."""
        self._shut = True
        with contextlib.suppress(OSError):  # the peer may have gone already
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket; only the thread that uses the stream may do this."""
        self._sock.close()


def _step(bucket: Bucket) -> int:
    """Bytes of a piece: fewer and larger ones cost less where nothing has to hold them back."""
    return CHUNK_BYTES if bucket.is_free else bucket.piece(PIECE_BYTES)


def tune(sock: socket.socket) -> None:
    """Make a data socket quick, patient and of the lowest priority."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_MS_MAX)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    if sock.family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, LOWER_EFFORT)
    else:
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, LOWER_EFFORT)


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of ``tcp://host:port``. InvalidInput for anything else."""
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
        (host or "").encode("idna")  # as the look-up does; a UnicodeError is a ValueError
    except ValueError:
        host, port = None, None
    if (
        not host
        or "\0" in host
        or not port
        or parts.scheme != "tcp"
        or parts.path
        or parts.username is not None
    ):
        raise InvalidInput(f"{address!r} is no address of a fabric; it must be tcp://host:port")
    return host, port


def format_address(host: str, port: int) -> str:
    """``tcp://host:port``, with brackets around an IPv6 address."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the numeric address ``host``."""
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback
