"""The driver of the machine by which an agent finds, follows and replaces its controller.

Rules are records in the store, created if absent, one for each term.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from groupio.controller.messages import ControllerEnds
from groupio.errors import GroupIOError
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol import following as fo
from groupio.testing.sim.control import Control
from groupio.testing.sim.disk import TORN
from groupio.testing.sim.network import AnySession
from groupio.testing.sim.store import STORE_ID

if TYPE_CHECKING:
    from groupio.testing.sim.node import Node
    from groupio.testing.sim.world import Sim

WATCH_S = 3.0
"""A new rule is known everywhere after at most so long."""

REFUSED_CONNECT_S = 0.2

LATER = (ev.MemberGone, ev.MemberFailed)
"""What a controller has to hear of even if it happened while it could not be reached."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One controller's rule over the job."""

    term: int
    node: str
    life: str


class Follower:
    """The agent's side of its connection to the controller."""

    def __init__(self, sim: Sim, node: Node) -> None:
        self.sim = sim
        self.node = node
        self.process = node.process
        self.host = node.name
        self.life = node.life
        self.machine = fo.Following(node.name, node.life)
        self.session: AnySession | None = None
        self._timers: dict[str, object] = {}
        self._missed: deque[Any] = deque(maxlen=1 << 12)

    def begin(self) -> None:
        """Find the controller, or become it."""
        if self.sim.options.local:
            self.node.hosted = Control(self.sim, self.node, self.node.lives)
        else:
            self._run(self.machine.start())

    # -- the machine -------------------------------------------------

    def feed(self, event: Any) -> None:
        """Give an event to the machine and execute its effects."""
        self._run(self.machine.handle(event))

    def _run(self, effects: list[Any]) -> None:
        for effect in effects:
            self._execute(effect)

    def _execute(self, effect: Any) -> None:
        steps, engine = self.node.steps, self.sim.engine
        match effect:
            case fo.Execute(order=order):
                self.node.execute(order)
            case fx.StartTimer(name=name, delay_s=delay):
                self._timers[name] = token = object()
                engine.post(delay, self.process, self._fire, name, token)
            case fx.StopTimer(name=name):
                self._timers.pop(name, None)
            case fo.FindController():
                steps.start(self._look(), self._found)
            case fo.Campaign(over=over):
                steps.start(self._stand(over), self._found)
            case fo.ConnectTo(term=term, address=address):
                delay = self.sim.hop(self.process, remote=True)
                engine.post(delay, self.process, self._connect, term, address)
            case fo.SendJoin():
                self._join()
            case fo.Host(term=term, vanished=before):
                self.node.hosted = Control(self.sim, self.node, term)
                if before is not None:
                    self.node.hosted.feed(ev.NodeLost(*before, "its process ended"))
                self.sim.announce(Rule(term, self.node.name, self.node.life))
                engine.post(0.0, self.process, self.feed, fo.LinkUp(term))
            case fo.StopHosting():
                if self.node.hosted is not None:
                    self.node.hosted.part()
                    self.node.hosted.stop()
                    self.node.hosted = None
            case fo.LeaveTerm():
                self._hang_up("another controller rules")
                self.node.reads.left()
                self.node.feed(ev.ControllerLeft(tuple(self.node.machine.groups)))
            case _:
                raise AssertionError(f"following asks for {effect!r}")

    def _fire(self, name: str, token: object) -> None:
        if self._timers.get(name) is token:
            del self._timers[name]
            self.feed(ev.TimerFired(name))

    # -- rules -------------------------------------------------

    def _look(self) -> Generator[str, str, Rule | None]:
        """The newest rule in the store."""
        yield "list"
        found: Rule | None = None
        for _, file in sorted(self.sim.disk.folders["controllers"].items()):
            if file.content is not TORN:
                found = file.content
        return found

    def _stand(self, over: int) -> Generator[str, str, Rule | None]:
        """Become the controller of a new term, or learn who is."""
        newest = yield from self._look()
        if newest is not None and newest.term > over:
            return newest
        term = max(over, newest.term if newest is not None else 0) + 1
        mine = Rule(term, self.node.name, self.node.life)
        if (yield from self.node.records.put("controllers", f"{term:08d}", mine)):
            return mine
        return (yield from self._look())

    def watch(self) -> None:
        """Look whether there is a newer rule than the one that is followed."""
        if self.process.alive and not (self.seeking or self.sim.options.local):
            self.node.steps.start(self._look(), self._seen)

    def _seen(self, rule: Rule | None, error: GroupIOError | None) -> None:
        if rule is not None and not self.seeking:
            self.hear(rule)

    def _found(self, rule: Rule | None, error: GroupIOError | None) -> None:
        if error is not None:
            self.feed(fo.CoordinatorFailed(error))
        elif rule is None:
            self.feed(fo.NoRule())
        else:
            self.hear(rule)

    def hear(self, rule: Rule) -> None:
        """Who rules is known."""
        self.feed(fo.RuleFound(rule.term, rule.node, rule.node, rule.life))

    # -- the connection -------------------------------------------------

    def _connect(self, term: int, address: str) -> None:
        if term != self.machine.term or self.session is not None:
            return
        network = self.sim.network
        control = next((c for c in self.sim.controls if c.term == term), None)
        ways = network.reaches(self.host, address) and network.reaches(address, self.host)
        if control is None or control.process.paused or not ways:
            vanished = control is None and ways
            down = fo.LinkDown(term, "the controller does not answer", vanished)
            self.sim.engine.post(REFUSED_CONNECT_S, self.process, self.feed, down)
            return
        self.session = network.connect(control, self)
        self.feed(fo.LinkUp(term))

    def _hang_up(self, why: str) -> None:
        if self.session is not None:
            self.sim.network.end(self.session, why, self)
            self.session = None

    def _join(self) -> None:
        node = self.node
        held = node.machine.held(tuple(node.machine.groups))
        names = {(o.client, o.save_id) for group in held for o in group.opened}
        opens = tuple(o for key, o in node.opens.items() if key not in names)
        self._send(
            ev.NodeJoined(
                node.name,
                node.life,
                node.address(),
                node.link(),
                STORE_ID,
                held,
                tuple(node.clients.values()),
                opens,
                f"/store/of/{node.name}",
            )
        )
        while self._missed:
            self._send(self._missed.popleft())
        self.node.reads.joined()

    def _send(self, event: Any) -> None:
        if self.node.hosted is not None:
            self.sim.engine.post(0.0, self.process, self.node.hosted.feed, event)
        elif self.session is not None:
            self.session.send(self, event)

    @property
    def seeking(self) -> bool:
        """It has no controller now."""
        return not (self.sim.options.local or self.machine.joined)

    def report(self, event: Any) -> None:
        """Send an event to the controller; what it must know waits for the next one."""
        if not self.seeking:
            self._send(event)
        elif isinstance(event, LATER):
            self._missed.append(event)

    def order(self, term: int, effect: Any) -> None:
        """An order of the controller of a term."""
        if self.sim.options.local:
            self.node.execute(effect)
        elif isinstance(effect, ControllerEnds):
            self.feed(fo.RulerLeft(term))
        elif isinstance(effect, fx.RefuseNode):
            self.sim.trace(self.host, f"is refused: {effect.error.message}")
            self._hang_up("refused")
            self.feed(fo.JoinRefused(term, effect.error))
            self.node.reads.left()
        else:
            self.feed(fo.OrderCame(term, effect))

    def heard(self, session: AnySession, payload: Any) -> None:
        """An order arrives over a connection."""
        self.order(*payload)

    def lost(self, session: AnySession, why: str) -> None:
        """The connection to the controller is over."""
        if session is self.session:
            self.session = None
            self.feed(fo.LinkDown(self.machine.term, why, session.vanished))
            self.node.reads.left()
