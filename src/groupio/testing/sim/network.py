"""The network between nodes: sessions that keep their order while they last, and what breaks them.

A lost datagram of a session is sent again later, so that it costs time; a cut or a silent peer
ends the session on both sides. Bytes travel by pulls, which fail when the peer cannot be reached.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

from groupio.controller.messages import FROM_CONTROLLER, FROM_NODE
from groupio.protocol import events as ev
from groupio.protocol.wireform import WireForm
from groupio.testing.sim.engine import Process
from groupio.testing.sim.links import LinkSession

if TYPE_CHECKING:
    from groupio.testing.sim.world import Sim

SILENCE_S = 5.0
"""A peer of which nothing was heard for so long is lost."""

RESEND_S = 0.3

ONCE = (ev.NodeJoined,)
"""What begins a connection; everything else may come twice to a machine, one after the other."""


@dataclass(frozen=True, slots=True)
class Packed:
    """The bytes of a message; those of an order with the term in which it was given."""

    data: bytes
    term: int | None = None
    once: bool = False

    def __len__(self) -> int:
        return len(self.data)


class End(Protocol):
    """One end of a session."""

    process: Process
    host: str

    def heard(self, session: AnySession, payload: Any) -> None:
        """A message arrived, in order."""

    def lost(self, session: AnySession, why: str) -> None:
        """The session is over; nothing more arrives."""


class Session:
    """Messages between two processes, in order and each once, until it breaks."""

    __slots__ = ("at", "ends", "networks", "open", "stuck", "vanished")

    def __init__(self, network: Network, one: End, other: End) -> None:
        self.networks = network
        self.ends = (one, other)
        self.open = [True, True]
        self.vanished = False
        """It ended because a process did."""
        self.at = [0.0, 0.0]
        """When the last message to each end arrives."""
        self.stuck: tuple[list[Any], list[Any]] = ([], [])
        """Messages to each end that cannot pass now, in order."""

    def send(self, source: End, payload: Any) -> None:
        """Send to the other end; nothing happens when the session is over."""
        side = 0 if self.ends[0] is source else 1
        if self.open[side]:
            self.networks.carry(self, side, self.networks.packed(payload))

    def arrive(self, side: int, payload: Any) -> None:
        """A message reaches its end."""
        if self.open[side]:
            self.ends[side].heard(self, self.networks.unpacked(payload))

    def close(self, side: int, why: str) -> None:
        """One end learns that the session is over."""
        if self.open[side]:
            self.open[side] = False
            self.ends[side].lost(self, why)


AnySession = Session | LinkSession


class Network:
    """Who reaches whom, and how long it takes."""

    def __init__(self, sim: Sim) -> None:
        self.sim = sim
        self.engine = sim.engine
        self.blocked: set[tuple[str, str]] = set()
        """Ordered pairs of nodes: nothing passes from the first to the second."""
        self.clogged: dict[tuple[str, str], float] = {}
        """Until when messages between two nodes wait."""
        self.sessions: list[Session] = []
        self.links: list[LinkSession] = []
        self._numbers = count(1)
        self._forms = (WireForm(FROM_NODE), WireForm(FROM_CONTROLLER))

    # -- bytes -------------------------------------------------

    def packed(self, payload: Any) -> Any:
        """A message as it travels: as bytes, in worlds in which that is tried."""
        if not self.sim.options.wire:
            return payload
        if isinstance(payload, tuple):
            term, order = payload
            return Packed(self._forms[1].encode(order), term)
        return Packed(self._forms[0].encode(payload), once=isinstance(payload, ONCE))

    def unpacked(self, payload: Any) -> Any:
        """The message as its receiver gets it."""
        if not isinstance(payload, Packed):
            return payload
        if payload.term is None:
            return self._forms[0].decode(payload.data)
        return payload.term, self._forms[1].decode(payload.data)

    # -- sessions -------------------------------------------------

    def number(self) -> int:
        """A number that is used once."""
        return next(self._numbers)

    def connect(self, one: End, other: End) -> AnySession:
        """A new session; the caller has seen that both reach each other."""
        if self.sim.options.real_links:
            self.links = [s for s in self.links if s.open[0] or s.open[1]]
            self.links.append(LinkSession(self, one, other))
            return self.links[-1]
        session = Session(self, one, other)
        self.sessions = [s for s in self.sessions if s.open[0] or s.open[1]]
        self.sessions.append(session)
        return session

    def reaches(self, source: str, target: str) -> bool:
        """Messages pass from one node to the other now."""
        return source == target or (source, target) not in self.blocked

    def carry(self, session: Session, side: int, payload: Any) -> None:
        """Bring a message from one end of a session to the other."""
        source, target = session.ends[side], session.ends[1 - side]
        sim, pair = self.sim, (source.host, target.host)
        delay = sim.hop(source.process, remote=source.host != target.host)
        twice = False
        if source.host != target.host:
            row = sim.network_fault()
            if row == "drop":
                delay += RESEND_S * (1 + sim.rng.random())
            elif row in ("delay", "reorder"):
                delay += sim.rng.random() * (2.0 if row == "delay" else 0.05)
            once = payload.once if isinstance(payload, Packed) else isinstance(payload, ONCE)
            twice = row == "duplicate" and not once
            delay = max(delay, self.clogged.get(pair, 0.0) - self.engine.now)
            if pair in self.blocked or session.stuck[1 - side]:
                session.stuck[1 - side].append(payload)
                if len(session.stuck[1 - side]) == 1:
                    self.engine.post(RESEND_S, None, self._try_again, session, side)
                return
        at = max(session.at[1 - side], self.engine.now + delay)
        session.at[1 - side] = at
        self.engine.post_at(at, target.process, session.arrive, 1 - side, payload)
        if twice:
            self.engine.post_at(at, target.process, session.arrive, 1 - side, payload)

    def _try_again(self, session: Session, side: int) -> None:
        """What could not pass is sent again until it can, or the session is over."""
        source, target = session.ends[side], session.ends[1 - side]
        stuck = session.stuck[1 - side]
        if not (session.open[0] and session.open[1]):
            stuck.clear()
        elif (source.host, target.host) in self.blocked:
            self.engine.post(RESEND_S, None, self._try_again, session, side)
        else:
            at = max(session.at[1 - side], self.engine.now)
            session.at[1 - side] = at
            for payload in stuck:
                self.engine.post_at(at, target.process, session.arrive, 1 - side, payload)
            stuck.clear()

    def delay(self, process: Process, source: str, target: str) -> float:
        """How long a request or its answer takes from one node to another, in seconds."""
        delay = self.sim.hop(process, remote=True)
        if self.sim.network_fault() in ("drop", "delay"):
            delay += self.sim.rng.random()
        return max(delay, self.clogged.get((source, target), 0.0) - self.engine.now)

    def datagram(self, source: End, target: End) -> list[float]:
        """The delays of all copies of a datagram that arrive, in seconds."""
        sim, pair = self.sim, (source.host, target.host)
        row = sim.network_fault()
        if row == "drop" or pair in self.blocked:
            return []
        delay = sim.hop(source.process, remote=True)
        if row in ("delay", "reorder"):
            delay += sim.rng.random() * (2.0 if row == "delay" else 0.05)
        delay = max(delay, self.clogged.get(pair, 0.0) - self.engine.now)
        return [delay, delay + sim.rng.random()] if row == "duplicate" else [delay]

    # -- cuts -------------------------------------------------

    def cut(self, pairs: list[tuple[str, str]]) -> None:
        """Nothing passes between these ordered pairs of nodes any more."""
        self.blocked.update(pairs)
        for session in self.sessions:
            if self._crosses(session, pairs):
                self.engine.post(SILENCE_S, None, self._silent, session)

    def join(self, pairs: list[tuple[str, str]]) -> None:
        """These pairs reach each other again."""
        self.blocked.difference_update(pairs)

    def _crosses(self, session: Session, pairs: list[tuple[str, str]]) -> bool:
        one, other = session.ends[0].host, session.ends[1].host
        return (one, other) in pairs or (other, one) in pairs

    def _silent(self, session: Session) -> None:
        """Silence is long enough for an end to give up; then the other end hears nothing either."""
        hosts = session.ends[0].host, session.ends[1].host
        if hosts in self.blocked or hosts[::-1] in self.blocked:
            self.end(session, f"nothing was heard for {SILENCE_S} s")

    def watch(self, process: Process, suspended: Callable[[], bool]) -> None:
        """The peers of a process that stops answering give it up after a while."""
        for session in self.sessions:
            if any(end.process is process for end in session.ends):
                self.engine.post(SILENCE_S, None, self._unanswered, session, suspended)

    def _unanswered(self, session: Session, suspended: Callable[[], bool]) -> None:
        if suspended():
            self.end(session, f"nothing was heard for {SILENCE_S} s")

    def process_ended(self, process: Process, *, silent: bool) -> None:
        """The system of a dead process closes its connections; ``silent``: it is dead itself."""
        for session in self.sessions:
            if any(end.process is process for end in session.ends):
                session.vanished = True
                self.end(session, "the peer closed the connection")
        for link in self.links:
            if not silent and any(end.process is process for end in link.ends):
                link.disconnect(process)

    def end(self, session: AnySession, why: str, source: End | None = None) -> None:
        """Both ends of a session learn, each in its time, that it is over."""
        if isinstance(session, LinkSession):
            assert source is not None
            session.finish(source, why)
            return
        for side in (0, 1):
            if session.open[side]:
                delay = self.sim.rng.random() * 0.01
                self.engine.post(delay, session.ends[side].process, session.close, side, why)
