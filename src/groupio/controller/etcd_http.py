"""The few calls of etcd that coordination needs, over its JSON gateway (``/v3``, etcd 3.4 on).

The gateway takes and gives bytes as base64 and 64-bit numbers as strings. Answers are limited to
``ANSWER_BYTES_MAX``. A ``deadline`` is an instant of ``time.monotonic()``, in seconds; within it
a call goes round the endpoints until one answers, then it raises ``ControllerLost``. It holds for
every read of a connection, so that an answer whose head trickles ends in time too.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, NamedTuple, TypeVar

import httpcore
import msgspec

from groupio.errors import ControllerLost

ANSWER_BYTES_MAX = 1 << 20
"""Largest answer that is read, in bytes; a record of a controller has a few hundred."""

TRY_S = 2.0
"""An endpoint that says nothing for so long is left for the next one, in seconds."""

_PAUSE_S = 0.1
"""Wait between two rounds over all endpoints, in seconds."""

_AGAIN = (408, 429, 500, 502, 503, 504)
"""HTTP codes that another endpoint, or the same one later, may not give (no leader, restart)."""

_NOT_FOUND = 5
"""The gRPC code that etcd gives for a lease that is over."""


_FAILURES = (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException)
_BAD_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_Number = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class NoSuchLeaseError(Exception):
    """The lease is over; never leaves this package."""


class KeyValue(msgspec.Struct, frozen=True):
    """One key; revisions are those of the whole etcd."""

    key: bytes = b""
    value: bytes = b""
    create_revision: _Number = 0
    mod_revision: _Number = 0
    lease: _Number = 0


class _Header(msgspec.Struct, frozen=True):
    revision: _Number = 0


class _Range(msgspec.Struct, frozen=True):
    header: _Header = _Header()
    kvs: tuple[KeyValue, ...] = ()


class _Part(msgspec.Struct, frozen=True):
    response_range: _Range = _Range()


class _Txn(msgspec.Struct, frozen=True):
    header: _Header = _Header()
    succeeded: bool = False
    responses: tuple[_Part, ...] = ()


class _Lease(msgspec.Struct, frozen=True):
    id: _Number = msgspec.field(name="ID", default=0)
    ttl: _Number = msgspec.field(name="TTL", default=0)


class _Alive(msgspec.Struct, frozen=True):
    result: _Lease | None = None
    """None when etcd gives an error instead (no leader); that says nothing about the lease."""


class _Event(msgspec.Struct, frozen=True):
    kv: KeyValue = KeyValue()
    type: str = "PUT"


class _Watched(msgspec.Struct, frozen=True):
    created: bool = False
    canceled: bool = False
    events: tuple[_Event, ...] = ()


class _WatchLine(msgspec.Struct, frozen=True):
    result: _Watched = _Watched(canceled=True)
    """The default stands for an error in its place."""


class _Empty(msgspec.Struct, frozen=True):
    pass


class Refusal(msgspec.Struct, frozen=True):
    """What the gateway says instead of an answer."""

    code: int = 0
    message: str = ""


class Found(NamedTuple):
    """Keys read at one ``revision``; None for those that are not there."""

    keys: tuple[KeyValue | None, ...]
    revision: int


T = TypeVar("T")


class Etcd:
    """An etcd behind ``endpoints`` (``host:port``); safe from any thread.

    ``try_s``: how long one endpoint may take, in seconds.
    """

    def __init__(self, endpoints: Sequence[str], *, try_s: float = TRY_S) -> None:
        self.endpoints = tuple(endpoints)
        self._try_s = try_s
        self._first = 0
        self._closed = threading.Event()
        self._network = _Network()
        self._http = httpcore.ConnectionPool(network_backend=self._network, keepalive_expiry=5.0)

    def read(self, keys: Sequence[bytes], deadline: float) -> Found:
        """The newest state of ``keys``, all of one revision, as the quorum has it."""
        wanted = [{"request_range": {"key": key}} for key in keys]
        answer = self._call("kv/txn", {"success": wanted}, _Txn, deadline)
        rows = [part.response_range.kvs[:1] for part in answer.responses]
        if len(rows) != len(keys):
            raise self._strange("kv/txn", f"{len(rows)} keys for {len(keys)}")
        return Found(tuple(row[0] if row else None for row in rows), answer.header.revision)

    def swap(
        self,
        unchanged: Sequence[tuple[bytes, int]],
        puts: Sequence[tuple[bytes, bytes, int]],
        deadline: float,
    ) -> bool:
        """Put all of ``puts`` (key, value, lease or 0) if no key of ``unchanged`` has another
        ``mod_revision`` (0: absent). May be done twice, so False can follow an unheard True.

        NoSuchLeaseError when a lease of ``puts`` is over.
        """
        compare = [
            {"target": "MOD", "result": "EQUAL", "key": key, "mod_revision": revision}
            for key, revision in unchanged
        ]
        success = [
            {"request_put": {"key": key, "value": value, "lease": lease}}
            for key, value, lease in puts
        ]
        body = {"compare": compare, "success": success}
        return self._call("kv/txn", body, _Txn, deadline, leased=True).succeeded

    def grant(self, ttl_s: int, deadline: float) -> tuple[int, int]:
        """A new lease: its id and its time to live in whole seconds (etcd may give more)."""
        lease = self._call("lease/grant", {"TTL": ttl_s}, _Lease, deadline)
        if lease.id == 0 or lease.ttl < 1:
            raise self._strange("lease/grant", f"lease {lease.id} of {lease.ttl} s")
        return lease.id, lease.ttl

    def keep_alive(self, lease: int, deadline: float) -> int:
        """Prolong a lease: the seconds that it lives from now on, 0 when it is over."""
        while True:
            body = {"ID": lease}
            alive = self._call("lease/keepalive", body, _Alive, deadline, leased=True).result
            if alive is not None:
                return alive.ttl
            self._pause(deadline)  # then the call ends at the deadline

    def revoke(self, lease: int, deadline: float) -> None:
        """End a lease and delete its keys; nothing when it is over already."""
        try:
            self._call("lease/revoke", {"ID": lease}, _Empty, deadline, leased=True)
        except NoSuchLeaseError:
            pass  # that is what was wanted

    def await_change(self, key: bytes, revision: int, deadline: float) -> bool:
        """Wait until ``key`` is put or deleted at ``revision`` or later; False at the deadline.

        True also when the watch was cut off by etcd: read again.
        """
        request = {"create_request": {"key": key, "start_revision": revision}}
        decoder = msgspec.json.Decoder(_WatchLine, strict=False)

        def follow(answer: httpcore.Response, limit: float) -> bool:
            for line in _lines(answer, limit):
                got = self._parsed(decoder, line, "watch").result
                if got.events:
                    return True
                if got.canceled:
                    break
            self._pause(limit)  # cut off, perhaps again and again
            return True

        if time.monotonic() >= deadline:
            return False
        try:
            return self._around("watch", request, follow, deadline, patient=True)
        except TimeoutError:
            return False

    def close(self) -> None:
        """Close the connections; calls that are going on end with ControllerLost."""
        self._closed.set()
        self._network.close()
        self._http.close()

    # Talking --------------------------------------------------------------------------------

    def _call(
        self, path: str, body: object, form: type[T], deadline: float, *, leased: bool = False
    ) -> T:
        """``leased``: the call is about a lease, and raises NoSuchLeaseError when that is over."""
        decoder = msgspec.json.Decoder(form, strict=False)

        def whole(answer: httpcore.Response, limit: float) -> T:
            return self._parsed(decoder, _content(answer, limit), path)

        return self._around(path, body, whole, deadline, leased=leased)

    def _around(
        self,
        path: str,
        body: object,
        read: Callable[[httpcore.Response, float], T],
        deadline: float,
        *,
        patient: bool = False,
        leased: bool = False,
    ) -> T:
        """Try one endpoint after the other; ``patient``: an answer may take until the deadline
        (TimeoutError then)."""
        data = msgspec.json.encode(body)
        why = ""
        count = len(self.endpoints)
        for number in range(1 << 30):
            now = time.monotonic()
            if now >= deadline or (number and number % count == 0 and self._pause(deadline)):
                break
            turn = (self._first + number) % count
            limit = deadline if patient else min(deadline, now + self._try_s)
            try:
                with self._post(self.endpoints[turn], path, data, limit) as answer:
                    if answer.status == 200:
                        result = read(answer, limit)
                        self._first = turn
                        return result
                    content = _content(answer, limit)
                    why = self._refused(path, answer.status, content, leased=leased)
            except _FAILURES as error:
                if self._closed.is_set():
                    break
                if patient and time.monotonic() >= deadline:
                    raise TimeoutError from None
                # A last try is cut short; what an earlier one met says more than its silence.
                if not (why and isinstance(error, httpcore.TimeoutException)):
                    why = str(error) or type(error).__name__
            except TimeoutError:
                if patient:
                    raise
                why = why or f"no whole answer within {limit - now:.1f} s"
        if self._closed.is_set():
            why = "this side was closed"
        raise ControllerLost(
            f"etcd at {','.join(self.endpoints)} does not answer {path}: "
            f"{why or 'there was no time to ask'}; check that it runs and can be reached from "
            "this node"
        )

    @contextmanager
    def _post(
        self, endpoint: str, path: str, data: bytes, limit: float
    ) -> Iterator[httpcore.Response]:
        self._network.until(limit, self._try_s)
        left = max(limit - time.monotonic(), 0.0)
        # Nothing else is asked for, but a body that was packed all the same is no JSON then.
        headers = [("Content-Type", "application/json"), ("Accept-Encoding", "identity")]
        with self._http.stream(
            "POST",
            f"http://{endpoint}/v3/{path}",
            headers=headers,
            content=data,
            extensions={"timeout": {"pool": left}},
        ) as answer:
            yield answer

    def _pause(self, deadline: float) -> bool:
        rest = max(0.0, min(_PAUSE_S, deadline - time.monotonic()))
        return self._closed.wait(rest)

    def _refused(self, path: str, status: int, content: bytes, *, leased: bool) -> str:
        try:
            refusal = msgspec.json.decode(content, type=Refusal, strict=False)
        except _BAD_JSON:
            refusal = Refusal(0, content[:200].decode("utf-8", "replace"))
        if leased and refusal.code == _NOT_FOUND and "lease" in refusal.message:
            raise NoSuchLeaseError
        why = f"{status} {refusal.message[:200]}"
        if status in _AGAIN:
            return why
        raise ControllerLost(
            f"etcd at {','.join(self.endpoints)} refuses {path}: {why}; check its version (3.4 or "
            "newer) and that it allows access without a user"
        )

    def _parsed(self, decoder: msgspec.json.Decoder[T], data: bytes, path: str) -> T:
        try:
            return decoder.decode(data)
        except _BAD_JSON as error:
            raise self._strange(path, str(error)) from None

    def _strange(self, path: str, why: str) -> ControllerLost:
        return ControllerLost(
            f"{','.join(self.endpoints)} does not answer {path} as etcd does ({why}); check the "
            "address"
        )


class _Network(httpcore.NetworkBackend):
    """The connections of a pool; each thread says until when its calls may take."""

    def __init__(self) -> None:
        self._limits = threading.local()
        self._lock = threading.Lock()
        self._closed = False
        self._links: set[_Link] = set()

    def until(self, limit: float, connect_s: float) -> None:
        """What this thread does from now on ends at ``limit``, a connect after ``connect_s``."""
        self._limits.at, self._limits.connect_s = limit, connect_s

    def left(self) -> float:
        """The seconds that this thread has left; ReadTimeout when there are none."""
        left: float = self._limits.at - time.monotonic()
        if left <= 0:
            raise httpcore.ReadTimeout("the deadline has passed")
        return left

    def connect_tcp(self, host: str, port: int, *_: object, **__: object) -> httpcore.NetworkStream:
        """A connection to ``host``."""
        try:
            timeout_s = min(self.left(), self._limits.connect_s)
            sock = socket.create_connection((host, port), timeout_s)
        except TimeoutError as error:
            raise httpcore.ConnectTimeout(str(error)) from error
        except OSError as error:
            raise httpcore.ConnectError(str(error)) from error
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = _Link(self, sock)
        with self._lock:
            self._links.add(link)
            if self._closed:
                link.cut()
        return link

    def forget(self, link: _Link) -> None:
        """The connection was closed."""
        with self._lock:
            self._links.discard(link)

    def close(self) -> None:
        """Let all reads that are going on end now, which closing alone does not."""
        with self._lock:
            self._closed = True
            for link in self._links:
                link.cut()


class _Link(httpcore.NetworkStream):
    """One connection."""

    def __init__(self, network: _Network, sock: socket.socket) -> None:
        self._network = network
        self._sock = sock

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Some bytes, none at the end; in the time that the thread has left."""
        try:
            self._sock.settimeout(self._network.left())
            return self._sock.recv(max_bytes)
        except TimeoutError as error:
            raise httpcore.ReadTimeout(str(error)) from error
        except OSError as error:
            raise httpcore.ReadError(str(error)) from error

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Send all of ``buffer``, likewise."""
        try:
            self._sock.settimeout(self._network.left())
            self._sock.sendall(buffer)
        except TimeoutError as error:
            raise httpcore.WriteTimeout(str(error)) from error
        except OSError as error:
            raise httpcore.WriteError(str(error)) from error

    def get_extra_info(self, info: str) -> Any:
        """Whether an unused connection has ended or got what nobody asked for."""
        if info != "is_readable":
            return None
        poll = select.poll()
        try:
            poll.register(self._sock, select.POLLIN)
        except ValueError:  # another thread has closed it
            return True
        return bool(poll.poll(0))

    def cut(self) -> None:
        """End all that goes on here; from any thread."""
        with contextlib.suppress(OSError):  # the other side was faster
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self._network.forget(self)
        self._sock.close()


def _pieces(answer: httpcore.Response, limit: float) -> Iterator[bytes]:
    total = 0
    for piece in answer.iter_stream():
        total += len(piece)
        if total > ANSWER_BYTES_MAX:
            raise httpcore.ReadError(f"the answer has more than {ANSWER_BYTES_MAX} bytes")
        yield piece
        if time.monotonic() > limit:
            raise TimeoutError


def _content(answer: httpcore.Response, limit: float) -> bytes:
    return b"".join(_pieces(answer, limit))


def _lines(answer: httpcore.Response, limit: float) -> Iterator[bytes]:
    parts: list[bytes] = []
    for piece in _pieces(answer, limit):
        *whole, rest = piece.split(b"\n")
        if whole:
            whole[0] = b"".join([*parts, whole[0]])
            parts.clear()
            yield from (line for line in whole if line)
        parts.append(rest)
