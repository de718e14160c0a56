"""The handshake of data connections: both ends prove the token, and nobody else gets through."""

from __future__ import annotations

import os
import queue
import threading
from typing import Any

import pytest

from groupio.fabric.auth import (
    MAGIC,
    NONCE_BYTES,
    PROOF_BYTES,
    JobKeys,
    Refused,
    key_of,
    prove_client,
    prove_server,
)

KEY = key_of(b"token")


def known(job: str) -> bytes:
    """The key of every job."""
    return KEY


class End:
    """One end of a pipe in memory, which remembers what was sent into it."""

    def __init__(self) -> None:
        self.incoming: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.peer: End | None = None
        self.sent: list[bytes] = []
        self.received = 0
        self._rest = b""

    def send(self, data: bytes) -> None:
        self.sent.append(data)
        if self.peer is not None:
            self.peer.incoming.put(data)

    def hang_up(self) -> None:
        if self.peer is not None:
            self.peer.incoming.put(b"")

    def receive(self, nbytes: int) -> bytes:
        while len(self._rest) < nbytes:
            data = self.incoming.get(timeout=10)
            if not data:
                raise ConnectionResetError("closed")
            self._rest += data
        data, self._rest = self._rest[:nbytes], self._rest[nbytes:]
        self.received += nbytes
        return data


def pair() -> tuple[End, End]:
    left, right = End(), End()
    left.peer, right.peer = right, left
    return left, right


def fed(*messages: bytes) -> End:
    """An end whose peer said this and then closed."""
    end = End()
    for message in messages:
        end.incoming.put(message)
    end.incoming.put(b"")
    return end


def meet(client_key: bytes, server_key: bytes, job: str = "job") -> tuple[object, object, End, End]:
    """What both ends of a handshake come to: None or the error, the job or the error."""
    client, server = pair()
    results: list[object] = []

    def serve() -> None:
        try:
            results.append(prove_server(server, lambda job: server_key))
        except ConnectionError as error:
            results.append(error)
            server.hang_up()

    thread = threading.Thread(target=serve)
    thread.start()
    ours: object = None
    try:
        prove_client(client, client_key, job)
    except ConnectionError as error:
        ours = error
        client.hang_up()
    thread.join(timeout=10)
    return ours, results[0], client, server


@pytest.mark.parametrize("job", ["j", "train-7", "ü" * 127])
def test_same_token_meets(job: str) -> None:
    ours, theirs, client, server = meet(KEY, KEY, job)
    assert (ours, theirs) == (None, job)
    assert all(b"token" not in sent and KEY not in sent for sent in client.sent + server.sent)


def test_nonces_and_proofs_are_new_each_time() -> None:
    sent = [b"".join(meet(KEY, KEY)[2].sent + meet(KEY, KEY)[3].sent) for _ in range(2)]
    assert sent[0] != sent[1]


@pytest.mark.parametrize("other", [key_of(b""), key_of(b"other"), key_of(b"token ")])
def test_other_token_is_refused_by_both(other: bytes) -> None:
    for client_key, server_key in ((KEY, other), (other, KEY)):
        ours, theirs, client, _ = meet(client_key, server_key)
        assert isinstance(ours, Refused)
        assert isinstance(theirs, ConnectionError)
        assert len(client.sent) == 1, "no proof goes to a server that does not know the token"


def test_without_a_token_each_job_has_its_own_key_and_others_have_none() -> None:
    here, there = JobKeys(None), JobKeys(None)
    assert here.of("job") != there.of("job"), "no key that everybody could make"
    for keys in (here, there):
        keys.add("job", b"secret")
    assert here.of("job") == there.of("job") == key_of(b"secret")
    assert here.of("other") != there.of("other")
    here.add("job", b"changed")
    assert here.of("job") == key_of(b"changed")
    with_token = JobKeys(b"token")
    with_token.add("job", b"secret")
    assert (with_token.of("job"), with_token.of("other")) == (key_of(b"secret"), KEY)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_any_changed_bit_of_a_handshake_ends_it(number: int) -> None:
    """Messages of the two ends in the order in which they go: hello, answer, proof."""
    for place in (0, 9, 40, 43, -1):
        client, server = pair()
        sender = (client, server, client)[number]
        left = [0 if number < 2 else 1]
        send = sender.send

        def tampered(data: bytes, send: Any = send, left: Any = left, at: int = place) -> None:
            left[0] -= 1
            if left[0] < 0:
                left[0] = 1 << 20
                spot = at % len(data)
                data = data[:spot] + bytes([data[spot] ^ 1]) + data[spot + 1 :]
            send(data)

        sender.send = tampered  # type: ignore[method-assign]
        refusals: list[object] = []

        def serve(server: End = server, refusals: list[object] = refusals) -> None:
            try:
                prove_server(server, known)
            except ConnectionError as error:
                refusals.append(error)
            server.hang_up()

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(ConnectionError):
            prove_client(client, KEY, "job")
        client.hang_up()
        thread.join(timeout=10)
        assert refusals, f"byte {place} of message {number} was changed and nothing was noticed"


def test_replayed_client_is_refused() -> None:
    _, _, client, _ = meet(KEY, KEY)
    with pytest.raises(Refused):
        prove_server(fed(*client.sent), known)


def test_replayed_server_is_refused() -> None:
    _, _, _, server = meet(KEY, KEY)
    with pytest.raises(Refused):
        prove_client(fed(*server.sent), KEY, "job")


def test_reflected_proof_is_refused() -> None:
    """Somebody without the token sends a server its own proof back."""
    end = fed(MAGIC + bytes(NONCE_BYTES) + b"\x03job")

    class Mirror:
        def send(self, data: bytes) -> None:
            end.incoming = queue.SimpleQueue()
            end.incoming.put(data[NONCE_BYTES:])

        def receive(self, nbytes: int) -> bytes:
            return end.receive(nbytes)

    with pytest.raises(Refused):
        prove_server(Mirror(), known)


def test_proof_is_for_one_job() -> None:
    """A relay that changes the job's name on the way gets neither end to agree."""
    client, server = pair()

    class Relay:
        def send(self, data: bytes) -> None:
            client.send(data.replace(b"joba", b"jobb"))

        def receive(self, nbytes: int) -> bytes:
            return client.receive(nbytes)

    def serve() -> None:
        with pytest.raises(ConnectionError):
            prove_server(server, known)

    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.raises(Refused):
        prove_client(Relay(), KEY, "joba")
    client.hang_up()
    thread.join(timeout=10)


@pytest.mark.parametrize(
    "hello",
    [
        b"GET / HTTP/1.1\r\n" + bytes(100),
        MAGIC + bytes(NONCE_BYTES) + b"\x00",
        b"gioFabr2" + bytes(NONCE_BYTES) + b"\x03job",
    ],
)
def test_other_protocols_are_refused_unanswered(hello: bytes) -> None:
    end = fed(hello)
    with pytest.raises(Refused):
        prove_server(end, known)
    assert end.sent == []
    assert end.received <= 41


def test_job_that_is_no_text_is_refused() -> None:
    class Binary(str):
        def encode(self, *args: object) -> bytes:
            return b"\xff\xfe"

    ours, theirs, _, _ = meet(KEY, KEY, Binary("x"))
    assert isinstance(theirs, Refused)
    assert isinstance(ours, ConnectionError)


def test_little_is_read_before_the_proof() -> None:
    end = fed(MAGIC + os.urandom(NONCE_BYTES) + b"\xff" + b"j" * 255, bytes(1 << 20))
    with pytest.raises(Refused):
        prove_server(end, known)
    assert end.received == 41 + 255 + PROOF_BYTES


def test_server_without_a_welcome_is_refused() -> None:
    class NoWelcome:
        def __init__(self, end: End) -> None:
            self.end = end

        def send(self, data: bytes) -> None:
            self.end.send(b"\x00" if data == b"\x01" else data)

        def receive(self, nbytes: int) -> bytes:
            return self.end.receive(nbytes)

    client, server = pair()
    thread = threading.Thread(target=prove_server, args=(NoWelcome(server), known))
    thread.start()
    with pytest.raises(Refused):
        prove_client(client, KEY, "job")
    thread.join(timeout=10)
