"""Control messages between agents and controllers: links over ZeroMQ, sealed with CURVE keys.

A message arrives once and in order, or the connection is lost on both sides
(:mod:`groupio.protocol.link`). Everything here runs in the thread of one asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any

import zmq

from groupio.controller.keys import Keys
from groupio.controller.sockets import (
    Gate,
    LoopSocket,
    Monitor,
    Parts,
    Refusals,
    Watch,
    join_address,
    new_socket,
    numeric,
    require_client_key,
    require_keys,
    show_client_key,
    split_address,
)
from groupio.errors import FormatError, InvalidInput
from groupio.protocol import link as lk
from groupio.protocol.link import Link
from groupio.protocol.linkconfig import LinkConfig
from groupio.protocol.linkframe import Frame, decode_frame, encode_frame, end_of, reject
from groupio.protocol.listener import Listener

SETTLE_S = 0.05
"""A connection is taken apart so long after its end was told."""

_log = logging.getLogger("groupio.control")
_numbers = count(1)


def _ignore(_: Any) -> None:
    pass


class Peer:
    """One connection. Set ``on_message`` and ``on_lost`` when it is handed out.

    ``hello`` is what the peer said of itself, ``life`` its process, ``address`` where it is (a
    listening side knows the host only), ``link`` the machine of the session. After ``on_lost`` or
    ``close`` nothing comes any more.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        link: Link,
        address: str,
        *,
        transmit: Callable[[Frame], None],
        on_open: Callable[[Peer], None],
        on_end: Callable[[Peer], None],
    ) -> None:
        self.address = address
        self.hello = b""
        self.on_message: Callable[[bytes], None] = _ignore
        self.on_lost: Callable[[str], None] = _ignore
        self._loop = loop
        self.link = link
        self._transmit = transmit
        self._on_open = on_open
        self._on_end = on_end
        self._timer: asyncio.TimerHandle | None = None
        self._effects: deque[lk.Effect] = deque()
        self._busy = False
        self._closed = False
        self._ended = False

    @property
    def life(self) -> str:
        """The life of the peer's process, "" as long as it is not known."""
        return self.link.peer_life

    @property
    def open(self) -> bool:
        """The connection stands."""
        return self.link.opened and not self.link.ended

    @property
    def vanished(self) -> bool:
        """It was lost because it closed its end of the connection without a word, or takes none."""
        return self.link.vanished

    @property
    def backlog_bytes(self) -> int:
        """Bytes that the peer has not acknowledged yet."""
        return self.link.backlog_bytes

    def send(self, payload: bytes) -> None:
        """Bring ``payload`` to the peer; ignored when the connection has ended.

        InvalidInput when it is longer than a message may be.
        """
        self.feed(lk.Send(self._loop.time(), payload))

    def close(self, reason: str = "closed by the peer") -> None:
        """End the connection; ``reason`` is what the peer's ``on_lost`` gets.

        What was sent last may not arrive.
        """
        self._closed = True
        self.feed(lk.Close(self._loop.time(), reason))

    def feed(self, event: lk.Event) -> None:
        """Give an event to the link and do what follows."""
        self._effects.extend(self.link.handle(event))
        if self._busy:
            return  # called by a callback: what it asked for comes after what was due before
        self._busy = True
        try:
            while self._effects:
                self._do(self._effects.popleft())
        finally:
            self._busy = False
            if self.link.ended and not self._ended:
                self._end()

    def _do(self, effect: lk.Effect) -> None:
        if isinstance(effect, lk.Transmit):
            self._transmit(effect.frame)
        elif isinstance(effect, lk.StartTimer):
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_later(effect.delay_s, self._tick)
        elif self._closed:
            pass
        elif isinstance(effect, lk.Deliver):
            self._call(self.on_message, effect.payload)
        elif isinstance(effect, lk.Opened):
            self.hello = effect.hello
            self._call(self._on_open, self)
        else:
            self._call(self.on_lost, effect.reason)

    def _call(self, function: Callable[[Any], None], argument: Any) -> None:
        try:
            function(argument)
        except Exception as error:  # noqa: BLE001 - one user's defect must not stop the others
            self._loop.call_exception_handler(
                {"message": f"a callback of the peer {self.address} failed", "exception": error}
            )

    def _tick(self) -> None:
        self._timer = None
        self.feed(lk.Tick(self._loop.time()))

    def _end(self) -> None:
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._on_end(self)


class ControlServer:
    """Listens for links; ``on_link`` gets every connection that stands.

    ``address`` is tcp://host:port with a numeric host or a name of this machine; port 0 takes a
    free one, and the attribute has the real one. InvalidInput when it cannot be listened on, or
    is no loopback address and ``keys`` are of no token. ``life`` names this process.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        address: str,
        keys: Keys,
        on_link: Callable[[Peer], None],
        *,
        life: str,
        hello: bytes = b"",
        config: LinkConfig | None = None,
    ) -> None:
        host = _own_host(address)
        require_keys(address, host, keys, "listen on")
        self._loop = loop
        self._on_link = on_link
        self._listener = Listener(life, lambda: next(_numbers), hello=hello, config=config)
        self._peers: dict[str, Peer] = {}
        self._routes: dict[str, bytes] = {}
        self._descriptors: dict[str, int] = {}
        """Of the connection over which each end was heard; another one may have it by now."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        refusals = Refusals()
        self._gate = Gate(loop, self._context, keys, refusals)
        sock = new_socket(self._context, zmq.ROUTER, host)
        sock.setsockopt(zmq.ROUTER_MANDATORY, 1)
        require_client_key(sock, keys)
        self._monitor = Monitor(self._context, sock, refusals, self._connection_ended)
        self._socket = LoopSocket(loop, sock, self._came)
        self._open = True
        try:
            sock.bind(join_address(host, split_address(address)[1]))
        except zmq.ZMQError as error:
            self.close()
            raise InvalidInput(
                f"cannot listen on {address}: {error.strerror}; choose another address"
            ) from None
        _, port = split_address(sock.get_string(zmq.LAST_ENDPOINT))
        self.address = join_address(host, port)

    def close(self, reason: str = "the controller ends") -> None:
        """End all connections and stop listening."""
        if not self._open:
            return
        for peer in list(self._peers.values()):
            peer.close(reason)
        self._open = False
        self._monitor.close()
        self._socket.close()
        self._gate.close()
        _end_context(self._context)

    def _came(self, parts: Parts) -> None:
        if not self._open or len(parts) != 2:
            return
        route = parts[0].bytes
        try:
            frame = decode_frame(parts[1].buffer)
        except FormatError as error:
            _log.warning("dropped a control frame from %s: %s", _host(parts[1]), error.message)
            return
        now = self._loop.time()
        link = self._listener.route(now, frame)
        if link is None:
            answer = reject(frame)
            if answer is not None:
                self._socket.send([route, encode_frame(answer)])
            return
        own = link.own
        if self._routes.get(own) != route:
            # The first one; or a connection that broke and came back: it has another route.
            self._routes[own] = route
            self._descriptors[own] = parts[1].get(zmq.SRCFD)
        if own not in self._peers:
            self._peers[own] = Peer(
                self._loop,
                link,
                _host(parts[1]),
                transmit=lambda frame: self._transmit(own, frame),
                on_open=self._on_link,
                on_end=lambda peer: self._forget(own, link),
            )
        self._peers[own].feed(lk.Received(now, frame))

    def _transmit(self, own: str, frame: Frame) -> None:
        if self._socket.send([self._routes[own], encode_frame(frame)]) == errno.EHOSTUNREACH:
            self._peers[own].feed(lk.Unreachable(self._loop.time()))

    def _connection_ended(self, descriptor: int) -> None:
        """Comes in the monitor's thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._loop.call_later, SETTLE_S, self._ask, descriptor)

    def _ask(self, descriptor: int) -> None:
        """Find out, by sending, who is not there any more."""
        if not self._open:
            return
        self._socket.take_all()
        for own, known in list(self._descriptors.items()):
            if known == descriptor and own in self._peers:
                self._peers[own].feed(lk.Ask(self._loop.time()))

    def _forget(self, own: str, link: Link) -> None:
        del self._peers[own]
        del self._routes[own]
        del self._descriptors[own]
        self._listener.drop(link)


class ControlClient:
    """One connection to a listening controller or agent; reconnects below while the link lives.

    ``on_lost`` comes once, also when nobody ever answered. InvalidInput when ``address`` cannot
    be read, or is no loopback address and ``keys`` are of no token. ``life`` names this process.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        address: str,
        keys: Keys,
        *,
        life: str,
        hello: bytes = b"",
        on_open: Callable[[Peer], None] = _ignore,
        on_message: Callable[[bytes], None] = _ignore,
        on_lost: Callable[[str], None] = _ignore,
        config: LinkConfig | None = None,
    ) -> None:
        host, port = split_address(address)
        known = numeric(host)
        if known:
            require_keys(address, host, keys, "connect to")
        self._loop = loop
        self._keys = keys
        self._on_lost = on_lost
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: LoopSocket | None = None
        self._watch: Watch | None = None
        self._opening: Frame | None = None
        link = Link(
            end_of(life, next(_numbers)), loop.time(), hello=hello, config=config or LinkConfig()
        )
        self.peer = Peer(
            loop,
            link,
            address,
            transmit=self._transmit,
            on_open=on_open,
            on_end=lambda peer: self._release(),
        )
        self.peer.on_message = on_message
        self.peer.on_lost = self._lost
        self._looking: asyncio.Future[Any] | None = None
        if known:
            self._connect(host, port)
        else:
            self._looking = asyncio.ensure_future(
                loop.getaddrinfo(host, port, type=socket.SOCK_STREAM), loop=loop
            )
            self._looking.add_done_callback(lambda found: self._found(host, port, found))
        self.peer.feed(lk.Tick(loop.time()))

    @property
    def address(self) -> str:
        """What it connects to, as it was given."""
        return self.peer.address

    @property
    def locked_out(self) -> bool:
        """Somebody is there, and does not take this process's keys; also after the end."""
        return self._watch is not None and self._watch.refused

    def send(self, payload: bytes) -> None:
        """As :meth:`Peer.send`; before the connection stands, the message waits for it."""
        self.peer.send(payload)

    def close(self, reason: str = "closed by the peer") -> None:
        """As :meth:`Peer.close`."""
        self.peer.close(reason)

    def _found(self, host: str, port: int, found: asyncio.Future[Any]) -> None:
        self._looking = None
        if found.cancelled():
            return
        try:
            numbers = [str(row[4][0]) for row in found.result()]
            require_keys(self.address, numbers[0], self._keys, "connect to")
        except OSError as error:
            self._give_up(f"the name {host} is not known: {error.strerror}")
        except InvalidInput as error:
            self._give_up(error.message)
        else:
            self._connect(numbers[0], port)

    def _give_up(self, reason: str) -> None:
        self.peer.close()
        self._on_lost(reason)

    def _connect(self, host: str, port: int) -> None:
        sock = new_socket(self._context, zmq.DEALER, host)
        show_client_key(sock, self._keys)
        self._watch = Watch(self._loop, sock, self._connection_changed)
        sock.connect(join_address(host, port))
        self._socket = LoopSocket(self._loop, sock, self._came)
        if self._opening is not None:
            self._transmit(self._opening)

    def _came(self, parts: Parts) -> None:
        if len(parts) != 1:
            return
        try:
            frame = decode_frame(parts[0].buffer)
        except FormatError as error:
            _log.warning("dropped a control frame from %s: %s", self.address, error.message)
            return
        self.peer.feed(lk.Received(self._loop.time(), frame))

    def _connection_changed(self, stands: bool) -> None:
        assert self._socket is not None
        self._socket.take_all()  # what was said before the end says nothing of what is now
        now = self._loop.time()
        self.peer.feed(lk.Reachable(now) if stands else lk.Unreachable(now))

    def _transmit(self, frame: Frame) -> None:
        if self._socket is not None:
            self._socket.send([encode_frame(frame)])
        else:
            self._opening = frame  # the name is still being looked up

    def _lost(self, reason: str) -> None:
        if not self.peer.link.opened:
            secret = "no token there" if self._keys.of_store else "the same token there"
            reason = f"{reason}; is {self.address} right, and {secret}?"
        self._on_lost(reason)

    def _release(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        if self._watch is not None:
            self._watch.close()
        if self._socket is not None:
            self._socket.close()
        _end_context(self._context)


def _own_host(address: str) -> str:
    """The numeric host to listen on; "*" is every IPv4 address of the machine."""
    host, port = split_address(address)
    if host == "*":
        return "0.0.0.0"
    if numeric(host):
        return host
    try:
        rows = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise InvalidInput(f"cannot listen on {address}: {host}: {error.strerror}") from None
    return str(rows[0][4][0])


def _host(frame: zmq.Frame) -> str:
    try:
        return str(frame.get("Peer-Address"))
    except zmq.ZMQError:
        return "unknown"


def _end_context(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """Free the context once its sockets have lingered, without keeping the loop waiting."""
    try:
        threading.Thread(target=context.term, name="control-end").start()
    except RuntimeError:
        # No thread can be had: what lingers is lost, and sent again by those who need it.
        context.destroy(linger=0)
