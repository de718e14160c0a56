"""Messages over a Unix stream socket: what a rank and its node's agent speak.

A frame is four bytes, little-endian, and then a msgpack body. The low 28 bits of the four bytes
are the length of the body, the high 4 bits say how many file descriptors travel with the frame,
so that a descriptor can never be taken for one of another message.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

FRAME_BYTES_MAX = (256 << 20) - 1
"""A longer body is refused, by the sender and by the receiver."""

FRAME_FDS_MAX = 15
"""A frame carries at most this many descriptors."""

BACKLOG_BYTES_MAX = 2 * FRAME_BYTES_MAX
"""A channel whose peer does not read holds at most about this many bytes for it."""

PEER_CLOSED = "the peer closed the connection"
"""The text of ChannelClosed where the peer ended the connection, or has ended itself."""

_HEADER_BYTES = 4
_FDS_SHIFT = 28
_LENGTH_MASK = (1 << _FDS_SHIFT) - 1
_READ_BYTES = 256 << 10
_FEED_BYTES = 4 << 20
_SOCKET_PATH_MAX = 107
_ANCILLARY_BYTES = socket.CMSG_SPACE(FRAME_FDS_MAX * struct.calcsize("i"))


class ChannelClosed(ConnectionError):
    """The peer closed the connection or broke the protocol; the channel is of no more use.

    Internal: the client turns it into AgentLost, the agent drops the client.
    """


class BacklogFull(ChannelClosed):
    """The peer lives, and has left more than the backlog limit unread."""


class ChannelBusy(TimeoutError):
    """Another thread was sending all the time; nothing of the message was sent.

    That thread may be slow because the peer is, or be interrupted by a signal handler.
    """


class Received(NamedTuple):
    """One message and the descriptors that came with it (close-on-exec, owned by the receiver)."""

    message: Any
    fds: tuple[int, ...]


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors that came with a message; an error of that releases them too."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


class Channel:
    """Frames over a connected Unix socket, for blocking callers and for event loops.

    ``receives`` is the type (usually a union of tagged msgspec Structs) that incoming bodies are
    decoded to. Any thread may send; only one thread may receive. The socket becomes non-blocking
    and belongs to the channel.
    """

    def __init__(
        self,
        sock: socket.socket,
        receives: Any,
        *,
        encoder: msgspec.msgpack.Encoder | None = None,
        backlog_bytes_max: int = BACKLOG_BYTES_MAX,
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._encoder = encoder or msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(receives)
        self._backlog_bytes_max = backlog_bytes_max
        self._send_lock = threading.Lock()
        self._outgoing: deque[tuple[memoryview, list[int]]] = deque()
        self._outgoing_bytes = 0
        self._incoming = bytearray()
        self._incoming_fds: deque[int] = deque()
        self._ready: deque[Received] = deque()
        self._scratch = bytearray(_READ_BYTES)
        self._at_end = False

    def fileno(self) -> int:
        """The socket's descriptor, -1 after ``close``."""
        return self._sock.fileno()

    def peer(self) -> tuple[int, int]:
        """Process id and user id of the peer when it connected, as the kernel recorded them."""
        raw = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, _gid = struct.unpack("3i", raw)
        return pid, uid

    # -- sending -------------------------------------------------------------------------------

    def encode(self, message: Any, fds_count: int = 0) -> bytearray:
        """``message`` as a whole frame. ValueError when it is longer than FRAME_BYTES_MAX."""
        if not 0 <= fds_count <= FRAME_FDS_MAX:
            raise ValueError(f"a frame carries 0 to {FRAME_FDS_MAX} descriptors, not {fds_count}")
        frame = bytearray(_HEADER_BYTES)
        self._encoder.encode_into(message, frame, _HEADER_BYTES)
        length = len(frame) - _HEADER_BYTES
        if length > FRAME_BYTES_MAX:
            raise ValueError(
                f"a {type(message).__name__} message of {length} bytes exceeds the limit of "
                f"{FRAME_BYTES_MAX} bytes; save fewer items per epoch"
            )
        frame[:_HEADER_BYTES] = (length | fds_count << _FDS_SHIFT).to_bytes(4, "little")
        return frame

    def send(self, message: Any, fds: Sequence[int] = (), *, timeout_s: float = 60.0) -> None:
        """Send ``message``; on return the kernel has all of it.

        TimeoutError when the peer does not read in time (the frame may be half sent: close the
        channel), ChannelBusy when another thread was sending until then, ChannelClosed when the
        peer is gone, ValueError when the message is too long.
        """
        deadline = time.monotonic() + timeout_s
        frame = self.encode(message, len(fds))
        if not self._send_lock.acquire(timeout=max(timeout_s, 0)):
            raise ChannelBusy(f"another thread was sending for {timeout_s} s")
        try:
            self._append(frame, fds)
            while not self._push():
                _wait(self._sock, select.POLLOUT, deadline, "the peer did not read")
        finally:
            self._send_lock.release()

    def enqueue(self, message: Any, fds: Sequence[int] = ()) -> bool:
        """Send ``message`` without waiting; True when the kernel has all that was enqueued.

        When False, call :meth:`flush` once the socket is writable. ChannelClosed when the peer
        is gone, BacklogFull when it has left more than the backlog limit unread.
        """
        frame = self.encode(message, len(fds))
        with self._send_lock:
            if self._outgoing_bytes + len(frame) > self._backlog_bytes_max:
                raise BacklogFull(f"the peer left {self._outgoing_bytes} bytes unread")
            self._append(frame, fds)
            return self._push()

    def flush(self) -> bool:
        """Pass on what is enqueued, without waiting; True when nothing is left."""
        with self._send_lock:
            return self._push()

    def _append(self, frame: bytearray, fds: Sequence[int]) -> None:
        # Duplicates: the caller may close its own before the frame leaves.
        own: list[int] = []
        try:
            own.extend(os.dup(fd) for fd in fds)
        except OSError:
            _close_all(own)
            raise
        self._outgoing.append((memoryview(frame), own))
        self._outgoing_bytes += len(frame)

    def _push(self) -> bool:
        while self._outgoing:
            data, fds = self._outgoing[0]
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))]
            try:
                sent = self._sock.sendmsg([data], ancillary if fds else [], socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return False
            except OSError as error:
                raise ChannelClosed(f"sending failed: {error}") from error
            _close_all(fds)
            fds.clear()
            self._outgoing_bytes -= sent
            if sent == len(data):
                self._outgoing.popleft()
            else:
                self._outgoing[0] = (data[sent:], fds)
        return True

    # -- receiving -----------------------------------------------------------------------------

    def recv(self, timeout_s: float) -> Received:
        """The next message.

        TimeoutError when none came in time (the channel stays usable), ChannelClosed when the
        peer is gone and all its messages were received.
        """
        deadline = time.monotonic() + timeout_s
        while not self._ready:
            self._ready.extend(self._read())
            if not self._ready:
                _wait(self._sock, select.POLLIN, deadline, "no message came")
        return self._ready.popleft()

    def feed(self) -> list[Received]:
        """The messages that are there now, without waiting; for a socket that polled readable.

        At most a few MiB are read per call, so that one peer cannot starve the others. Raises
        ChannelClosed only after all complete messages were returned.
        """
        received = [*self._ready, *self._read()]
        self._ready.clear()
        return received

    def _read(self) -> list[Received]:
        if self._at_end:
            raise ChannelClosed(PEER_CLOSED)
        received: list[Received] = []
        budget = _FEED_BYTES
        while budget > 0:
            try:
                count = self._read_once()
            except BlockingIOError:
                break
            except ChannelClosed:
                raise
            except OSError as error:
                if not received:
                    # A peer that ends with messages of ours unread is reset, and is gone as well.
                    is_gone = isinstance(error, ConnectionResetError)
                    text = PEER_CLOSED if is_gone else f"receiving failed: {error}"
                    raise ChannelClosed(text) from error
                self._at_end = True  # reset by the peer: its last words count
                break
            if not count:
                self._at_end = True
                if not received:
                    raise ChannelClosed(PEER_CLOSED)
                break
            budget -= count
            received.extend(self._split())
        return received

    def _read_once(self) -> int:
        count, ancillary, flags, _ = self._sock.recvmsg_into(
            [self._scratch], _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                number = len(data) // struct.calcsize("i")
                self._incoming_fds.extend(struct.unpack_from(f"{number}i", data))
        if flags & socket.MSG_CTRUNC and len(self._incoming_fds) < FRAME_FDS_MAX:
            raise ChannelClosed(
                "a descriptor of the peer could not be taken: this process has too many files "
                "open; raise `ulimit -n`"
            )
        if flags & socket.MSG_CTRUNC or len(self._incoming_fds) > FRAME_FDS_MAX:
            raise ChannelClosed("the peer sent more descriptors than a frame may carry")
        self._incoming += memoryview(self._scratch)[:count]
        return count

    def _split(self) -> Iterator[Received]:
        start = 0
        while len(self._incoming) - start >= _HEADER_BYTES:
            header = int.from_bytes(self._incoming[start : start + _HEADER_BYTES], "little")
            length, fds_count = header & _LENGTH_MASK, header >> _FDS_SHIFT
            end = start + _HEADER_BYTES + length
            if end > len(self._incoming):
                break
            if fds_count > len(self._incoming_fds):
                raise ChannelClosed("the peer announced descriptors that it did not send")
            with memoryview(self._incoming) as view:
                try:
                    message = self._decoder.decode(view[start + _HEADER_BYTES : end])
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                    raise ChannelClosed(f"the peer sent a broken message: {error}") from error
            fds = tuple(self._incoming_fds.popleft() for _ in range(fds_count))
            yield Received(message, fds)
            start = end
        del self._incoming[:start]

    # -- the end -------------------------------------------------------------------------------

    def hang_up(self) -> None:
        """End the connection for both sides, and leave it to the receiving thread to close it.

        Closed by another thread, its descriptor could have a new owner by the time that the
        receiving thread waits for it, and what was just received would not be released.
        """
        with contextlib.suppress(OSError):  # the peer may have closed it already
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection for both sides; descriptors that nobody took are closed.

        While another thread is receiving, call :meth:`hang_up` instead.
        """
        self.hang_up()
        # Another thread may be sending: the shutdown has ended its wait.
        with self._send_lock:
            self.abandon()

    def abandon(self) -> None:
        """Close this process's copy only: in a forked child the parent's stays connected."""
        self._sock.close()
        self._scratch = bytearray()
        _close_all(self._incoming_fds)
        self._incoming_fds.clear()
        for received in self._ready:
            _close_all(received.fds)
        self._ready.clear()
        for _, fds in self._outgoing:
            _close_all(fds)
        self._outgoing.clear()
        self._outgoing_bytes = 0


def connect(path: Path, *, timeout_s: float) -> socket.socket:
    """A socket connected to the listener at ``path``.

    FileNotFoundError or ConnectionRefusedError when nobody listens there, TimeoutError when the
    listener's queue stays full.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.settimeout(timeout_s)
        with _short(path) as address:
            sock.connect(address)
    except BaseException:
        sock.close()
        raise
    return sock


def listen(path: Path, *, backlog: int = 128) -> socket.socket:
    """A socket bound to ``path`` (mode 0600) and listening. OSError when the name is taken."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        with _short(path) as address:
            # On Linux the mode of the socket file before bind is what bind gives the name.
            os.fchmod(sock.fileno(), 0o600)
            sock.bind(address)
        sock.listen(backlog)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """``path`` as a socket address; a long one goes through a descriptor of its directory."""
    if len(os.fsencode(path)) <= _SOCKET_PATH_MAX:
        yield str(path)
        return
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def _wait(sock: socket.socket, events: int, deadline: float, what: str) -> None:
    if sock.fileno() < 0:
        raise ChannelClosed("the channel was closed")
    poll = select.poll()
    poll.register(sock, events)
    left = deadline - time.monotonic()
    if left <= 0 or not poll.poll(left * 1000):
        raise TimeoutError(f"{what} in time")


def _close_all(fds: Sequence[int] | deque[int]) -> None:
    for fd in fds:
        os.close(fd)
