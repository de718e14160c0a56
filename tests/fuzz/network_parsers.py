"""The parsers of what comes from etcd, and from peers over the data fabrics.

Where an input needs bytes that only its reader can tell (proofs of a handshake), it is a change of
the right ones; so some inputs get through to what lies behind.
"""

from __future__ import annotations

import base64
import contextlib
import json
import random
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import httpcore
from blake3 import blake3
from mutations import flipped, mutated
from target import Target

from groupio.controller.by_etcd import EtcdCoordinator
from groupio.controller.coordinator import Rule, encode_rule
from groupio.controller.etcd_http import NoSuchLeaseError
from groupio.controller.sockets import split_address
from groupio.errors import ControllerLost, InvalidInput
from groupio.fabric import frames, mooncake
from groupio.fabric.auth import _HELLO, MAGIC, WELCOME, _proof, prove_client, prove_server
from groupio.fabric.base import Outcome, Served, Stop, Want
from groupio.fabric.mooncake_engine import SLOT_BYTES, Slot, Slots
from groupio.fabric.pacing import Pacer
from groupio.fabric.peers import Peers
from groupio.fabric.pulling import Pull
from groupio.fabric.serving import Server
from groupio.fabric.stream import Stream
from groupio.fabric.tcp import TcpFabric

JOB = "job\u00e9"
CHUNKS = [bytes([number]) * (40 + number) for number in range(4)] + [b"x" * 70_000]
DIGESTS = [blake3(chunk).digest() for chunk in CHUNKS]
PART = 3
"""Of this chunk a part is wanted."""

HOLDS_S = 1.0
"""How long a reader may wait for what does not come; nothing here ever waits so long."""


class RefusedInput(Exception):
    """The reader took the input for what it is: wrong, and said so."""


# -- etcd ---------------------------------------------------------------------------------------


def etcd_answer() -> Target:
    """Whole HTTP answers, heads included, to each of the calls."""
    rule = encode_rule(Rule(3, "tcp://[::1]:7400", "node0", "0" * 32))
    pair = {"create_revision": "5", "mod_revision": "7", "lease": "9"}
    keys = [
        {"key": "eA==", "value": base64.b64encode(value).decode(), **pair} for value in (rule, b"3")
    ]
    header = {"revision": "12"}
    state = [{"response_range": {"header": header, "kvs": [one]}} for one in keys]
    answers: dict[str, Any] = {
        "state": {"header": header, "succeeded": True, "responses": state},
        "lease": {"ID": "9", "TTL": "5"},
        "alive": {"result": {"ID": "9", "TTL": "5"}},
        "watch": {"result": {"created": True, "events": [{"kv": keys[0], "type": "PUT"}]}},
        "refusal": {"code": 5, "message": "etcdserver: requested lease not found"},
    }
    calls = ("state", "swap", "lease", "alive", "watch", "revoke")

    def make(chance: random.Random) -> bytes:
        call = chance.choice(calls)
        usual = {"swap": "state", "revoke": "lease"}.get(call, call)
        content = answers[usual if chance.random() < 0.8 else chance.choice(list(answers))]
        if chance.random() < 0.8:
            content = mutated(chance, content)
        body = json.dumps(content, default=_plain).encode() + b"\n"
        if chance.random() < 0.1:
            body = chance.choice((b"[" * 50_000, b'{"a":' * 50_000, b"", b"\xff\xfe", b"9" * 5000))
        status = chance.choice((200,) * 12 + (404, 400, 503, 100, 101, 204, 301, 999))
        length = chance.choice((len(body),) * 8 + (0, 1, len(body) + 1, 1 << 62, -1))
        how = chance.choice((f"Content-Length: {length}",) * 4 + ("X: y", "Content-Encoding: gzip"))
        if chance.random() < 0.15:
            how = "Transfer-Encoding: chunked"
            body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
        data = f"HTTP/1.1 {status} OK\r\n{how}\r\n\r\n".encode() + body
        if chance.random() < 0.2:
            data = flipped(chance, data)
        return bytes([calls.index(call)]) + data

    def parse(data: bytes) -> object:
        one = EtcdCoordinator(["127.0.0.1:1"], "job")
        etcd = one._etcd
        etcd._http = httpcore.ConnectionPool(network_backend=httpcore.MockBackend([data[1:]]))
        deadline = time.monotonic() + 0.001
        match calls[data[0]]:
            case "state":
                return one.current(deadline)
            case "swap":
                return etcd.swap([(b"k", 1)], [(b"k", b"v", 9)], deadline)
            case "lease":
                number, seconds = etcd.grant(5, deadline)
                return number * 1.0, seconds * 0.9  # as a lease computes with them
            case "alive":
                return etcd.keep_alive(9, deadline) * 0.9
            case "watch":
                return etcd.await_change(b"k", 1, deadline)
            case _:
                return etcd.revoke(9, deadline)

    return Target(make, parse, (ControllerLost, NoSuchLeaseError), share=0.3)


def _plain(value: Any) -> str:
    return repr(value)[:80]


# -- handshakes ---------------------------------------------------------------------------------


class _Peer:
    """The other end of a handshake: sends ``mask`` over the right bytes, then goes."""

    def __init__(self, mask: bytes) -> None:
        self._mask, self._at = mask, 0
        self.right = b""

    def receive(self, nbytes: int) -> bytes:
        at, self._at = self._at, self._at + nbytes
        if self._at > len(self._mask):
            raise ConnectionAbortedError("the peer went")
        right = self.right[at : self._at].ljust(nbytes, b"\0")
        return bytes(a ^ b for a, b in zip(self._mask[at : self._at], right, strict=True))

    def send(self, data: bytes) -> None:
        pass


def _masks(length: int) -> Any:
    def make(chance: random.Random) -> bytes:
        return bytes(length) if chance.random() < 0.1 else flipped(chance, bytes(length))

    return make


def handshake() -> Target:
    """What the serving side hears of a client."""
    name, nonce, key = JOB.encode(), bytes(range(32)), bytes(32)

    class Client(_Peer):
        def send(self, data: bytes) -> None:
            if len(data) > len(WELCOME):
                self.right += _proof(key, b"client", nonce, data[:32], name)

    def parse(data: bytes) -> object:
        peer = Client(data)
        peer.right = _HELLO.pack(MAGIC, nonce, len(name)) + name
        return prove_server(peer, lambda job: key)

    length = _HELLO.size + len(name) + 32
    return Target(_masks(length), parse, (ConnectionError,))


def handshake_answer() -> Target:
    """What a client hears of the serving side."""
    name, theirs, key = JOB.encode(), bytes(range(32)), bytes(32)

    class Listener(_Peer):
        def send(self, data: bytes) -> None:
            if data.startswith(MAGIC):
                _, nonce, _ = _HELLO.unpack(data[: _HELLO.size])
                self.right = theirs + _proof(key, b"server", nonce, theirs, name) + WELCOME

    return Target(
        _masks(32 + 32 + len(WELCOME)),
        lambda data: prove_client(Listener(data), key, JOB),
        (ConnectionError,),
    )


def address() -> Target:
    """The addresses that nodes announce to each other, up to the look-up of the host."""
    samples = ("tcp://10.0.0.1:7400", "tcp://[fd00::1]:7400", "tcp://node0.local:7400")

    def make(chance: random.Random) -> bytes:
        sample = chance.choice(samples).encode()
        if chance.random() < 0.3:
            part = chance.choice((b"a" * 70, b"a" * 9000, "\u0661".encode(), b"..", b"\0", b"xn--"))
            sample = sample.replace(chance.choice((b"7400", b"node0", b"10", b"::")), part)
        return sample if chance.random() < 0.2 else flipped(chance, sample)

    def parse(data: bytes) -> object:
        text = data.decode("utf-8", "replace")
        with contextlib.suppress(InvalidInput):
            split_address(text)
        with mock.patch("socket.getaddrinfo", _look_up):
            fabric = TcpFabric(token=b"x" * 16)
            try:
                (got,) = fabric.pull(text, JOB, _wants()[:1], deadline=time.monotonic() + 1)
            finally:
                fabric.close()
        if not got.ok:
            raise RefusedInput(got.error)
        return got

    # None can be reached: accepted is what got as far as the look-up.
    def reached(data: bytes) -> object:
        try:
            return parse(data)
        except RefusedInput:
            return None

    return Target(make, reached, (InvalidInput,))


def _look_up(host: str, *_: object, **__: object) -> Any:
    host.encode("idna")  # as the real one, before it asks anybody
    if "\0" in host:
        raise ValueError("embedded null character")
    raise socket.gaierror(socket.EAI_NONAME, "unknown")


# -- the fabrics --------------------------------------------------------------------------------


class _Listening(Stream):
    """A stream whose peer takes all that is sent."""

    def _send_views(self, views: list[memoryview]) -> None:
        views.clear()


@contextlib.contextmanager
def _stream(data: bytes) -> Iterator[Stream]:
    """A stream on which ``data`` comes, and then the end."""
    ours, theirs = socket.socketpair()
    stream = _Listening(ours, Pacer(), time.monotonic() + HOLDS_S)
    try:
        theirs.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            theirs.send(data)
        theirs.shutdown(socket.SHUT_WR)
        yield stream
    finally:
        stream.close()
        theirs.close()


def _wants() -> list[Want]:
    wants = []
    for number, (digest, chunk) in enumerate(zip(DIGESTS, CHUNKS, strict=True)):
        whole = number != PART
        offset, length = (0, len(chunk)) if whole else (8, 16)
        wants.append(Want(digest, offset, length, memoryview(bytearray(length)), whole))
    return wants


def _right(number: int) -> bytes:
    return CHUNKS[number] if number != PART else CHUNKS[number][8:24]


def _pulled(fabric: TcpFabric, data: bytes) -> list[Outcome]:
    """What a pull takes from a peer that says ``data``."""
    wants = _wants()
    pull = Pull(wants, None, 1, 0.0, time.monotonic() + HOLDS_S)
    with (
        _stream(data) as stream,
        mock.patch.object(Peers, "take", return_value=stream),
        mock.patch.object(Peers, "give"),
    ):
        fabric._pull_on_one(pull, ("peer", JOB), time.monotonic() + HOLDS_S, Stop(), extra=False)
    outcomes = pull.finish_all()
    for number, (want, got) in enumerate(zip(wants, outcomes, strict=True)):
        assert not got.ok or number == PART or bytes(want.into) == CHUNKS[number]
    if not all(got.ok for got in outcomes):
        raise RefusedInput
    return outcomes


def _tags(chance: random.Random) -> list[int]:
    tags = list(range(len(CHUNKS)))
    chance.shuffle(tags)
    if chance.random() < 0.2:
        tags[chance.randrange(len(tags))] = chance.choice((0, 5, (1 << 32) - 1))
    return tags


def fabric_answer() -> Target:
    """The answers of a peer to a pull over TCP."""
    fabric = TcpFabric(token=b"x" * 16)

    def make(chance: random.Random) -> bytes:
        data = b""
        for tag in _tags(chance):
            content = _right(tag % len(CHUNKS))
            status = chance.choice((frames.OK,) * 12 + (frames.MISSING, frames.RANGE, 3, 255))
            length = len(content) if chance.random() < 0.95 else chance.choice((0, 1, 1 << 31))
            if status != frames.OK and chance.random() < 0.8:
                length, content = 0, b""
            data += frames.ANSWER.pack(status, tag, length) + content
            if tag == PART and status == frames.OK:
                data += blake3(content).digest()
        return data if chance.random() < 0.5 else flipped(chance, data)

    return Target(make, lambda data: _pulled(fabric, data), (RefusedInput,))


def fabric_probe() -> Target:
    """The answer of a peer to a probe."""
    fabric = TcpFabric(token=b"x" * 16)
    right = frames.ANSWER.pack(frames.OK, 0, 0) + bytes(3000)

    def parse(data: bytes) -> object:
        with _stream(data) as stream:
            return fabric._probe_stream(stream, 3000)

    return Target(lambda chance: flipped(chance, right), parse, (ConnectionError,))


class _Provider:
    """Holds the chunks."""

    def find(self, job: str, digest: bytes, wait_s: float) -> Served | None:
        if digest not in DIGESTS:
            return None
        return Served(memoryview(CHUNKS[DIGESTS.index(digest)]), lambda: None)

    def expects(self, job: str, digest: bytes) -> bool:
        return False


def _served(server: Any, data: bytes) -> object:
    """What a server makes of a client that says ``data``."""
    server._provider, server._closed, server._pace = _Provider(), False, Pacer()
    with _stream(data) as stream:
        return server._answer(stream, JOB)


def _asking(chance: random.Random) -> bytes:
    count = chance.choice((1, 2, 2, 3, 3, 0, 512, 513, (1 << 32) - 1))
    kind = chance.choice((1, 1, 1, 1, 2, 0, 255))
    nbytes = chance.choice((0, 1, 5000, 1 << 20, (1 << 30) + 1, (1 << 64) - 1))
    first = chance.choice((0, 5, (1 << 32) - 1))
    wait = chance.choice((0, 5, (1 << 32) - 1))
    data = frames.REQUEST.pack(kind, count, first, wait, nbytes)
    for _ in range(min(count, 600)):
        number = chance.randrange(len(CHUNKS))
        digest = DIGESTS[number] if chance.random() < 0.8 else bytes(32)
        offset = chance.choice((0, 0, 0, 8, (1 << 32) - 1))
        length = chance.choice((len(CHUNKS[number]),) * 3 + (16, 0, (1 << 32) - 1))
        data += frames.WANT.pack(digest, offset, length, chance.choice((0, 1, 1, 255)))
    return data


def fabric_request() -> Target:
    """The requests of a client over TCP."""

    def make(chance: random.Random) -> bytes:
        data = _asking(chance)
        return data if chance.random() < 0.5 else flipped(chance, data)

    return Target(
        make,
        lambda data: _served(Server.__new__(Server), data),
        (ConnectionError, TimeoutError),
    )


class _Engine:
    """A transfer engine whose peers' memory is full of chunks."""

    session = "127.0.0.1:12345"

    def __init__(self) -> None:
        self.serving = Slots([Slot(4096, memoryview(bytearray(SLOT_BYTES)))])

    @contextlib.contextmanager
    def fetched(self, session: str, address: int, nbytes: int, *_: object) -> Iterator[memoryview]:
        assert 0 < nbytes <= SLOT_BYTES
        numbers = [number for number in range(len(CHUNKS)) if address >> (8 * number) & 1]
        content = b"".join(_right(number) for number in numbers) if address < 1 << 40 else b""
        yield memoryview(content.ljust(nbytes, b"?")[:nbytes])


def _mooncake_fabric() -> mooncake.MooncakeFabric:
    engine: Any = _Engine()
    return mooncake.MooncakeFabric(token=b"x" * 16, engine=engine)


def mooncake_answer() -> Target:
    """What a peer says of the slots that it filled, and where they are."""
    fabric = _mooncake_fabric()

    def fill(chance: random.Random, tags: Sequence[int]) -> bytes:
        tags = sorted(tags)
        rows, nbytes, address = b"", 0, 0
        for tag in tags:
            content = _right(tag % len(CHUNKS))
            status = chance.choice((frames.OK,) * 12 + (frames.MISSING, 3, 255))
            length = len(content) if status == frames.OK else 0
            if chance.random() < 0.05:
                length = chance.choice((0, 1, 1 << 31))
            digest = blake3(content).digest() if tag == PART else bytes(32)
            rows += mooncake._ROW.pack(status, tag, length, digest)
            nbytes += length
            address |= 1 << (8 * (tag % len(CHUNKS))) if status == frames.OK else 0
        if chance.random() < 0.1:
            nbytes = chance.choice((0, 1, SLOT_BYTES + 1, (1 << 32) - 1))
        count = len(tags) if chance.random() < 0.95 else chance.choice((0, 513, (1 << 32) - 1))
        name = chance.choice((b"127.0.0.1:12345", b"", b"\xff" * 255))
        place = address if chance.random() < 0.95 else (1 << 64) - 1
        return mooncake._FILL.pack(place, nbytes & 0xFFFFFFFF, count, len(name)) + name + rows

    def make(chance: random.Random) -> bytes:
        tags = _tags(chance)
        cut = chance.randrange(len(tags) + 1)
        data = b""
        for part in (tags[:cut], tags[cut:]):
            if part:
                data += fill(chance, part) + (b"\x02" if chance.random() < 0.95 else b"\x03")
        return data if chance.random() < 0.6 else flipped(chance, data)

    return Target(make, lambda data: _pulled(fabric, data), (RefusedInput,))


def mooncake_probe() -> Target:
    """The same for a probe."""
    fabric = _mooncake_fabric()
    name = b"127.0.0.1:12345"
    right = b"".join(
        mooncake._FILL.pack(4096, nbytes, 0, len(name)) + name + b"\x02" for nbytes in (1000, 2000)
    )

    def parse(data: bytes) -> object:
        with _stream(data) as stream:
            return fabric._probe_stream(stream, 3000)

    return Target(lambda chance: flipped(chance, right), parse, (ConnectionError,))


def mooncake_request() -> Target:
    """The requests of a client, and what it says while it reads a slot."""
    engine: Any = _Engine()

    def make(chance: random.Random) -> bytes:
        data = _asking(chance)
        for _ in range(chance.choice((1, 1, 2, 3))):
            room = chance.choice((SLOT_BYTES,) * 6 + (1, 100, 0, SLOT_BYTES + 1, (1 << 32) - 1))
            data += mooncake._ROOM.pack(room) + (b"\x01" if chance.random() < 0.9 else b"\x02")
        return data if chance.random() < 0.5 else flipped(chance, data)

    def parse(data: bytes) -> object:
        server: Any = mooncake._WindowServer.__new__(mooncake._WindowServer)
        server._engine = engine
        try:
            return _served(server, data)
        finally:
            assert len(engine.serving._free) == 1, "a slot was not given back"

    return Target(make, parse, (ConnectionError, TimeoutError))


def targets() -> dict[str, Target]:
    """All of them by name."""
    return {
        "etcd answer": etcd_answer(),
        "fabric handshake": handshake(),
        "fabric handshake answer": handshake_answer(),
        "fabric address": address(),
        "fabric request": fabric_request(),
        "fabric answer": fabric_answer(),
        "fabric probe": fabric_probe(),
        "mooncake request": mooncake_request(),
        "mooncake answer": mooncake_answer(),
        "mooncake probe": mooncake_probe(),
    }
