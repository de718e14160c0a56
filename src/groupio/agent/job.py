"""One job in the agent: its controller, its store, and the thread that calls the store."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from groupio.agent.store import JobStore
from groupio.errors import GroupIOError, StorageError, StorageFull
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol.controller import Controller

log = logging.getLogger(__name__)

Answer = Callable[[ev.ControllerEvent], None]


@dataclass(slots=True, eq=False)
class Job:
    """Executes the store effects of one controller, one after the other, off the event loop.

    ``answer`` takes events from any thread.
    """

    path: str
    store: JobStore
    numbers: Iterator[int]
    answer: Answer
    delete_segments: Callable[[int], None]
    see: Callable[[int, int, int, int], memoryview | None]
    """Bytes of a lease of the job's groups: ``see(group, rank, place, length)``."""
    controller: Controller = field(init=False)
    settling: list[Any] = field(default_factory=list)
    _thread: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        self.controller = Controller(numbers=self.numbers)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")

    @property
    def idle(self) -> bool:
        """No group and no question to the store is outstanding."""
        return not self.controller.groups and not self.controller.opening

    def execute(self, effect: fx.Effect) -> None:
        """Run a store effect in the job's thread; its answer comes as an event."""
        run, failed = self._task(effect)
        self._thread.submit(run).add_done_callback(lambda done: self._finish(done, failed))

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
            self.answer(event)

    def _task(
        self, effect: fx.Effect
    ) -> tuple[
        Callable[[], ev.ControllerEvent | None],
        Callable[[GroupIOError], ev.ControllerEvent | None],
    ]:
        match effect:
            case fx.OpenStore(held=held, create=create):
                return lambda: self._open(held, create), ev.StoreUnavailable
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
                return (
                    lambda: ev.Prepared(
                        group, self.store.prepare(effect, partial(self.see, group))
                    ),
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
        raise AssertionError(f"not a store effect: {effect!r}")

    def _open(self, held: tuple[Any, ...], create: bool) -> ev.StoreOpened:
        return ev.StoreOpened(self.store.open(held, create=create))

    def _publish(self, effect: fx.PublishInflight) -> ev.InflightPublished:
        self.store.publish(effect)
        return ev.InflightPublished(effect.group)

    def _decide(self, effect: fx.Decide) -> ev.Decided:
        committed, ours = self._make_room(effect)
        return ev.Decided(effect.group, committed, ours)

    def _make_room(self, effect: fx.Decide) -> tuple[bool, bool]:
        """Decide; on a full store, where nobody can commit the attempt, out of its own room."""
        room: list[Callable[[], None]] = []
        if effect.drop_segments_if_full:
            room = [
                lambda: self.delete_segments(effect.group),
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
        self.close()
        self._thread.shutdown(wait=True)
