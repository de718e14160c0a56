"""A process that hosts the controller of one store and has no staging memory of its own.

It wins its rule in a coordinator as an agent would. Where that has leases (etcd), a second process
stands by and takes over; in the store itself there are none, and the second one ends at once when
the first still answers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from blake3 import blake3

import groupio
from groupio.agent.identity import Writer, reachable
from groupio.controller import messages as cm
from groupio.controller.coordinator import Coordinator, Rule
from groupio.controller.discover import Kind, Where
from groupio.controller.gate import Gate, no_such_job
from groupio.controller.host import Host
from groupio.controller.keys import Keys
from groupio.controller.lines import Lines
from groupio.controller.opening import open_coordinator
from groupio.controller.probing import is_taken, rules_still
from groupio.controller.sockets import numeric, require_keys
from groupio.controller.store import JobStore
from groupio.errors import ControllerLost, GroupIOError, InvalidInput
from groupio.protocol import effects as fx

log = logging.getLogger(__name__)

ASK_S = 15.0
"""How long the coordinator may take for one question."""

KEEP_S = 2.0
"""How often the process looks whether it still rules."""

STANDBY_S = 10.0
"""A process that stands by asks for the end of the other's rule so long at a time."""

RETRY_S = 1.0
"""Between two tries to reach a coordinator that does not answer."""

DRAIN_S = 60.0
"""How long groups in flight may take when the process is asked to end; others finish the rest."""


@dataclass(frozen=True, slots=True)
class Duty:
    """What such a process is to do."""

    path: str
    """The store's path; made, for ``job``, when there is none."""
    job: str
    node: str
    """The process's name among the nodes of the job, for messages."""
    host: str
    """Address or name at which agents reach it; ``0.0.0.0`` is every address of this machine."""
    port: int
    """Port for agents; 0: any."""
    where: Where
    """Where the rule is won."""
    file_mode: int | None = None
    backend_bytes_per_s: float | None = None
    job_said: bool = False
    """Somebody named the job: a store of another one is refused."""


@dataclass(slots=True, eq=False)
class Service:
    """The process at work; ``run`` in its event loop.

    ``on_news`` is told what happens, in one word and one sentence: "rules", "stands by", "lost".
    """

    duty: Duty
    on_news: Callable[[str, str], None] = lambda word, text: None
    life: str = field(default_factory=lambda: uuid.uuid4().hex)
    rule: Rule | None = None
    """The rule that this process holds."""
    _host: Host | None = None
    _queue: deque[Callable[[], None]] = field(default_factory=deque)
    _running: bool = False
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _deposed: asyncio.Event = field(default_factory=asyncio.Event)
    _why: str = ""
    _broken: bool = False
    _loop: asyncio.AbstractEventLoop | None = None

    @property
    def address(self) -> str:
        """Where agents reach it, "" while it does not rule."""
        return "" if self.rule is None else self.rule.address

    def stop(self) -> None:
        """Finish what is in flight if that is soon, give the rule up and end."""
        self._stop.set()

    async def run(self) -> None:
        """Rule, or stand by, until ``stop``.

        ControllerLost when another rules and there is nothing to wait for, or when the rule was
        lost for good. StorageError or InvalidInput when the store cannot be opened, or the
        address cannot be listened at.
        """
        self._loop = asyncio.get_running_loop()
        duty = self.duty
        token = Keys.from_env(os.environ)
        listens_at = f"tcp://{duty.host}:{duty.port}"
        if numeric(duty.host):
            require_keys(listens_at, duty.host, token, "listen on")
        gate: Gate | None = None
        writer = Writer.of_this_process()
        store = JobStore(duty.path, duty.job, duty.node, writer, duty.file_mode, indexes=False)
        coordinator: Coordinator | None = None
        try:
            store_id = await asyncio.to_thread(lambda: store.follow(create=True))
            if duty.job_said and store.job != duty.job:
                raise InvalidInput(
                    f"the store {duty.path} belongs to job {store.job!r}, and --job says "
                    f"{duty.job!r}; leave it out, or give the store of that job"
                )
            keys = token
            if keys is None:
                keys = await asyncio.to_thread(Keys.of, store.backend)
            gate = Gate(listens_at, keys, duty.node, self.life, self._find)
            coordinator = open_coordinator(
                duty.where,
                store.backend,
                store_id,
                by_token=not keys.of_store,
                on_lost=self._on_lost,
                after=store.after,
            )
            port = gate.address.rpartition(":")[2]
            address = f"tcp://{reachable(duty.host)}:{port}"
            while not self._stop.is_set():
                rule = await self._win(coordinator, address, keys, store)
                if rule is not None:
                    await self._rule(coordinator, rule, store)
        finally:
            if gate is not None:
                gate.close()
            if coordinator is not None:
                await asyncio.to_thread(coordinator.close)
            await asyncio.to_thread(store.close)

    # -- the rule ---------------------------------------------------------------------------------

    async def _win(
        self, coordinator: Coordinator, address: str, keys: Keys, store: JobStore
    ) -> Rule | None:
        """This process's rule; None when it was stopped before it had one."""
        over = 0 if self.rule is None else self.rule.term
        self.rule = None
        told = 0
        while not self._stop.is_set():
            try:
                rule = await asyncio.to_thread(
                    coordinator.campaign,
                    self.duty.node,
                    self.life,
                    address,
                    time.monotonic() + ASK_S,
                    over=over,
                )
                if rule.life == self.life:
                    return rule
                if self.duty.where.kind is not Kind.ETCD:
                    over = await self._past(rule, keys, store)
                    continue
                if rule.term != told:
                    told = rule.term
                    self.on_news("stands by", f"{_who(rule)} rules in term {rule.term}")
                await self._stand_by(coordinator, rule)
            except ControllerLost as error:
                if self.duty.where.kind is not Kind.ETCD:
                    raise
                # The lease of one that died runs out, and etcd comes back.
                log.warning("%s", error.message)
                await self._sleep(RETRY_S)
        return None

    async def _past(self, rule: Rule, keys: Keys, store: JobStore) -> int:
        """The term to go above, since its ruler does not answer; ControllerLost when it does."""
        hello = cm.NodeHello(
            version=cm.CONTROL_VERSION,
            release=groupio.__version__,
            node=self.duty.node,
            life=self.life,
            job=store.job,
            store=store.path,
            store_id=store.store_id,
            term=rule.term,
        )
        if rule.by_token == keys.of_store and await asyncio.to_thread(is_taken, rule.address):
            raise InvalidInput(
                f"{_who(rule)} has the controller of {store.path} and another token than this "
                "process; give both the same GROUPIO_TOKEN or GROUPIO_TOKEN_FILE"
            )
        if await rules_still(rule, hello, keys):
            raise ControllerLost(
                f"{_who(rule)} already has the controller of {store.path} (term {rule.term}); "
                "stop that one first, or run both with --coordinator etcd://HOST:PORT, where one "
                "stands by for the other"
            )
        log.info("%s, which ruled in term %d, does not answer", _who(rule), rule.term)
        return rule.term

    async def _stand_by(self, coordinator: Coordinator, rule: Rule) -> None:
        waiting = asyncio.ensure_future(asyncio.to_thread(coordinator.watch, rule.term, STANDBY_S))
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait((waiting, stopping), return_when=asyncio.FIRST_COMPLETED)
            if self._stop.is_set():
                # Closing ends the wait in its thread.
                await asyncio.to_thread(coordinator.close)
            await waiting
        finally:
            stopping.cancel()

    async def _rule(self, coordinator: Coordinator, rule: Rule, store: JobStore) -> None:
        """Host the controller until the rule or the process ends."""
        self.rule, self._why = rule, ""
        self._deposed.clear()
        host = self._host = self._make_host(rule, store)
        self.on_news("rules", f"job {store.job} at {rule.address}, term {rule.term}")
        host.open_store()
        keeping = asyncio.ensure_future(self._keep(coordinator))
        try:
            await self._first(self._stop.wait(), self._deposed.wait())
            if not self._deposed.is_set():
                await self._drain(host)
        finally:
            keeping.cancel()
            self._host = None
            host.hang_up(self._why or "the controller's process ends")
            await asyncio.to_thread(host.end)
        if not self._deposed.is_set():
            await asyncio.to_thread(self._resign, coordinator)
        elif self.duty.where.kind is Kind.ETCD and not self._broken:
            self.on_news("lost", self._why)
        else:
            raise ControllerLost(
                f"the rule over {store.path} in term {rule.term} is lost: {self._why}"
            )

    def _make_host(self, rule: Rule, store: JobStore) -> Host:
        own = store.for_controller()
        # Group numbers of two rules never meet.
        name = blake3(f"{store.store_id} {rule.term}".encode()).digest()
        first = int.from_bytes(name[:4], "little") % (1 << 31) << 20
        own.store_id = store.store_id
        return Host(
            store.path,
            own,
            self,
            count(first),
            Lines(""),
            rule.term,
            self.duty.backend_bytes_per_s,
        )

    async def _keep(self, coordinator: Coordinator) -> None:
        while True:
            await asyncio.sleep(KEEP_S)
            try:
                held = await asyncio.to_thread(coordinator.keep)
            except GroupIOError as error:
                # It says nothing of who rules.
                log.warning("%s", error.message)
                continue
            if not held:
                self._on_lost("another controller took over")
                return

    async def _drain(self, host: Host) -> None:
        host.controller.draining = True
        until = time.monotonic() + DRAIN_S
        while not host.idle and not self._deposed.is_set() and time.monotonic() < until:
            await asyncio.sleep(0.05)

    @staticmethod
    def _resign(coordinator: Coordinator) -> None:
        try:
            coordinator.resign()
        except GroupIOError as error:
            log.warning("others learn by the silence that this controller ended: %s", error.message)

    def _on_lost(self, why: str) -> None:
        def end() -> None:
            self._why = self._why or why
            self._deposed.set()

        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(end)

    async def _sleep(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._stop.wait(), seconds)
        except TimeoutError:
            pass  # nobody stopped it meanwhile

    @staticmethod
    async def _first(*waits: object) -> None:
        tasks = [asyncio.ensure_future(wait) for wait in waits]  # type: ignore[call-overload]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    def _find(self, hello: cm.NodeHello) -> Host:
        host = self._host
        if host is None or hello.store_id != host.store.store_id:
            raise no_such_job(hello)
        if hello.job != host.store.job:
            raise InvalidInput(
                f"node {hello.node} means job {hello.job!r}, and store {hello.store_id} belongs to "
                f"job {host.store.job!r}; give both the same name"
            )
        return host

    # -- what the host asks for -------------------------------------------------------------------

    def do(self, step: Callable[[], None]) -> None:
        """Run ``step`` after the steps before it: effects keep their order."""
        self._queue.append(step)
        if self._running:
            return
        self._running = True
        try:
            while self._queue:
                self._queue.popleft()()
        except Exception:
            # A broken invariant ends the process with evidence; it never goes on.
            log.critical("the controller ends because of a defect", exc_info=True)
            self._queue.clear()
            self._broken = True
            self._on_lost("it ends because of a defect, see its log")
            self._stop.set()
            raise
        finally:
            self._running = False

    def post(self, step: Callable[[], None]) -> None:
        """Like :meth:`do`, from any thread."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self.do, step)
        except RuntimeError:
            log.info("an event came after the end of the loop")

    def order(self, host: Host, effect: fx.Effect) -> None:
        """What nobody knows a node for concerns nobody: this process has no clients."""
        log.debug("nobody to tell: %r", effect)

    def store_opened(self, host: Host) -> None:
        """Nothing has to be made ready here."""

    def delete_segments(self, host: Host, group: int) -> None:
        """There are no segments of this process."""

    def see(self, group: int, rank: int, place: int, length: int) -> memoryview | None:
        """There are no leases of this process."""
        return None


def _who(rule: Rule) -> str:
    return f"{rule.node} at {rule.address}"
