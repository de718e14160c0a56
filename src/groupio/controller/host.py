"""One job's controller at work: its machine, its store, its timers, and the ways to its nodes.

It lives in an agent, or in a controller process of its own. The machine runs in the event loop;
store calls and plans run in the job's own thread, one after the other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from msgspec.structs import replace

from groupio.controller import messages as cm
from groupio.controller.away import Away
from groupio.controller.describe import describe
from groupio.controller.lines import Line, Lines
from groupio.controller.store import JobStore
from groupio.errors import GroupIOError, StorageError, StorageFull, to_wire
from groupio.exhaustion import ThreadPool
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol.controller import Controller

if TYPE_CHECKING:
    from groupio.controller.swarms import Swarms

log = logging.getLogger(__name__)

PLANS_KEPT = 4
"""Plans of earlier epochs that are kept: a job saves groups of few shapes."""


class Surroundings(Protocol):
    """What a host asks of the process that it lives in; called in the event loop."""

    def do(self, step: Callable[[], None]) -> None:
        """Run ``step`` after the steps before it."""

    def post(self, step: Callable[[], None]) -> None:
        """Like ``do``, from any thread."""

    def order(self, host: Host, effect: fx.Effect) -> None:
        """Pass an order, or news of a member, on to the node that it concerns."""

    def store_opened(self, host: Host) -> None:
        """The controller knows its store now."""

    def delete_segments(self, host: Host, group: int) -> None:
        """Delete what this node's idle flush job wrote; called from the store's thread."""

    def see(self, group: int, rank: int, place: int, length: int) -> memoryview | None:
        """Bytes of a lease of this node; called from the store's thread."""


@dataclass(slots=True, eq=False)
class Host:
    """Runs one controller and executes its effects."""

    path: str
    store: JobStore
    around: Surroundings
    numbers: Iterator[int]
    lines: Lines = field(default_factory=lambda: Lines(""))
    """The agents that take part; empty where the controller serves its own agent only."""
    term: int = 0
    """The rule under which this controller acts; 0 for its own agent only."""
    backend_bytes_per_s: float | None = None
    """What the store takes from all nodes together; None: no limit is known."""
    controller: Controller = field(init=False)
    away: Away = field(default_factory=Away)
    timers: dict[str, asyncio.TimerHandle] = field(default_factory=dict)
    _over: bool = False
    """It acts no more: orders of a rule that has ended are nobody's."""
    _shared: bool = False
    """Agents of other nodes reach the store too."""
    _view: int = 0
    """The number of the opened store of which the machine knows."""
    _settling: list[tuple[Line, cm.ClientSettles]] = field(default_factory=list)
    _plans: Any = None
    _swarms: Swarms | None = None
    """The reads of several nodes."""
    _thread: ThreadPool = field(init=False)

    def __post_init__(self) -> None:
        self.controller = Controller(
            numbers=self.numbers,
            node=self.lines.own,
            resumes=self.term > 0,
            proves=self.term > 0,
        )
        self._thread = ThreadPool(1, "store")
        if self.term:
            # Imported here: an agent whose jobs are all of one node does without.
            from groupio.controller.swarms import Swarms

            self._swarms = Swarms(self._execute, self.backend_bytes_per_s)

    @property
    def idle(self) -> bool:
        """No group and no question to the store is outstanding."""
        machine = self.controller
        return not (machine.groups or machine.opening or machine.waiting)

    # -- events -----------------------------------------------------------------------------------

    def tell(self, event: ev.ControllerEvent) -> None:
        """Feed an event to the machine and execute its effects, after the steps before it."""
        self.around.do(lambda: self._handle(event))
        if isinstance(event, ev.StoreOpened):
            self.around.do(lambda: self.around.store_opened(self))

    def hear(self, line: Line, event: ev.ControllerEvent) -> None:
        """Feed an event that an agent sent, unless the agent was refused before."""
        self.around.do(lambda: None if line.refused else self._handle(event))

    def _handle(self, event: ev.ControllerEvent) -> None:
        if self._over:
            return
        if self._swarms is not None:
            self.lines.note(event)
            self._swarms.note(event)
        self._run(self.controller.handle(event))
        self.away.note(event, self.controller)
        if self._settling:
            self.around.do(self._settle)

    def read(self, message: Any) -> None:
        """Take what a node says of a grouped read."""
        if self._swarms is not None:
            self.around.do(partial(self._swarms.take, message))

    def joined(self, line: Line, event: ev.NodeJoined) -> None:
        """An agent takes part from now on; an older line of the same life is of no use."""
        self.around.do(lambda: self._join(line, event))

    def _join(self, line: Line, event: ev.NodeJoined) -> None:
        if self._over:
            line.peer.close("the controller has ended")
            return
        # In one step with the event: no order goes to a node before the machine knows it anew.
        older = self.lines.by_node.get(event.node)
        self.lines.by_life[event.life] = line
        free = event.node != self.lines.own
        if free and (older is None or older.hello.life == event.life):
            self.lines.by_node[event.node] = line
            if older is not None and older is not line:
                older.peer.close()
        # A store that two nodes reach is not lost with one of them, whatever its file system is.
        self._shared = True
        self.controller.node_local = False
        self._handle(event)

    def lose_line(self, line: Line, why: str) -> None:
        """The line to an agent ended."""
        if self.lines.by_life.get(line.hello.life) is line:
            del self.lines.by_life[line.hello.life]
        if self.lines.by_node.get(line.node) is line:
            del self.lines.by_node[line.node]
            self.lines.memory.pop(line.node, None)
            self.tell(ev.NodeLost(line.node, line.hello.life, why))

    def settle(self, line: Line, message: cm.ClientSettles) -> None:
        """Answer once all epochs that others staged are decided."""
        self.open_store()
        self._settling.append((line, message))
        self.around.do(self._settle)

    def _settle(self) -> None:
        still = []
        for line, message in self._settling:
            if self.lines.by_node.get(line.node) is not line:
                continue  # its agent asks again when it is back
            if self.controller.opening or self.controller.undecided_for(message.client):
                still.append((line, message))
            else:
                line.send(cm.ClientSettled(message.client, message.request_id))
        self._settling = still

    def begin(self, before: tuple[str, str] | None) -> None:
        """Open the job's store, and do without the vanished agent that had the controller."""
        if before is not None:
            self.tell(ev.NodeLost(*before, "its process ended"))
        self.open_store()

    def open_store(self) -> None:
        """Open the job's store if there is one, ahead of its first save."""
        self.around.do(lambda: self._run(self.controller.open_store(create=False)))

    def _answer(self, event: ev.ControllerEvent) -> None:
        self.around.post(lambda: self.tell(event))

    def _run(self, effects: list[fx.Effect]) -> None:
        for effect in effects:
            self.around.do(partial(self._execute, effect))

    def _execute(self, effect: fx.Effect) -> None:
        if self._over:
            return
        match effect:
            case fx.StartTimer() | fx.StopTimer():
                self._timer(effect)
            case (
                fx.OpenStore()
                | fx.CreateLineage()
                | fx.PublishInflight()
                | fx.PrepareEpoch()
                | fx.CompareEpoch()
                | fx.Decide()
                | fx.ForgetInflight()
                | fx.LeaveMark()
                | fx.FindMark()
                | fx.RemoveMarks()
                | fx.MakePlan()
            ):
                run, failed = self._task(effect)
                self._thread.submit(run).add_done_callback(lambda done: self._finish(done, failed))
            case _:
                self._send(effect)

    def _send(self, effect: fx.Effect) -> None:
        """Pass on an order or news; what concerns a node that is gone concerns nobody."""
        if isinstance(effect, fx.RefuseNode):
            refused = self.lines.by_life.get(effect.life)
            if refused is not None:
                refused.refused = True
                refused.send(cm.NodeRefused(to_wire(effect.error)))
            return
        if not self.term or self.lines.target(effect) == self.lines.own:
            self.around.order(self, effect)
            return
        line = self.lines.by_node.get(self.lines.target(effect))
        if line is not None:
            line.send(effect)

    def _timer(self, effect: fx.StartTimer | fx.StopTimer) -> None:
        handle = self.timers.pop(effect.name, None)
        if handle is not None:
            handle.cancel()
        if isinstance(effect, fx.StartTimer):
            loop = asyncio.get_running_loop()
            self.timers[effect.name] = loop.call_later(effect.delay_s, self._fire, effect.name)

    def _fire(self, name: str) -> None:
        self.timers.pop(name, None)
        if self._swarms is not None and name.startswith("read "):
            self.around.do(partial(self._swarms.fire, name))
        else:
            self.tell(ev.TimerFired(name))

    # -- the store's thread -----------------------------------------------------------------------

    def _finish(
        self,
        done: Future[ev.ControllerEvent | None],
        failed: Callable[[GroupIOError], ev.ControllerEvent | None],
    ) -> None:
        views = self.store.views
        if self.term and views != self._view:
            self.around.post(lambda: self._note_view(views))
        error = done.exception()
        if error is None:
            event = done.result()
        else:
            if not isinstance(error, GroupIOError):
                log.error("store call of %s failed", self.path, exc_info=error)
                error = StorageError(f"The store {self.path} failed: {error!r}.", path=self.path)
            event = failed(error)
        if event is not None:
            self._answer(event)

    def _note_view(self, views: int) -> None:
        """The store's thread may have opened the store anew: what agents proved is void."""
        if views != self._view:
            self._view = views
            self.tell(ev.StoreRenewed())

    def _task(
        self, effect: fx.Effect
    ) -> tuple[
        Callable[[], ev.ControllerEvent | None],
        Callable[[GroupIOError], ev.ControllerEvent | None],
    ]:
        match effect:
            case fx.OpenStore(held=held, create=create, resume=resume):
                return lambda: self._open(held, create, resume), ev.StoreUnavailable
            case fx.CreateLineage(lineage=line):
                return (
                    lambda: ev.LineageCreated(self.store.create_lineage(line)),
                    lambda e: ev.LineageCreated(None, e),
                )
            case fx.PublishInflight(group=group):
                return (
                    lambda: self._publish(effect),
                    lambda e: ev.InflightPublished(group, e),
                )
            case fx.PrepareEpoch(group=group):
                see = partial(self.around.see, group)
                paths = dict(self.lines.paths)
                view = self._view if self.term else None
                return (
                    lambda: ev.Prepared(group, self.store.prepare(effect, see, paths, view)),
                    lambda e: ev.Prepared(group, error=e),
                )
            case fx.CompareEpoch(group=group):
                return (
                    lambda: ev.Compared(group, self.store.compare(effect)),
                    lambda e: ev.Compared(group, False, e),
                )
            case fx.Decide(group=group):
                view = self._view if self.term else None
                return (
                    lambda: self._decide(effect, view),
                    lambda e: ev.Decided(group, False, False, e),
                )
            case fx.ForgetInflight(key=key):
                return lambda: self.store.forget(key), lambda e: None
            case fx.LeaveMark(proof=proof):
                return (
                    lambda: self.store.leave_mark(proof),
                    lambda e: ev.MarkLeft(proof, error=e),
                )
            case fx.FindMark(proof=proof, name=name):
                return (
                    lambda: self.store.find_mark(proof, name),
                    lambda e: ev.MarkFound(proof, error=e),
                )
            case fx.RemoveMarks(own=own, shown=shown):
                return lambda: self.store.remove_marks(own, shown), lambda e: None
            case fx.MakePlan(group=group, round=number):
                framed = self.controller.groups[group].first.door == "dcp"
                return (
                    lambda: self._plan(effect, framed),
                    lambda e: ev.Planned(group, number, None, e),
                )
        raise AssertionError(f"not a store effect: {effect!r}")

    def _open(self, held: tuple[Any, ...], create: bool, resume: bool) -> ev.StoreOpened:
        state = self.store.open(held, create=create, resume=resume)
        return ev.StoreOpened(replace(state, node_local=state.node_local and not self._shared))

    def _publish(self, effect: fx.PublishInflight) -> ev.InflightPublished:
        self.store.publish(effect)
        return ev.InflightPublished(effect.group)

    def _plan(self, effect: fx.MakePlan, framed: bool) -> ev.Planned:
        # Imported here: an agent whose groups are all on one node does without.
        from groupio.plan.cache import PlanCache
        from groupio.plan.labels import label_moves
        from groupio.protocol.storing import make_plan

        self._plans = self._plans or PlanCache(PLANS_KEPT)
        planned = make_plan(effect, backend_bytes_per_s=self.backend_bytes_per_s, cache=self._plans)
        if not framed or planned.plan is None:
            return planned
        return replace(planned, plan=label_moves(planned.plan, effect.reports))

    def _decide(self, effect: fx.Decide, view: int | None) -> ev.Decided:
        committed, ours = self._make_room(effect, view)
        return ev.Decided(effect.group, committed, ours)

    def _make_room(self, effect: fx.Decide, view: int | None) -> tuple[bool, bool]:
        """Decide; on a full store, where nobody can commit the attempt, out of its own room."""
        room: list[Callable[[], None]] = []
        if effect.drop_segments_if_full:
            room = [
                lambda: self.around.delete_segments(self, effect.group),
                lambda: self.store.forget(effect.key),
            ]
        while True:
            try:
                return self.store.decide(effect, view)
            except StorageFull:
                if not room:
                    raise
                room.pop(0)()

    def run(self, task: Callable[[], None]) -> None:
        """Run ``task`` in the job's thread, after what is there; its errors are logged."""

        def guarded() -> None:
            try:
                task()
            except Exception:
                log.exception("a task of %s failed", self.path)

        self._thread.submit(guarded)

    def describe(self) -> dict[str, Any]:
        """The job's state as plain values, for ``groupio status``."""
        return describe(self)

    def hang_up(self, why: str) -> None:
        """Act no more, and end the lines to all agents; in the event loop, ahead of :meth:`end`.

        What the store's thread is at comes to its end, and its answer to nobody.
        """
        self._over = True
        for handle in self.timers.values():
            handle.cancel()
        self.timers.clear()
        for line in {*self.lines.by_node.values(), *self.lines.by_life.values()}:
            line.send(cm.ControllerEnds())
            line.peer.close(why)
        self.lines.by_node.clear()
        self.lines.by_life.clear()

    def close(self) -> None:
        """Close the store once its thread has done what it has."""
        self.controller.store_closed()
        self.run(self.store.close)

    def end(self) -> None:
        """Close the store and end the thread."""
        for handle in self.timers.values():
            handle.cancel()
        self.close()
        self._thread.shutdown(wait=True)
