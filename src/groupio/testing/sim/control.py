"""A controller as an agent hosts it: its timers, its store calls, and the agents that follow it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from groupio.controller.messages import FROM_READER, ControllerEnds
from groupio.controller.swarms import TIMERS, Swarms
from groupio.errors import GroupIOError
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol.controller import Controller
from groupio.protocol.group import Group, Phase
from groupio.testing.sim.engine import brief
from groupio.testing.sim.network import AnySession
from groupio.testing.sim.store import JobStore, Procedure, Steps

if TYPE_CHECKING:
    from groupio.testing.sim.node import Node
    from groupio.testing.sim.world import Sim

STORE_EFFECTS = (
    fx.OpenStore,
    fx.CreateLineage,
    fx.PublishInflight,
    fx.PrepareEpoch,
    fx.CompareEpoch,
    fx.Decide,
    fx.ForgetInflight,
    fx.LeaveMark,
    fx.FindMark,
    fx.RemoveMarks,
)
OF_NODES = (ev.NodeJoined, ev.NodeLost)
SEATED = (fx.TellReached, fx.TellFailed, fx.TellUnreachable)
PLAN_S = 0.003


class Control:
    """One rule of one controller; it lives and dies with its agent process."""

    def __init__(self, sim: Sim, node: Node, term: int) -> None:
        self.sim = sim
        self.node = node
        self.host = node.name
        self.process = node.process
        self.term = term
        self.over = False
        self.machine: Controller = sim.new_controller(node, term)
        self.store = JobStore(sim, node.name, f"t{term}")
        self.steps = Steps(sim, self.process, node.name)
        self.swarms = Swarms(self.execute)
        self.timers: dict[str, object] = {}
        self.peers: dict[str, AnySession] = {}
        self._strangers: dict[str, AnySession] = {}
        self._tasks: deque[Any] = deque()
        self._running: dict[Any, int] = {}
        sim.controls.append(self)
        sim.trace(node.name, f"hosts the controller of term {term}")

    def part(self) -> None:
        """Its agents hear that another one rules."""
        for session in self.peers.values():
            session.send(self, (self.term, ControllerEnds()))

    def stop(self) -> None:
        """It rules no more; its store calls go on as long as the process does."""
        if not self.over:
            self.over = True
            self.timers.clear()
            self.sim.controls.remove(self)
            for session in list(self.peers.values()):
                self.sim.network.end(session, "the controller stopped", self)

    # -- events -------------------------------------------------

    def feed(self, event: Any) -> None:
        """Give an event to the machine and execute its effects."""
        if self.over:
            return
        if self.sim.engine.tracing:
            self.sim.trace(f"control {self.term}", f"<- {brief(event)}")
        if isinstance(event, FROM_READER):
            self.swarms.take(event)
            return
        if isinstance(event, OF_NODES):
            self.sim.loads.spoil()
            self.swarms.note(event)
        for effect in self.machine.handle(event):
            self.execute(effect)
        self.sim.sample()

    def heard(self, session: AnySession, payload: Any) -> None:
        """A report of an agent arrives."""
        if not isinstance(payload, ev.NodeJoined):
            self.feed(payload)
            return
        name = payload.node
        old = self.peers.get(name)
        if old is not None and self.sim.life_of(old) != payload.life:
            # Another agent has this name; if it is to stay, this one hears that it is refused.
            self._strangers[name] = session
        elif old is not session:
            self.peers[name] = session
            if old is not None:
                self.sim.network.end(old, "the agent connected again", self)
        self.feed(payload)
        self._strangers.pop(name, None)

    def lost(self, session: AnySession, why: str) -> None:
        """The connection to an agent is over."""
        name = session.ends[1].host
        if self.peers.get(name) is session:
            del self.peers[name]
            self.feed(ev.NodeLost(name, self.sim.life_of(session), why))

    def execute(self, effect: Any) -> None:
        """Do one thing that the machine asks for."""
        if self.sim.engine.tracing:
            self.sim.trace(f"control {self.term}", f"-> {brief(effect)}")
        if isinstance(effect, STORE_EFFECTS):
            self._tasks.append(effect)
            self._next_tasks()
        elif isinstance(effect, fx.StartTimer):
            token = object()
            self.timers[effect.name] = token
            delay = effect.delay_s
            self.sim.engine.post(delay, self.process, self._fire, effect.name, token)
        elif isinstance(effect, fx.StopTimer):
            self.timers.pop(effect.name, None)
        elif isinstance(effect, fx.MakePlan):
            delay = PLAN_S * 300 ** self.sim.rng.random() * self.process.slow
            self.sim.engine.post(delay, self.process, self._plan, effect)
        elif isinstance(effect, SEATED):
            self.sim.oracle.tells(self, effect)
            self._send(self.sim.ranks[effect.seat.client].node.name, effect)
        else:
            if isinstance(effect, fx.AdmitGroup):
                self.sim.oracle.admits(self, effect)
            self._send(effect.node, effect)

    def _send(self, name: str, effect: Any) -> None:
        node = self.sim.nodes[name]
        if node is self.node:
            self.sim.engine.post(0.0, self.process, node.follower.order, self.term, effect)
        elif isinstance(effect, fx.RefuseNode) and name in self._strangers:
            self._strangers[name].send(self, (self.term, effect))
        elif name in self.peers:
            self.peers[name].send(self, (self.term, effect))

    def _fire(self, name: str, token: object) -> None:
        if self.timers.get(name) is token:
            del self.timers[name]
            if name.startswith(TIMERS):
                self.swarms.fire(name)
            elif "deadline" not in self.sim.guards or not name.startswith(("group", "open")):
                self.feed(ev.TimerFired(name))

    def _plan(self, effect: Any) -> None:
        if not self.over:
            self.feed(self.sim.plan(effect))

    # -- the store -------------------------------------------------

    def _next_tasks(self) -> None:
        """Start what may run: tasks of one key in order, an opening after all before it."""
        waiting: deque[Any] = deque()
        blocked = set(self._running)
        for task in self._tasks:
            key = getattr(task, "key", task) if self.sim.options.parallel_store else "all"
            barrier = isinstance(task, fx.OpenStore)
            free = not blocked if barrier else key not in blocked and "open" not in blocked
            if free:
                self._running["open" if barrier else key] = 1
                blocked = set(self._running)
                self.sim.engine.post(
                    0.0, self.process, self._start, task, "open" if barrier else key
                )
            else:
                waiting.append(task)
                blocked.add("open" if barrier else key)
        self._tasks = waiting

    def _start(self, task: Any, key: Any) -> None:
        procedure, failed = self._task(task)

        def done(answer: Any, error: GroupIOError | None) -> None:
            self._running.pop(key, None)
            event = answer if error is None else failed(error)
            if event is not None:
                self.feed(event)
            self._next_tasks()

        self.steps.start(procedure, done)

    def _task(self, effect: Any) -> tuple[Procedure, Callable[[GroupIOError], Any]]:
        store = self.store
        match effect:
            case fx.OpenStore():
                return store.open(effect), ev.StoreUnavailable
            case fx.CreateLineage(lineage=line):
                self.sim.oracle.begins(self, line)
                return store.create_lineage(line), lambda e: ev.LineageCreated(None, e)
            case fx.PublishInflight(group=group):
                return store.publish(effect), lambda e: ev.InflightPublished(group, e)
            case fx.PrepareEpoch(group=group):
                return store.prepare(effect), lambda e: ev.Prepared(group, error=e)
            case fx.CompareEpoch(group=group, key=key):
                content = self.machine.committed.get(key, b"")
                return store.compare(effect, content), lambda e: ev.Compared(group, False, e)
            case fx.Decide(group=group):
                return store.decide(effect), lambda e: ev.Decided(group, False, False, e)
            case fx.ForgetInflight(key=key):
                return store.forget(key), lambda e: None
            case fx.LeaveMark(proof=proof):
                return store.leave_mark(proof), lambda e: ev.MarkLeft(proof, error=e)
            case fx.FindMark(proof=proof, name=name):
                return store.find_mark(proof, name), lambda e: ev.MarkFound(proof, error=e)
            case fx.RemoveMarks(own=own, shown=shown):
                return store.marks.remove((*own, *shown)), lambda e: None
        raise AssertionError(f"not a store effect: {effect!r}")

    def look(self) -> None:
        """Someone connects: the store is opened and recovered, if there is one."""
        self.machine.store_closed()
        for effect in self.machine.open_store(create=False):
            self.execute(effect)

    @property
    def busy(self) -> bool:
        """Groups or store calls are under way."""
        return bool(self.machine.groups or self.machine.opening or self._running or self._tasks)

    def steps_now(self) -> set[str]:
        """The steps in which this controller's groups are."""
        return {_step(group) for group in self.machine.groups.values()}


def _step(group: Group) -> str:
    """The step of a group, finer than its phase where a plan is made and carried out."""
    storing = group.storing
    if group.phase is not Phase.STORING or storing is None:
        return group.phase.value
    if not storing.all_hashed:
        return "hashing"
    return "planning" if not storing.planned or storing._planning else "storing"
