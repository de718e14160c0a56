"""A session between two processes over a transport that may lose, double and reorder frames.

Messages arrive once and in order, or the session ends on both sides::

    dialling end:   OPENING --ACCEPT--> OPEN ------> ENDED
    listening end:  HALF    --any-----> OPEN ------> ENDED

The dialling end takes the first ACCEPT and from then on only frames of that end; the listening end
stands once a frame names it. So no two listening ends ever share one dialling end, and what was
delivered in one session is never delivered again in another.

A session ends (``Lost``) when nothing was heard for ``silence_s``, when the peer says BYE or
breaks the protocol, when it acknowledges nothing for ``stall_s`` or leaves too much unread. When
one direction is cut at a time T, with frames in flight for at most D seconds, both ends are lost
by T + 2 * (silence_s + D): the deaf one by silence, the other by its BYE or its silence.

It ends sooner when the transport has no way to the peer: the system of a process that dies closes
its connections at once. The peer is in doubt then until a frame of it comes, over another way; the
session ends after ``doubt_s`` without one. A paused process keeps its connections, and a cut ends
none: both show by silence only.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import NamedTuple

import msgspec

from groupio.errors import InvalidInput
from groupio.protocol.linkconfig import LinkConfig
from groupio.protocol.linkframe import (
    HELLO_BYTES_MAX,
    Frame,
    FrameKind,
    bye,
    life_of,
)

_NEVER = float("inf")

_SLACK_S = 1e-6
"""A timer may run out so much early: adding a delay to a clock rounds."""


class _Event(msgspec.Struct, frozen=True, gc=False):
    """Base of the events; ``now`` is the driver's monotonic clock in seconds."""

    now: float


class Send(_Event, frozen=True):
    """Bring ``payload`` to the peer. InvalidInput when it is longer than ``message_bytes``."""

    payload: bytes


class Received(_Event, frozen=True):
    """A frame came over the transport."""

    frame: Frame


class Tick(_Event, frozen=True):
    """The timer ran out. The first Tick of a dialling end sends the OPEN."""


class Unreachable(_Event, frozen=True):
    """The transport's way to the peer is gone, or a dialling end gets none; only a hint."""


class Ask(_Event, frozen=True):
    """Ask the peer for a sign of life now."""


class Close(_Event, frozen=True):
    """End the session now, and tell the peer why; what was not delivered yet may be lost.

    No Lost follows. Without a reason the peer is not told and waits for silence.
    """

    reason: str = "closed by the peer"


class _Effect(msgspec.Struct, frozen=True, gc=False):
    """Base of the effects."""


class Transmit(_Effect, frozen=True):
    """Hand the frame to the transport; it may be lost."""

    frame: Frame


class Opened(_Effect, frozen=True):
    """The session stands; ``hello`` is what the peer said of itself."""

    hello: bytes


class Deliver(_Effect, frozen=True):
    """The next message of the peer."""

    payload: bytes


class Lost(_Effect, frozen=True):
    """The session ended; messages that were sent last may not have arrived."""

    reason: str


class StartTimer(_Effect, frozen=True):
    """Feed a Tick back after ``delay_s``; replaces the timer set before."""

    delay_s: float


Event = Send | Received | Tick | Unreachable | Ask | Close
Effect = Transmit | Opened | Deliver | Lost | StartTimer


class _Part(NamedTuple):
    """A numbered message or fragment that is not acknowledged yet."""

    seq: int
    payload: bytes
    more: bool


class Link:
    """The machine of one end. After Lost or Close it answers every event with nothing.

    ``own`` is the end's name (:func:`groupio.protocol.linkframe.end_of`). Without ``peer`` it is a
    dialling end: feed it a Tick at once. With ``peer``, the source of an OPEN, it is the listening
    end that this frame made: feed it that frame. ``now`` as in the events.
    """

    def __init__(
        self,
        own: str,
        now: float,
        *,
        hello: bytes = b"",
        peer: str = "",
        config: LinkConfig | None = None,
    ) -> None:
        if len(hello) > HELLO_BYTES_MAX:
            raise InvalidInput(
                f"a hello of {len(hello)} bytes exceeds the limit of {HELLO_BYTES_MAX}"
            )
        self.own = own
        self.peer = peer
        self.config = config = config or LinkConfig()
        self.opened = False
        self.ended = False
        self.vanished = False
        """It ended because there was no way to the peer, and none came in time."""
        self._dials = not peer
        self._hello = hello
        self._peer_hello = b""
        self._now = now
        self._armed = _NEVER
        self._heard = now
        self._sent = now
        self._excused = False
        self._probes_left = 0
        self._probe_at = _NEVER
        # sending
        self._queue: deque[tuple[bytes, bool]] = deque()
        self._queue_bytes = 0
        self._unacked: deque[_Part] = deque()
        self._unacked_bytes = 0
        self._next_seq = 1
        self._progress = now
        self._retry_at = now
        self._backoff_s = config.retry_s
        self._recover = 0
        self._again = 1
        self._sent_again = 0
        # receiving
        self._ack = 0
        self._ack_at = _NEVER
        self._owed_bytes = 0
        self._owed_frames = 0
        self._early: dict[int, Frame] = {}
        self._early_bytes = 0
        self._parts: list[bytes] = []
        self._parts_bytes = 0

    @property
    def peer_life(self) -> str:
        """The life of the peer's process, "" as long as it is not known."""
        return life_of(self.peer)

    @property
    def backlog_bytes(self) -> int:
        """Bytes that were sent and not acknowledged, or wait to be sent."""
        return self._queue_bytes + self._unacked_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes received and not delivered yet."""
        return self._early_bytes + self._parts_bytes

    def handle(self, event: Event) -> list[Effect]:
        """What follows from ``event``, in order."""
        if self.ended:
            return []
        self._now = max(self._now, event.now)
        effects: list[Effect] = []
        if isinstance(event, Received):
            self._received(event.frame, effects)
        elif isinstance(event, Send):
            self._send(event.payload, effects)
        elif isinstance(event, Tick):
            self._tick(effects)
        elif isinstance(event, Close):
            self._end(effects, say=event.reason)
        elif isinstance(event, Ask):
            if self.opened:
                self._transmit(FrameKind.PROBE, effects)
        elif self._probe_at == _NEVER and (self.opened or self._dials):
            self._probes_left = self.config.probes
            self._probe(effects)
        if not self.ended:
            self._arm(effects)
        return effects

    # -- sending -------------------------------------------------------------------------------

    def _send(self, payload: bytes, effects: list[Effect]) -> None:
        size, step = len(payload), self.config.fragment_bytes
        if size > self.config.message_bytes:
            raise InvalidInput(
                f"a message of {size} bytes exceeds the limit of {self.config.message_bytes} bytes"
                " between nodes; save fewer items per epoch"
            )
        frames = len(self._queue) + max(1, -(-size // step))
        if self._queue_bytes + size > self.config.queue_bytes or frames > self.config.queue_frames:
            return self._end(effects, lost=f"the peer left {self.backlog_bytes} bytes unread")
        if size <= step:
            self._queue.append((payload, False))
        else:
            for at in range(0, size, step):
                self._queue.append((payload[at : at + step], at + step < size))
        self._queue_bytes += size
        return self._pump(effects)

    def _pump(self, effects: list[Effect]) -> None:
        """Send what the window has room for."""
        while self.opened and self._queue and self._has_room(len(self._queue[0][0])):
            payload, more = self._queue.popleft()
            self._queue_bytes -= len(payload)
            if not self._unacked:
                self._progress = self._now
                self._restart_retry()
            part = _Part(self._next_seq, payload, more)
            self._next_seq += 1
            self._unacked.append(part)
            self._unacked_bytes += len(payload)
            self._transmit_part(part, effects)

    def _has_room(self, size: int) -> bool:
        return not self._unacked or (
            self._unacked_bytes + size <= self.config.window_bytes
            and len(self._unacked) < self.config.window_frames
        )

    def _transmit_part(self, part: _Part, effects: list[Effect]) -> None:
        self._transmit(FrameKind.DATA, effects, part.seq, part.more, part.payload)

    def _transmit(
        self,
        kind: FrameKind,
        effects: list[Effect],
        seq: int = 0,
        more: bool = False,
        payload: bytes = b"",
    ) -> None:
        effects.append(Transmit(Frame(self.own, self.peer, kind, seq, self._ack, more, payload)))
        self._sent = self._now
        self._ack_at = _NEVER
        self._owed_bytes = self._owed_frames = 0

    def _restart_retry(self) -> None:
        self._backoff_s = self.config.retry_s
        self._retry_at = self._now + self._backoff_s

    def _acked(self, ack: int, effects: list[Effect]) -> None:
        if not self._unacked or self._unacked[0].seq > ack:
            return
        while self._unacked and self._unacked[0].seq <= ack:
            self._unacked_bytes -= len(self._unacked.popleft().payload)
        self._progress = self._now
        self._restart_retry()
        if self._unacked and self._unacked[0].seq <= self._recover:
            self._again *= 2
            self._send_again(effects)
        self._pump(effects)

    def _send_again(self, effects: list[Effect]) -> None:
        """Frames sent before the last retry are likely lost too: 1, 2, 4, ... per round trip."""
        for part in list(islice(self._unacked, self._again)):
            if self._sent_again < part.seq <= self._recover:
                self._sent_again = part.seq
                self._transmit_part(part, effects)

    # -- receiving -----------------------------------------------------------------------------

    def _received(self, frame: Frame, effects: list[Effect]) -> None:
        if frame.kind is FrameKind.OPEN:
            if not self._dials and frame.source == self.peer and not self.opened:
                self._peer_hello = frame.payload
                self._transmit(FrameKind.ACCEPT, effects, payload=self._hello)
                self._back_off()
        elif frame.target != self.own:
            pass
        elif frame.kind is FrameKind.BYE:
            if self.peer in ("", frame.source):
                reason = frame.payload.decode("utf-8", "replace") or "a BYE"
                self._end(effects, lost=reason, say="")
        elif not self.peer:
            if frame.kind is FrameKind.ACCEPT and frame.source:
                self.peer = frame.source
                self._peer_hello = frame.payload
                self._taken(frame, effects)
        elif self.peer == frame.source:
            self._taken(frame, effects)
        else:
            # A late copy of the OPEN made a second listening end; nobody will ever speak to it.
            effects.append(Transmit(bye(self.own, frame.source, "the peer has another session")))

    def _taken(self, frame: Frame, effects: list[Effect]) -> None:
        """A frame of this very session."""
        self._heard = self._now
        self._excused = False
        self._probe_at = _NEVER
        if not self.opened:
            self.opened = True
            effects.append(Opened(self._peer_hello))
            self._pump(effects)
        if frame.ack >= self._next_seq:
            return self._break(f"frame {frame.ack} acknowledged that was never sent", effects)
        self._acked(frame.ack, effects)
        if frame.kind in (FrameKind.ACCEPT, FrameKind.PROBE):
            self._ack_at = self._now  # the other end stays half open, or in doubt, without it
        elif frame.kind is FrameKind.DATA:
            self._data(frame, effects)
        if not self.ended and self._ack_at <= self._now:
            self._transmit(FrameKind.ACK, effects)
        return None

    def _data(self, frame: Frame, effects: list[Effect]) -> None:
        size, step = len(frame.payload), self.config.fragment_bytes
        if size > step or (frame.more and size < step):
            return self._break(f"a fragment of {size} bytes instead of {step}", effects)
        ahead = frame.seq - self._ack
        if ahead == 1:
            self._in_order(frame, effects)
            while not self.ended and (early := self._early.pop(self._ack + 1, None)) is not None:
                self._early_bytes -= len(early.payload)
                self._in_order(early, effects)
            return None
        fits = self._early_bytes + size <= self.config.window_bytes
        if 1 < ahead <= self.config.window_frames and fits and frame.seq not in self._early:
            self._early[frame.seq] = frame
            self._early_bytes += size
        # Say what is missing, or that it is here already: the last ACK may be lost.
        self._ack_at = self._now
        return None

    def _in_order(self, frame: Frame, effects: list[Effect]) -> None:
        """Take the next frame; deliver the message that ends with it."""
        config = self.config
        size = len(frame.payload)
        self._ack = frame.seq
        self._owed_bytes += size
        self._owed_frames += 1
        due = (
            self._owed_bytes * 4 >= config.window_bytes
            or self._owed_frames * 4 >= config.window_frames
        )
        self._ack_at = min(self._ack_at, self._now + (0.0 if due else config.ack_delay_s))
        if not self._parts and not frame.more:
            effects.append(Deliver(frame.payload))
            return
        self._parts.append(frame.payload)
        self._parts_bytes += size
        if self._parts_bytes > config.message_bytes:
            self._break(f"a message of {self._parts_bytes} bytes or more", effects)
        elif not frame.more:
            effects.append(Deliver(b"".join(self._parts)))
            self._parts = []
            self._parts_bytes = 0

    # -- time ----------------------------------------------------------------------------------

    def _tick(self, effects: list[Effect]) -> None:
        config, now = self.config, self._now + _SLACK_S
        if now - self._armed > config.heartbeat_s and not self._excused:
            # This process was paused: what it did not hear may wait in its buffers.
            self._heard = max(self._heard, now - config.silence_s + config.heartbeat_s)
            self._excused = True
        self._armed = _NEVER
        if now >= self._probe_at:
            # After a late timer the answer may wait in this process: that time does not count.
            self._probes_left -= now < self._probe_at + config.probe_s
            if not self._probes_left:
                self.vanished = True
                what = "its connection was closed" if self.opened else "it takes no connection"
                silent_s = now - self._heard
                return self._end(effects, lost=f"{what}, and it was silent for {silent_s:.1f} s")
            self._probe(effects)
        if now >= self._heard + config.silence_s:
            what = "nothing was heard of the peer" if self.opened else "the peer did not answer"
            return self._end(effects, lost=f"{what} for {now - self._heard:.1f} s")
        if not self.opened:
            if now >= self._retry_at:
                kind = FrameKind.OPEN if self._dials else FrameKind.ACCEPT
                self._transmit(kind, effects, payload=self._hello)
                self._back_off()
            return None
        if self._unacked and now >= self._progress + config.stall_s:
            silent_s = now - self._progress
            return self._end(effects, lost=f"the peer acknowledged nothing for {silent_s:.1f} s")
        if self._unacked and now >= self._retry_at:
            self._recover = self._unacked[-1].seq
            self._again, self._sent_again = 1, 0
            self._send_again(effects)
            self._back_off()
        if now >= min(self._ack_at, self._sent + config.heartbeat_s):
            self._transmit(FrameKind.ACK, effects)
        return None

    def _probe(self, effects: list[Effect]) -> None:
        """One more chance for a peer in doubt; before the session stands, the OPENs ask."""
        self._probe_at = self._now + self.config.probe_s
        if self.opened:
            self._transmit(FrameKind.PROBE, effects)

    def _back_off(self) -> None:
        self._retry_at = self._now + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, self.config.retry_max_s)

    def _arm(self, effects: list[Effect]) -> None:
        """Set the timer when something is due before it runs out."""
        due = min(self._heard + self.config.silence_s, self._probe_at)
        if not self.opened:
            due = min(due, self._retry_at)
        else:
            due = min(due, self._sent + self.config.heartbeat_s, self._ack_at)
            if self._unacked:
                due = min(due, self._retry_at, self._progress + self.config.stall_s)
        if due < self._armed:
            self._armed = due
            effects.append(StartTimer(max(0.0, due - self._now)))

    def _break(self, what: str, effects: list[Effect]) -> None:
        self._end(effects, lost=f"the peer broke the protocol: {what}")

    def _end(self, effects: list[Effect], *, lost: str = "", say: str | None = None) -> None:
        """End the session; tell the user ``lost`` and the peer ``say`` ("": nothing)."""
        self.ended = True
        self._queue.clear()
        self._unacked.clear()
        self._early.clear()
        self._parts = []
        self._queue_bytes = self._unacked_bytes = self._early_bytes = self._parts_bytes = 0
        reason = f"the other side gave up: {lost}" if say is None else say
        if self.peer and reason:
            effects.append(Transmit(bye(self.own, self.peer, reason)))
        if lost:
            effects.append(Lost(lost))
