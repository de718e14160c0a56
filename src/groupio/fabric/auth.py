"""Authentication of data connections: both ends prove that they know the job's token.

Three fixed-size messages and the name of the job. Each side chooses a nonce; each proof is a
keyed BLAKE3 over the role, both nonces and the job, so that no proof fits another connection,
another job or the other end. The token itself never travels, but proofs do: a token that can
be guessed can be found from them, so make it random. A connection serves one job.

This says who is at the other end when a connection opens; it neither encrypts nor signs what
follows. Whole chunks are checked against their names anyway. Without a token each job has a key
of its own (:class:`JobKeys`), and only loopback addresses may be listened on.
"""

from __future__ import annotations

import hmac
import os
import struct
from collections.abc import Callable
from typing import Protocol

from blake3 import blake3

from groupio.fabric.base import JOB_BYTES_MAX

MAGIC = b"gioFabr1"
NONCE_BYTES = 32
PROOF_BYTES = 32
WELCOME = b"\x01"

_CONTEXT = "groupio fabric data connections, key of a job, version 1"
_HELLO = struct.Struct(f"<8s{NONCE_BYTES}sB")


class Refused(ConnectionError):
    """The other end does not know the token, or speaks something else."""


class Duplex(Protocol):
    """The connection, as the handshake sees it; it has a deadline of its own."""

    def receive(self, nbytes: int) -> bytes:
        """Exactly so many bytes. ConnectionError at the end, TimeoutError past the deadline."""

    def send(self, data: bytes) -> None:
        """All of ``data``, with the same errors."""


def key_of(token: bytes) -> bytes:
    """The 32-byte key that proofs are made with; the token cannot be found from it."""
    key: bytes = blake3(token, derive_key_context=_CONTEXT).digest()
    return key


class JobKeys:
    """The keys that one fabric proves its jobs with; from any thread."""

    def __init__(self, token: bytes | None) -> None:
        """``token`` is of all jobs that :meth:`add` does not name."""
        self._default = None if token is None else key_of(token)
        self._own: dict[str, bytes] = {}
        # A stranger cannot tell a job that is not known here from a wrong proof.
        self._no_key = os.urandom(NONCE_BYTES)

    def add(self, job: str, token: bytes) -> None:
        """The token of one job, from the next connection on."""
        self._own[job] = key_of(token)

    def of(self, job: str) -> bytes:
        """The key of ``job``; one that no other process has where there is no token for it."""
        return self._own.get(job) or self._default or self._no_key


def prove_client(duplex: Duplex, key: bytes, job: str) -> None:
    """Open a connection for ``job``. Refused when the server does not know the key."""
    name, nonce = job.encode(), os.urandom(NONCE_BYTES)
    duplex.send(_HELLO.pack(MAGIC, nonce, len(name)) + name)
    answer = duplex.receive(NONCE_BYTES + PROOF_BYTES)
    theirs, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(key, b"server", nonce, theirs, name)):
        raise Refused("the peer does not know the job's token")
    duplex.send(_proof(key, b"client", nonce, theirs, name))
    if duplex.receive(1) != WELCOME:
        raise Refused("the peer refused the connection")


def prove_server(duplex: Duplex, key_for: Callable[[str], bytes]) -> str:
    """Admit a connection; the job that it is for. Refused for a wrong proof or another protocol.

    ``key_for`` says the key of the job that the client names.

    A client that has seen that this side does not know its token just goes, without a proof: that
    is a ConnectionError. At most 41 + JOB_BYTES_MAX + 32 bytes are read before the peer is known.
    """
    magic, theirs, length = _HELLO.unpack(duplex.receive(_HELLO.size))
    if magic != MAGIC or not 0 < length <= JOB_BYTES_MAX:
        raise Refused("the peer does not speak this protocol")
    name = duplex.receive(length)
    try:
        job = name.decode()
    except UnicodeDecodeError as error:
        raise Refused("the peer does not speak this protocol") from error
    key, nonce = key_for(job), os.urandom(NONCE_BYTES)
    duplex.send(nonce + _proof(key, b"server", theirs, nonce, name))
    proof = duplex.receive(PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(key, b"client", theirs, nonce, name)):
        raise Refused("the peer does not know the job's token")
    duplex.send(WELCOME)
    return job


def _proof(key: bytes, role: bytes, client: bytes, server: bytes, name: bytes) -> bytes:
    proof: bytes = blake3(role + client + server + name, key=key).digest()
    return proof
