"""ZeroMQ sockets in an asyncio loop: options, keys, who is let in, and who was refused.

Only the loop's thread uses the sockets, but for the monitor: a thread of its own, because a peer
that speaks without a key is gone before a busy loop could ask for its address.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from groupio.controller.keys import Keys
from groupio.errors import InvalidInput
from groupio.exhaustion import start_some
from groupio.protocol.linkframe import FRAME_BYTES_MAX
from groupio.seldom import REFUSED_LOG_S, Seldom

HIGH_WATER = 512
"""Most frames that a connection keeps in each direction; further ones are lost, and sent again."""

LINGER_MS = 250
"""A closed socket tries for so long to bring out what was sent last."""

HANDSHAKE_MS = 10_000
"""A connection that did not prove its key by then is closed."""

_TURN = 64
_DOMAIN = b"groupio"
_log = logging.getLogger("groupio.control")

Parts = Sequence[zmq.Frame]


def split_address(address: str) -> tuple[str, int]:
    """Host (an IPv6 one without brackets) and port of ``tcp://host:port``; InvalidInput if not."""
    host, colon, port = address.removeprefix("tcp://").rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    good = address.startswith("tcp://") and colon and host and port.isascii() and port.isdigit()
    if not good or int(port) > 65535 or (":" in host and not bracketed) or host.strip() != host:
        raise InvalidInput(
            f"{address!r} is no address; expected tcp://host:port, such as tcp://10.0.0.1:7400"
            " or tcp://[fd00::1]:7400"
        )
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """``tcp://host:port``, with brackets around an IPv6 host."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def is_loopback(host: str) -> bool:
    """The host is this machine for sure: a numeric loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def numeric(host: str) -> bool:
    """The host is an IP address and needs no look-up."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def require_keys(address: str, host: str, keys: Keys | None, what: str) -> None:
    """InvalidInput when control messages would travel between machines without a token."""
    if (keys is None or keys.of_store) and not is_loopback(host):
        raise InvalidInput(
            f"will not {what} {address} without a token, because it is no loopback address; set"
            " GROUPIO_TOKEN_FILE (or GROUPIO_TOKEN) to the same secret on all nodes"
        )


def new_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, host: str) -> zmq.Socket[bytes]:
    """A socket for frames to or from ``host``, with limits on everything that it keeps."""
    sock = context.socket(kind)
    sock.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
    sock.setsockopt(zmq.SNDHWM, HIGH_WATER)
    sock.setsockopt(zmq.RCVHWM, HIGH_WATER)
    sock.setsockopt(zmq.LINGER, LINGER_MS)
    sock.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    sock.setsockopt(zmq.IPV6, int(":" in host))
    sock.setsockopt(zmq.RECONNECT_IVL, 100)
    sock.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
    # Links have their own heartbeat; this one frees the connections of machines that vanished.
    sock.setsockopt(zmq.HEARTBEAT_IVL, 10_000)
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, 30_000)
    return sock


class LoopSocket:
    """A socket that hands every message to ``on_parts`` in the loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: zmq.Socket[bytes],
        on_parts: Callable[[Parts], None],
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._on_parts = on_parts
        self._fd: int = sock.FD
        self._due = False
        loop.add_reader(self._fd, self._drain)
        self._soon()

    def send(self, parts: Sequence[bytes]) -> int:
        """Send without waiting; 0, or why the message is lost.

        EAGAIN: there is no room for it. EHOSTUNREACH: no connection to the peer. ENOTSOCK: closed.
        """
        if self._sock.closed:
            return errno.ENOTSOCK
        try:
            self._sock.send_multipart(parts, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            return int(error.errno)
        finally:
            # Its descriptor speaks only once of what came; a call may have taken that word.
            self._soon()
        return 0

    def take_all(self) -> None:
        """Hand out all that has come."""
        while self._drain():
            pass

    def close(self) -> None:
        """Close the socket; what was sent last lingers."""
        if not self._sock.closed:
            self._loop.remove_reader(self._fd)
            self._sock.close()

    def _soon(self) -> None:
        if not self._due:
            self._due = True
            self._loop.call_soon(self._drain_again)

    def _drain_again(self) -> None:
        self._due = False
        self._drain()

    def _drain(self) -> bool:
        """Hand out some of what has come; True when there may be more."""
        for _ in range(_TURN):
            if self._sock.closed:
                return False
            try:
                parts = self._sock.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return False
            self._on_parts(parts)
        self._soon()  # the others of the loop come first
        return True


class Watch:
    """Tells what becomes of a connecting socket's connection: when it is made, ends or cannot be
    made, and whether the other end refuses the key.
    """

    REFUSALS = 2
    """One may be the end of the process at the other end."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: zmq.Socket[bytes],
        on_change: Callable[[bool], None],
    ) -> None:
        """Watch ``sock``, before it connects.

        ``on_change`` is called in the loop: somebody took the connection, or there is none.
        """
        self._loop = loop
        self._sock = sock
        self._on_change = on_change
        self._failures = 0
        self._stood = False
        kinds = (
            zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_CONNECTED
            | zmq.EVENT_DISCONNECTED
            | zmq.EVENT_CLOSED
        )
        self._events = LoopSocket(loop, sock.get_monitor_socket(kinds), self._came)

    @property
    def refused(self) -> bool:
        """The other end refused the key every time, and more than once."""
        self._events.take_all()
        return self._failures >= self.REFUSALS

    def _came(self, parts: Parts) -> None:
        event = parse_monitor_message([part.bytes for part in parts])
        if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._failures += 1
        elif event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._failures = 0
            self._stood = True
        elif event["event"] == zmq.EVENT_CONNECTED:
            self._loop.call_soon(self._on_change, True)
        elif event["event"] == zmq.EVENT_CLOSED or self._stood:
            # Closed: nobody takes a connection. One that did and refused the key is there.
            self._stood = False
            self._loop.call_soon(self._on_change, False)

    def close(self) -> None:
        """Stop watching; before the socket is closed. ``refused`` stays as it is."""
        self._events.take_all()
        if not self._sock.closed:
            self._sock.disable_monitor()
        self._events.close()


class Refusals:
    """Logs the addresses that were refused, each once in a while; any thread."""

    def __init__(self) -> None:
        self._logged = Seldom(REFUSED_LOG_S)

    def add(self, peer: str) -> None:
        """A peer without the right key."""
        if self._logged.is_due(peer):
            _log.warning("refused a control connection from %s: wrong or missing key", peer)


class Gate:
    """Lets only connections with the client key of ``keys`` through (ZAP); one for each context."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        context: zmq.Context[zmq.Socket[bytes]],
        keys: Keys,
        refusals: Refusals,
    ) -> None:
        sock = context.socket(zmq.REP)
        sock.setsockopt(zmq.LINGER, 0)
        sock.bind("inproc://zeromq.zap.01")
        self._allowed = z85.decode(keys.client_public)
        self._refusals = refusals
        self._socket = LoopSocket(loop, sock, self._asked)

    def close(self) -> None:
        """Ask nobody any more: further connections stay without an answer."""
        self._socket.close()

    def _asked(self, parts: Parts) -> None:
        version, request, domain, address, _identity, mechanism, *proofs = (p.bytes for p in parts)
        good = (domain, mechanism, proofs) == (_DOMAIN, b"CURVE", [self._allowed])
        if not good:
            self._refusals.add(address.decode("latin-1"))
        status = (b"200", b"OK") if good else (b"400", b"refused")
        self._socket.send([version, request, *status, b"groupio" if good else b"", b""])


def require_client_key(sock: zmq.Socket[bytes], keys: Keys) -> None:
    """Make a listening socket take only peers that its context's Gate lets through."""
    sock.setsockopt(zmq.CURVE_SERVER, 1)
    sock.setsockopt(zmq.CURVE_SECRETKEY, keys.server_secret)
    sock.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)


def show_client_key(sock: zmq.Socket[bytes], keys: Keys) -> None:
    """Make a connecting socket prove its key, and take only the right listener."""
    sock.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public)
    sock.setsockopt(zmq.CURVE_PUBLICKEY, keys.client_public)
    sock.setsockopt(zmq.CURVE_SECRETKEY, keys.client_secret)


class Monitor:
    """Tells of connections that ended, and logs peers whose handshake failed before the Gate was
    asked: another key, or none.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        sock: zmq.Socket[bytes],
        refusals: Refusals,
        on_end: Callable[[int], None],
    ) -> None:
        """``on_end`` gets the descriptor that a connection had, in the monitor's thread."""
        self._on_end = on_end
        self._sock = sock
        self._refusals = refusals
        self._peers: dict[int, str] = {}
        address = f"inproc://monitor-{id(self)}"
        sock.monitor(address, zmq.EVENT_ALL)
        self._events = context.socket(zmq.PAIR)
        self._events.setsockopt(zmq.LINGER, 0)
        self._events.connect(address)
        self._thread = threading.Thread(target=self._run, name="control-monitor", daemon=True)
        start_some([self._thread])

    def close(self) -> None:
        """End the thread; call it before the socket is closed."""
        self._sock.disable_monitor()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        failed, proved = False, 0
        since: dict[int, int] = {}
        """By descriptor, how many had proved their keys when it was accepted."""
        while True:
            event = parse_monitor_message(self._events.recv_multipart())
            kind, value = event["event"], int(event["value"])
            if kind == zmq.EVENT_MONITOR_STOPPED:
                break
            if kind == zmq.EVENT_ACCEPTED:
                self._peers[value], since[value] = _peer_of(value), proved
            elif kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                proved += 1  # whose it was is not said
            elif kind in (
                zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
                zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
            ):
                failed = True  # the next event is its disconnection, which has the descriptor
            elif kind == zmq.EVENT_DISCONNECTED:
                peer = self._peers.pop(value, "")
                # What is no message at all ends without a word of a handshake.
                if (since.pop(value, -1) == proved) | failed:
                    self._refusals.add(peer or "a peer that was gone at once")
                else:
                    self._on_end(value)
                failed = False
        self._events.close()


def _peer_of(fd: int) -> str:
    """The address at the other end of a connection of this process, "" when it is closed."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as copy:
        peer: tuple[Any, ...] = copy.getpeername()
        return str(peer[0])
    return ""
