"""Sessions that are made of the real link machines, over datagrams that may be lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from groupio.protocol import link as ln
from groupio.protocol.linkframe import Frame, FrameKind, end_of

if TYPE_CHECKING:
    from groupio.testing.sim.engine import Process
    from groupio.testing.sim.network import End, Network

BREAKS = 0.1
"""How often a datagram is lost because its connection breaks, which comes back at once."""


class Parcel:
    """A message as a link sees it: it has a length."""

    __slots__ = ("thing",)

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __len__(self) -> int:
        return 256


class LinkSession:
    """Two ends with a link machine each; the second one dials."""

    def __init__(self, network: Network, one: End, other: End) -> None:
        self.network = network
        self.ends = (one, other)
        self.open = [True, True]
        self._names = tuple(end_of(f"{end.process.name}", network.number()) for end in self.ends)
        now = network.engine.now
        self._links: list[ln.Link | None] = [None, ln.Link(self._names[1], now)]
        self._waiting: list[Any] = []
        """What the listening end wants to say before it exists."""
        self._timers = [0, 0]
        self.vanished = False
        """It ended because the connection below it did."""
        self._handle(1, ln.Tick(now))

    def send(self, source: End, payload: Any) -> None:
        """Send to the other end; nothing happens when the session is over."""
        side = 0 if self.ends[0] is source else 1
        if self._links[side] is None:
            self._waiting.append(payload)
        else:
            packed = self.network.packed(payload)
            parcel: Any = packed if packed is not payload else Parcel(payload)
            self._handle(side, ln.Send(self.network.engine.now, parcel))

    def finish(self, source: End, why: str) -> None:
        """One end closes the session; the other hears of it, or nothing any more."""
        side = 0 if self.ends[0] is source else 1
        self.open[side] = False
        if self._links[side] is not None:
            self._handle(side, ln.Close(self.network.engine.now, why))

    def _handle(self, side: int, event: ln.Event) -> None:
        link = self._links[side]
        assert link is not None
        engine, end = self.network.engine, self.ends[side]
        for effect in link.handle(event):
            if isinstance(effect, ln.Transmit):
                self._transmit(side, effect.frame)
            elif isinstance(effect, ln.StartTimer):
                self._timers[side] += 1
                engine.post(effect.delay_s, end.process, self._tick, side, self._timers[side])
            elif isinstance(effect, ln.Deliver):
                if self.open[side]:
                    parcel: Any = effect.payload
                    whole = parcel.thing if isinstance(parcel, Parcel) else parcel
                    end.heard(self, self.network.unpacked(whole))
            elif isinstance(effect, ln.Lost) and self.open[side]:
                self.open[side] = False
                self.vanished = link.vanished
                end.lost(self, effect.reason)

    def disconnect(self, process: Process | None = None) -> None:
        """The connection below ends, as both ends see if they can; or ``process`` did."""
        for side in (0, 1):
            end, other = self.ends[side], self.ends[1 - side]
            if end.process is not process and self.network.reaches(other.host, end.host):
                delay = self.network.sim.hop(end.process, remote=True)
                self.network.engine.post(delay, end.process, self._unreachable, side)

    def _unreachable(self, side: int) -> None:
        if self._links[side] is not None:
            self._handle(side, ln.Unreachable(self.network.engine.now))

    def _tick(self, side: int, timer: int) -> None:
        if timer == self._timers[side]:
            self._handle(side, ln.Tick(self.network.engine.now))

    def _transmit(self, side: int, frame: Frame) -> None:
        source, target = self.ends[side], self.ends[1 - side]
        network = self.network
        delays = network.datagram(source, target)
        dropped = not delays and network.reaches(source.host, target.host)
        if dropped and network.sim.rng.random() < BREAKS:
            self.disconnect()
        for delay in delays:
            network.engine.post(delay, target.process, self._received, 1 - side, frame)

    def _received(self, side: int, frame: Frame) -> None:
        now = self.network.engine.now
        if self._links[side] is None:
            if frame.kind is not FrameKind.OPEN or not self.open[side]:
                return
            self._links[side] = ln.Link(self._names[side], now, peer=frame.source)
            self._handle(side, ln.Received(now, frame))
            waiting, self._waiting = self._waiting, []
            for payload in waiting:
                self.send(self.ends[side], payload)
            return
        self._handle(side, ln.Received(now, frame))
