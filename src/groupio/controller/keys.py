"""The secret that a job's nodes share: CURVE keys for control messages, one key for the data.

All keys come from one token, from a file of keys, or, where there is no token and all agents are
of one user on one machine, from a random secret in the store that only this user can read.
Nothing here is ever logged or shown.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Self

import zmq
from blake3 import blake3
from zmq.utils import z85

from groupio.backend.base import CONTROLLERS
from groupio.backend.records import NotPrivate
from groupio.errors import InvalidInput

if TYPE_CHECKING:
    from groupio.backend.posix import PosixBackend

TOKEN_BYTES_MIN = 16
"""A shorter token could be guessed."""

TOKEN_BYTES_MAX = 4096
"""Longest token, and longest file of keys, in bytes."""

STORE_KEY = "key"
"""The file in the store's folder of controllers that has the secret of one user's agents."""

_CONTEXT = "groupio 2026 job token: "
_HEADER = "groupio keys 1"
_FIELDS = ("server_public", "server_secret", "client_public", "client_secret", "fabric_key")
_STORE_KEY = re.compile(rb"groupio store key 1\n([0-9a-f]{64})\n")
_Z85 = re.compile(rb"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_ADVICE = "make one with: openssl rand -hex 32"


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Keys:
    """The keys of a job. The CURVE keys are 40 characters of Z85, ``fabric_key`` is 32 bytes."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes
    fabric_key: bytes
    of_store: bool = False
    """Made from the secret in a store: good for agents of one user on one machine only."""

    def __repr__(self) -> str:
        return "Keys(...)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("keys do not leave the process")

    @classmethod
    def from_token(cls, token: bytes) -> Self:
        """The keys of everyone who has this token; InvalidInput when it is too short or long."""
        if not TOKEN_BYTES_MIN <= len(token) <= TOKEN_BYTES_MAX:
            raise InvalidInput(
                f"a job token has {TOKEN_BYTES_MIN} to {TOKEN_BYTES_MAX} bytes, and this one has"
                f" {len(token)}; {_ADVICE}"
            )
        server, client = (z85.encode(_derive(token, end)) for end in ("server", "client"))
        return cls(
            server_public=zmq.curve_public(server),
            server_secret=server,
            client_public=zmq.curve_public(client),
            client_secret=client,
            fabric_key=_derive(token, "fabric"),
        )

    @classmethod
    def make(cls) -> Self:
        """New random keys."""
        return cls.from_token(secrets.token_bytes(32))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The keys in a file that :meth:`save` wrote, or those of the token in a file.

        White space around a token is no part of it. InvalidInput when the file cannot be read,
        when others than its owner may read or write it, or when it is neither.
        """
        data = _read_private(Path(path))
        if not data.startswith(_HEADER.encode()):
            try:
                return cls.from_token(data.strip())
            except InvalidInput as error:
                raise InvalidInput(f"{path}: {error.message}") from None
        pairs = [line.split() for line in data.splitlines()[1:]]
        values = {pair[0].decode("latin-1"): pair[1] for pair in pairs if len(pair) == 2}
        names = [name.replace("_", "-") for name in _FIELDS]
        if len(pairs) != len(names) or any(not _Z85.fullmatch(values.get(n, b"")) for n in names):
            raise InvalidInput(f"{path} is no file of groupio keys; make it anew")
        *curve, fabric = (values[name] for name in names)
        try:
            keys = cls(curve[0], curve[1], curve[2], curve[3], z85.decode(fabric))
            belong = [zmq.curve_public(curve[at + 1]) == curve[at] for at in (0, 2)]
        except (zmq.ZMQError, struct.error):  # five characters may say more than 32 bits hold
            raise InvalidInput(f"{path} is no file of groupio keys; make it anew") from None
        if not all(belong):
            raise InvalidInput(f"{path} has keys that do not belong together; make it anew")
        return keys

    def save(self, path: str | Path) -> None:
        """Write the keys to a new file that only its owner can read; OSError when it exists."""
        values = [getattr(self, name) for name in _FIELDS[:-1]]
        values.append(z85.encode(self.fabric_key))
        lines = [
            f"{name.replace('_', '-')} {value.decode()}"
            for name, value in zip(_FIELDS, values, strict=True)
        ]
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w", encoding="ascii") as file:
            file.write("\n".join([_HEADER, *lines, ""]))

    @classmethod
    def of(cls, store: PosixBackend) -> Self:
        """The keys that the agents of this user share through ``store``.

        They come from a random secret in a file with mode 0600, made if absent. InvalidInput
        where the store cannot keep it private, or where it is another user's: a token is needed.
        """
        try:
            data = store.private_file(
                CONTROLLERS, STORE_KEY, f"groupio store key 1\n{secrets.token_hex(32)}\n".encode()
            )
        except NotPrivate as error:
            raise InvalidInput(
                f"the agents of {store.path} need a token: without one they share a key in the "
                f"store, and {error}; set GROUPIO_TOKEN_FILE (or GROUPIO_TOKEN) to the same "
                f"secret for all of them, {_ADVICE}"
            ) from None
        match = _STORE_KEY.fullmatch(data)
        if match is None:
            raise InvalidInput(
                f"{store.path}/{CONTROLLERS}/{STORE_KEY} is damaged: it has {len(data)} bytes and "
                "is no key of groupio; remove it when no job of the store runs, or set "
                "GROUPIO_TOKEN_FILE (or GROUPIO_TOKEN)"
            )
        return replace(cls.from_token(bytes.fromhex(match[1].decode())), of_store=True)

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Self | None:
        """The keys of ``GROUPIO_TOKEN`` or of the file ``GROUPIO_TOKEN_FILE``; None without both.

        InvalidInput when both are set, or the one that is set is of no use.
        """
        token, path = environ.get("GROUPIO_TOKEN", ""), environ.get("GROUPIO_TOKEN_FILE", "")
        if token and path:
            raise InvalidInput("GROUPIO_TOKEN and GROUPIO_TOKEN_FILE are both set; unset one")
        if path:
            return cls.load(path)
        if token:
            try:
                return cls.from_token(token.strip().encode("utf-8", "surrogateescape"))
            except InvalidInput as error:
                raise InvalidInput(f"GROUPIO_TOKEN: {error.message}") from None
        return None


def _derive(token: bytes, purpose: str) -> bytes:
    return blake3(token, derive_key_context=_CONTEXT + purpose).digest()


def _read_private(path: Path) -> bytes:
    """What is in ``path``, at most TOKEN_BYTES_MAX, if only its owner can have written it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise InvalidInput(f"the token file {path} cannot be read: {error.strerror}") from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise InvalidInput(f"the token file {path} is not a regular file")
        if status.st_mode & 0o077:
            raise InvalidInput(
                f"the token file {path} has mode {stat.S_IMODE(status.st_mode):04o}, so others can"
                f" use it; run: chmod 600 {path}"
            )
        if status.st_uid not in (os.geteuid(), 0):
            raise InvalidInput(f"the token file {path} belongs to user {status.st_uid}")
        data = os.read(fd, TOKEN_BYTES_MAX + 1)
    finally:
        os.close(fd)
    if len(data) > TOKEN_BYTES_MAX:
        raise InvalidInput(f"the token file {path} is longer than {TOKEN_BYTES_MAX} bytes")
    return data
