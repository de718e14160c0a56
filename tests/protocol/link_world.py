"""Two or more ends of links, a clock, and a network that loses, doubles, delays and reorders."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from groupio.protocol import link as lk
from groupio.protocol.link import Link
from groupio.protocol.linkconfig import LinkConfig
from groupio.protocol.linkframe import Frame, decode_frame, encode_frame, end_of, reject
from groupio.protocol.listener import Listener

FAST = LinkConfig(
    heartbeat_s=0.5,
    silence_s=4.0,
    retry_s=0.2,
    retry_max_s=0.6,
    ack_delay_s=0.02,
    fragment_bytes=4,
    window_bytes=12,
    window_frames=3,
    message_bytes=40,
    queue_bytes=4000,
    queue_frames=1000,
)


@dataclass
class Told:
    """What a session told its user."""

    link: Link
    opened: bytes | None = None
    messages: list[bytes] = field(default_factory=list)
    lost: str | None = None
    lost_at: float = -1.0
    closed: bool = False

    @property
    def ended(self) -> bool:
        return self.link.ended


class LinkWorld:
    """A dialling process and a listening one; ``told`` is by the name of the end."""

    def __init__(
        self,
        seed: int,
        *,
        config: LinkConfig = FAST,
        drop: float = 0.0,
        double: float = 0.0,
        delay_s: float = 0.01,
        on_message: Callable[[LinkWorld, Link, bytes], None] | None = None,
    ) -> None:
        self.random = random.Random(seed)
        self.config = config
        self.drop, self.double, self.delay_s = drop, double, delay_s
        self.now = 100.0
        self.cut: set[str] = set()
        self.told: dict[str, Told] = {}
        self.frames = 0
        self.data_frames = 0
        self.held_most = 0
        self.flight_most = 0
        self._on_message = on_message
        self._numbers = count(1)
        self._order = count()
        self._agenda: list[tuple[float, int, Any, Any]] = []
        self._timers: dict[str, int] = {}
        self.listener = Listener(
            "bb", lambda: next(self._numbers), hello=b"from b", config=config, ends_max=3
        )

    def dial(self) -> Told:
        link = Link(
            end_of("aa", next(self._numbers)), self.now, hello=b"from a", config=self.config
        )
        self.told[link.own] = told = Told(link)
        self.feed(link, lk.Tick(self.now))
        return told

    def send(self, link: Link, payload: bytes) -> None:
        self.feed(link, lk.Send(self.now, payload))

    def close(self, link: Link) -> None:
        self.told[link.own].closed = True
        self.feed(link, lk.Close(self.now))

    def other(self, told: Told) -> Told:
        return self.told[told.link.peer]

    def feed(self, link: Link, event: lk.Event) -> None:
        effects = link.handle(event)
        told = self.told[link.own]
        self.held_most = max(self.held_most, link.held_bytes)
        for effect in effects:
            assert told.lost is None
            match effect:
                case lk.Transmit(frame):
                    self.transmit(frame)
                case lk.StartTimer(delay_s):
                    number = next(self._order)
                    self._timers[link.own] = number
                    heapq.heappush(self._agenda, (self.now + delay_s, number, link, None))
                case lk.Opened(hello):
                    assert told.opened is None
                    told.opened = hello
                case lk.Deliver(payload):
                    assert told.opened is not None
                    told.messages.append(payload)
                    if self._on_message:
                        self._on_message(self, link, payload)
                case lk.Lost(reason):
                    told.lost, told.lost_at = reason, self.now
        if (
            link.ended
            and link.own.startswith("bb")
            and self.listener.route(self.now, Frame("x", link.own, lk.FrameKind.ACK))
        ):
            self.listener.drop(link)

    def transmit(self, frame: Frame) -> None:
        self.frames += 1
        self.data_frames += frame.kind is lk.FrameKind.DATA
        frame = decode_frame(encode_frame(frame))
        if frame.source[:2] in self.cut or self.random.random() < self.drop:
            return
        for _ in range(2 if self.random.random() < self.double else 1):
            at = self.now + self.random.uniform(0, self.delay_s)
            heapq.heappush(self._agenda, (at, next(self._order), None, frame))

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        end = self.now + seconds
        while not until() and self._agenda and self._agenda[0][0] <= end:
            at, number, link, frame = heapq.heappop(self._agenda)
            if link is not None:
                if self._timers[link.own] == number:
                    self.now = at
                    self.feed(link, lk.Tick(at))
                continue
            self.now = at
            self.arrive(frame)
        if not until():
            self.now = end

    def arrive(self, frame: Frame) -> None:
        if frame.target.startswith("aa"):
            found = self.told[frame.target].link
            link = None if found.ended else found
        else:
            link = self.listener.route(self.now, frame)
        if link is None:
            answer = reject(frame)
            if answer:
                self.transmit(answer)
            return
        self.told.setdefault(link.own, Told(link))
        self.feed(link, lk.Received(self.now, frame))
