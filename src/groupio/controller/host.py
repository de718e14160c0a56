"""One job's controller at work: its machine, its store, its timers, and the ways to its nodes.

It lives in an agent, or in a controller process of its own. The machine runs in the event loop;
store calls and plans run in the job's own thread, one after the other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from groupio.controller.store import JobStore
from groupio.errors import GroupIOError, StorageError, StorageFull
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol.controller import Controller

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
    controller: Controller = field(init=False)
    timers: dict[str, asyncio.TimerHandle] = field(default_factory=dict)
    _plans: Any = None
    _thread: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        self.controller = Controller(numbers=self.numbers)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")

    @property
    def idle(self) -> bool:
        """No group and no question to the store is outstanding."""
        return not self.controller.groups and not self.controller.opening

    # -- events -----------------------------------------------------------------------------------

    def tell(self, event: ev.ControllerEvent) -> None:
        """Feed an event to the machine and execute its effects, after the steps before it."""
        self.around.do(lambda: self._run(self.controller.handle(event)))
        if isinstance(event, ev.StoreOpened):
            self.around.do(lambda: self.around.store_opened(self))

    def open_store(self) -> None:
        """Open the job's store if there is one, ahead of its first save."""
        self.around.do(lambda: self._run(self.controller.open_store(create=False)))

    def _answer(self, event: ev.ControllerEvent) -> None:
        self.around.post(lambda: self.tell(event))

    def _run(self, effects: list[fx.Effect]) -> None:
        for effect in effects:
            self.around.do(partial(self._execute, effect))

    def _execute(self, effect: fx.Effect) -> None:
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
                | fx.MakePlan()
            ):
                run, failed = self._task(effect)
                self._thread.submit(run).add_done_callback(lambda done: self._finish(done, failed))
            case _:
                self.around.order(self, effect)

    def _timer(self, effect: fx.StartTimer | fx.StopTimer) -> None:
        handle = self.timers.pop(effect.name, None)
        if handle is not None:
            handle.cancel()
        if isinstance(effect, fx.StartTimer):
            loop = asyncio.get_running_loop()
            self.timers[effect.name] = loop.call_later(effect.delay_s, self._fire, effect.name)

    def _fire(self, name: str) -> None:
        self.timers.pop(name, None)
        self.tell(ev.TimerFired(name))

    # -- the store's thread -----------------------------------------------------------------------

    def _finish(
        self,
        done: Future[ev.ControllerEvent | None],
        failed: Callable[[GroupIOError], ev.ControllerEvent | None],
    ) -> None:
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
                return (
                    lambda: ev.Prepared(group, self.store.prepare(effect, see)),
                    lambda e: ev.Prepared(group, error=e),
                )
            case fx.CompareEpoch(group=group, key=key):
                committed = self.controller.committed[key]
                return (
                    lambda: ev.Compared(group, self.store.compare(effect, committed)),
                    lambda e: ev.Compared(group, False, e),
                )
            case fx.Decide(group=group):
                return (
                    lambda: self._decide(effect),
                    lambda e: ev.Decided(group, False, False, e),
                )
            case fx.ForgetInflight(key=key):
                return lambda: self.store.forget(key), lambda e: None
            case fx.MakePlan(group=group, round=number):
                return (
                    lambda: self._plan(effect),
                    lambda e: ev.Planned(group, number, None, e),
                )
        raise AssertionError(f"not a store effect: {effect!r}")

    def _open(self, held: tuple[Any, ...], create: bool, resume: bool) -> ev.StoreOpened:
        return ev.StoreOpened(self.store.open(held, create=create, resume=resume))

    def _publish(self, effect: fx.PublishInflight) -> ev.InflightPublished:
        self.store.publish(effect)
        return ev.InflightPublished(effect.group)

    def _plan(self, effect: fx.MakePlan) -> ev.Planned:
        # Imported here: an agent whose groups are all on one node does without.
        from groupio.plan.cache import PlanCache
        from groupio.plan.grouped import plan_group

        self._plans = self._plans or PlanCache(PLANS_KEPT)
        plan = plan_group(
            effect.reports,
            effect.nodes,
            replicas=effect.replicas,
            shares=effect.shares,
            lost=frozenset(effect.lost),
            done=effect.done,
            copies=effect.copies,
            cache=self._plans,
        )
        return ev.Planned(effect.group, effect.round, plan)

    def _decide(self, effect: fx.Decide) -> ev.Decided:
        committed, ours = self._make_room(effect)
        return ev.Decided(effect.group, committed, ours)

    def _make_room(self, effect: fx.Decide) -> tuple[bool, bool]:
        """Decide; on a full store, where nobody can commit the attempt, out of its own room."""
        room: list[Callable[[], None]] = []
        if effect.drop_segments_if_full:
            room = [
                lambda: self.around.delete_segments(self, effect.group),
                lambda: self.store.forget(effect.key),
            ]
        while True:
            try:
                return self.store.decide(effect)
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
