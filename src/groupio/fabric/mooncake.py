"""The fabric over the Mooncake Transfer Engine: RDMA where the nodes have it, else its TCP.

Requests go over connections of our own, whose ends have proved that they know the job's token;
only there does a peer learn where bytes lie. The serving side copies chunks into a slot of its
window and says so; the asking side has the engine read the slot, says that it can be used again,
copies the chunks to where they belong and checks them there.

After a request of :mod:`groupio.fabric.frames`, until each of its wants is answered:

- the client says how many bytes it takes (4), once its pace lets them pass;
- the server says where they are: address, bytes, rows, length of its engine's name (17), the
  name, and for each row status, tag, length, and the BLAKE3 of a part (44); chunks lie one behind
  the other in the order of their rows;
- the client has read them (1);
- the server still had them there until now (1). Where a connection ends before that, the slot is
  used again, and what the client has read counts for nothing: a peer is called a liar only for
  bytes that it vouched for.

What the engine itself does about strangers is not in our hands: its ports are open on all
addresses of the node and know no keys. Whoever reaches them can read and change what is in the
window at that moment. Changes are found, since every chunk is checked; secrets need a network
that only the job's nodes can reach.
"""

from __future__ import annotations

import logging
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np
from blake3 import blake3

from groupio.errors import InvalidInput
from groupio.fabric import frames
from groupio.fabric.auth import JobKeys
from groupio.fabric.base import (
    DIGEST,
    MISSING,
    RANGE,
    Outcome,
    Provider,
    Served,
    Stop,
    Want,
    failed,
)
from groupio.fabric.base import verified as is_right
from groupio.fabric.mooncake_engine import SLOT_BYTES, SLOTS, Engine, Slot
from groupio.fabric.pacing import Bucket, Pacer
from groupio.fabric.peers import Peer
from groupio.fabric.pulling import Pull, ask, wait_ms
from groupio.fabric.serving import HOLD_MAX_S, HOLD_S, Outbox, Row, Server
from groupio.fabric.stream import PIECE_BYTES, Stream
from groupio.fabric.tcp import TcpFabric
from groupio.model import DIGEST_BYTES

SCHEME = "mooncake://"

STREAMS = 3
"""Streams of a pull: while one has the engine read, the others copy and check."""

_ROOM = struct.Struct("<I")
_FILL = struct.Struct("<QIIB")
_ROW = struct.Struct(f"<BxxxII{DIGEST_BYTES}s")
_READ = b"\x01"
_KEPT = b"\x02"

_NO_DIGEST = bytes(DIGEST_BYTES)
_STATUS_ERRORS = {frames.MISSING: MISSING, frames.RANGE: RANGE}

_CONTEXT = "groupio fabric over the mooncake engine, token of a job, version 1"

log = logging.getLogger(__name__)


def _token_here(token: bytes) -> bytes:
    """The token of this fabric: a peer with another one is refused, not misunderstood."""
    made: bytes = blake3(token, derive_key_context=_CONTEXT).digest()
    return made


class MooncakeFabric(TcpFabric):
    """Chunks by the Mooncake Transfer Engine; see the module.

    ``engine`` is used and left open if given; else the fabric has one of its own, which starts
    with the first use. Addresses are ``mooncake://host:port``.
    """

    name = "mooncake"

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        announce: str | None = None,
        token: bytes | None = None,
        pace: Pacer | None = None,
        engine: Engine | None = None,
        slots: int = SLOTS,
    ) -> None:
        """``slots`` are those of an engine of its own. ModuleNotFoundError without the package,
        InvalidInput without its libraries."""
        token = _token_here(token) if token else token
        super().__init__(host=host, announce=announce, token=token, pace=pace, streams=STREAMS)
        self._own_engine = engine is None
        self._engine = engine or Engine(announce or host, slots)

    def trust(self, job: str, token: bytes) -> None:
        """See ``Fabric``."""
        super().trust(job, _token_here(token))

    def serve(self, provider: Provider) -> str:
        """See ``Fabric``."""
        address = super().serve(provider)
        log.warning(
            "the ports of the Mooncake engine %s take anybody who reaches them; let only the "
            "job's nodes reach them",
            self._engine.session,
        )
        return SCHEME + address.removeprefix("tcp://")

    def pull(
        self,
        address: str,
        job: str,
        wants: Sequence[Want],
        *,
        deadline: float,
        patience_s: float = 0.0,
        on_done: Callable[[int, Outcome], None] | None = None,
        stop: Stop | None = None,
    ) -> list[Outcome]:
        """See ``Fabric``. Also InvalidInput for an address that is not ``mooncake://host:port``."""
        address = _of_stream(address)
        return super().pull(
            address,
            job,
            wants,
            deadline=deadline,
            patience_s=patience_s,
            on_done=on_done,
            stop=stop,
        )

    def probe(self, address: str, job: str, nbytes: int, deadline: float) -> float:
        """See ``Fabric``; uses as many streams as a pull does."""
        return super().probe(_of_stream(address), job, nbytes, deadline)

    def close(self) -> None:
        """See ``Fabric``."""
        super().close()
        if self._own_engine:
            self._engine.close()

    def _open_server(self, listener: socket.socket, provider: Provider) -> Server:
        return _WindowServer(listener, self._keys, provider, self.pace, self._engine)

    # -- one stream ----------------------------------------------------------------------------

    def _converse(
        self, stream: Stream, pull: Pull, peer: Peer, asked: list[tuple[int, int]]
    ) -> None:
        while True:
            ask(stream, pull, asked)
            if not asked:
                return
            lo, hi = asked[0]
            left = set(range(lo, hi))
            taking = _Taking(sum(want.length for want in pull.wants[lo:hi]))
            while left:
                fill = self._ask_for_fill(stream, taking, len(left))
                self._take_fill(stream, pull, fill, left, peer)
            asked.pop(0)

    def _ask_for_fill(self, stream: Stream, taking: _Taking, rows_max: int) -> _Fill:
        """Say how much may come now, and hear what is there."""
        bucket = self.pace.receiving
        room = _room(bucket)
        if due := taking.due(room):
            stream.take(bucket, due)
        stream.send(_ROOM.pack(room))
        address, nbytes, count, length = _FILL.unpack(stream.receive(_FILL.size))
        if nbytes > SLOT_BYTES or count > rows_max:
            raise ConnectionAbortedError("the peer fills more than was asked for")
        session = stream.receive(length).decode(errors="replace")
        rows = [_Answer(*_ROW.unpack(stream.receive(_ROW.size))) for _ in range(count)]
        taking.came(nbytes)
        return _Fill(session, address, nbytes, rows)

    def _take_fill(
        self, stream: Stream, pull: Pull, fill: _Fill, left: set[int], peer: Peer
    ) -> None:
        """Read what the peer has filled, and finish the wants that it answers."""
        places = _places(fill, pull.wants, left)
        left.difference_update(row.tag for row in fill.rows)
        wrong = []
        with self._read(stream, fill) as view:
            stream.send(_READ)
            for row, place in zip(fill.rows, places, strict=True):
                want = pull.wants[row.tag]
                outcome = _arrived(want, row, view[place : place + row.length])
                if outcome.error == DIGEST:
                    wrong.append(row.tag)
                else:
                    pull.finish(row.tag, outcome)
        _hear_kept(stream)
        for tag in wrong:
            log.error("%s sent wrong bytes for chunk %s", peer[0], pull.wants[tag].digest.hex())
            pull.finish(tag, failed(DIGEST))

    def _read(self, stream: Stream, fill: _Fill) -> AbstractContextManager[memoryview]:
        if not fill.nbytes:
            return nullcontext(memoryview(b""))
        return self._engine.fetched(
            fill.session, fill.address, fill.nbytes, stream.deadline, lambda: stream.is_shut
        )

    def _probe_stream(self, stream: Stream, nbytes: int) -> None:
        stream.send(frames.REQUEST.pack(frames.PROBE, 0, 0, wait_ms(stream), nbytes))
        taking = _Taking(nbytes)
        while nbytes:
            fill = self._ask_for_fill(stream, taking, 0)
            if not 0 < fill.nbytes <= nbytes:
                raise ConnectionAbortedError("the peer fills more than was asked for")
            with self._read(stream, fill):
                stream.send(_READ)
            _hear_kept(stream)
            nbytes -= fill.nbytes


class _Answer(NamedTuple):
    """A row of a fill; ``digest`` is that of a part of a chunk, else zeros."""

    status: int
    tag: int
    length: int
    digest: bytes


class _Fill(NamedTuple):
    """What lies in a slot of the peer."""

    session: str
    address: int
    nbytes: int
    rows: list[_Answer]


class _Taking:
    """How much of a request the pace has let pass, and how much of it has come."""

    def __init__(self, nbytes: int) -> None:
        self._left = nbytes
        self._paid = 0

    def due(self, room: int) -> int:
        """Bytes to take from the pace before up to ``room`` come."""
        due = max(min(room, self._left) - self._paid, 0)
        self._paid += due
        return due

    def came(self, nbytes: int) -> None:
        """So many of them are about to come."""
        self._left -= nbytes
        self._paid -= nbytes


class _WindowServer(Server):
    """Answers through the engine's window."""

    def __init__(
        self,
        listener: socket.socket,
        keys: JobKeys,
        provider: Provider,
        pace: Pacer,
        engine: Engine,
    ) -> None:
        self._engine = engine
        super().__init__(listener, keys, provider, pace)

    def open_outbox(self, stream: Stream) -> Outbox:
        """See ``Server``."""
        return _WindowOutbox(stream, self._pace, self._engine, lambda: self._closed)


class _WindowOutbox(Outbox):
    """Answers on their way through a slot of the window, which it has from the first to a flush."""

    def __init__(
        self, stream: Stream, pace: Pacer, engine: Engine, stopped: Callable[[], bool]
    ) -> None:
        super().__init__(stream)
        self._pace = pace
        self._engine = engine
        self._stopped = stopped
        self._slot: Slot | None = None
        self._room = 0
        self._used = 0
        self._rows: list[bytes] = []

    def add(self, row: Row, served: Served) -> None:
        """See ``Outbox``; ``served`` is released at once."""
        try:
            size, end = served.view.nbytes, row.offset + row.length
            if size > SLOT_BYTES or (end != size if row.whole else end > size):
                self.refuse(row.tag, frames.RANGE)
                return
            with self._stream.within(HOLD_S, HOLD_MAX_S):
                slot = self._with_room(row.length)
            source = served.view.cast("B")[row.offset : end]
            _copy(source, slot.view[self._used : self._used + row.length])
            digest = _NO_DIGEST if row.whole else blake3(source).digest()
        finally:
            served.release()
        self._rows.append(_ROW.pack(frames.OK, row.tag, row.length, digest))
        self._used += row.length
        if self._used >= self._room:
            self.flush()

    def refuse(self, tag: int, status: int) -> None:
        """See ``Outbox``."""
        self._rows.append(_ROW.pack(status, tag, 0, _NO_DIGEST))
        if len(self._rows) >= frames.WANTS_MAX:
            self.flush()

    def send_nothing(self, tag: int, nbytes: int) -> None:
        """See ``Outbox``."""
        while nbytes:
            slot = self._with_room(0)
            self._used = min(nbytes, self._room)
            nbytes -= self._used
            slot.view[: self._used] = bytes(self._used)
            self._fill()

    def flush(self) -> None:
        """Let the client read all answers; on return their memory is free."""
        if self._rows:
            self._fill()
        self.release()

    def release(self) -> None:
        """Give up the slot and the answers in it."""
        self._rows.clear()
        self._used = self._room = 0
        slot, self._slot = self._slot, None
        if slot is not None:
            self._engine.serving.give(slot)

    def _with_room(self, nbytes: int) -> Slot:
        """The slot, with ``nbytes`` bytes free."""
        if self._slot is not None and self._used + nbytes > max(self._room, nbytes):
            self.flush()
        if not self._room:
            self._hear_room()
        if self._slot is None:
            self._slot = self._engine.serving.take(self._stream.deadline, self._stopped)
        return self._slot

    def _hear_room(self) -> None:
        (room,) = _ROOM.unpack(self._stream.receive(_ROOM.size))
        if not 0 < room <= SLOT_BYTES:
            raise ConnectionAbortedError("the peer sent a request that is not of this protocol")
        # Where the own pace is slow, too, the client hears often of what has come.
        self._room = min(room, _room(self._pace.sending))

    def _fill(self) -> None:
        if not self._room:
            self._hear_room()
        if self._used:
            self._stream.take(self._pace.sending, self._used)
        session = self._engine.session.encode()
        address = self._slot.address if self._slot is not None else 0
        head = _FILL.pack(address, self._used, len(self._rows), len(session))
        self._stream.send(b"".join([head, session, *self._rows]))
        if self._stream.receive(len(_READ)) != _READ:
            raise ConnectionAbortedError("the peer sent a request that is not of this protocol")
        self._stream.send(_KEPT)
        self._rows.clear()
        self._used = self._room = 0


def _arrived(want: Want, row: _Answer, view: memoryview) -> Outcome:
    if row.status != frames.OK:
        return failed(_STATUS_ERRORS[row.status])
    _copy(view, want.into.cast("B"))
    # Checked where it ends: strangers may write to the window.
    if not is_right(want, row.digest):
        return failed(DIGEST)
    return Outcome(ok=True, error="", bytes=row.length)


def _hear_kept(stream: Stream) -> None:
    """Return when the peer vouches for what lay in its slot. ConnectionError if it does not."""
    if stream.receive(len(_KEPT)) != _KEPT:
        raise ConnectionAbortedError("the peer sent an answer that is not of this protocol")


def _places(fill: _Fill, wants: Sequence[Want], left: set[int]) -> list[int]:
    """Where in the slot each row's bytes begin. ConnectionError for what was not asked for."""
    places, end, seen = [], 0, set[int]()
    for row in fill.rows:
        known = row.status == frames.OK or (row.status in _STATUS_ERRORS and not row.length)
        if row.tag not in left or row.tag in seen or not known:
            raise ConnectionAbortedError("the peer answered what it was not asked")
        if row.status == frames.OK and row.length != wants[row.tag].length:
            raise ConnectionAbortedError("the peer sent an answer of another length than asked")
        seen.add(row.tag)
        places.append(end)
        end += row.length
    if end != fill.nbytes or not fill.rows:
        raise ConnectionAbortedError("the peer sent an answer that is not of this protocol")
    return places


def _copy(source: memoryview, target: memoryview) -> None:
    if len(source):
        # numpy, because it frees the interpreter lock while it copies.
        np.frombuffer(target, np.uint8)[:] = np.frombuffer(source, np.uint8)


def _room(bucket: Bucket) -> int:
    """Bytes of a fill: fewer where the pace has to be kept."""
    return SLOT_BYTES if bucket.is_free else bucket.piece(PIECE_BYTES)


def _of_stream(address: str) -> str:
    if not address.startswith(SCHEME):
        raise InvalidInput(
            f"{address!r} is no address of the fabric mooncake, which begins with {SCHEME}; set "
            "GROUPIO_FABRIC to the same on all nodes"
        )
    return "tcp://" + address.removeprefix(SCHEME)
