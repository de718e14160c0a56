"""Turns clients' messages into events, and levels and failures into messages to them."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from groupio.agent.peer import Peer, staged_notes
from groupio.agent.status import index_bytes, status
from groupio.agent.survey import Survey
from groupio.backend.place import Place, find_place, is_same_place
from groupio.errors import AgentLost, GroupIOError, GroupTimeout, InvalidInput, from_wire, to_wire
from groupio.exhaustion import NO_DESCRIPTOR, is_exhaustion, start_some, why
from groupio.model import PAGE_BYTES, Level
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol import messages as msg
from groupio.protocol import reasons
from groupio.wire import Received, close_all

if TYPE_CHECKING:
    from groupio.agent.driver import Driver
    from groupio.agent.job import Job

log = logging.getLogger(__name__)


class Desk:
    """Takes messages of peers; answers them."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def take(self, peer: Peer, received: Received) -> None:
        """Handle one message; what a broken client sends never hurts another."""
        try:
            self._guard(peer, lambda: self._take(peer, received.message, received.fds))
        finally:
            close_all(received.fds)

    def _guard(self, peer: Peer, step: Callable[[], None]) -> None:
        try:
            step()
        except GroupIOError as error:
            self._turn_away(peer, error)
        except (OSError, MemoryError, RuntimeError) as error:
            if not is_exhaustion(error):
                raise
            self._turn_away(peer, self.crowded(error))
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            # No machine has run yet: what was changed is this client's alone.
            log.exception("a message of process %d cannot be used", peer.pid)
            why = f"{type(error).__name__}: {error}"
            self._turn_away(peer, InvalidInput(f"the agent cannot use a message ({why})"))

    def _turn_away(self, peer: Peer, error: GroupIOError) -> None:
        log.warning("client of process %d: %s", peer.pid, error)
        self._driver.send(peer, msg.Refused(to_wire(error)))
        self._driver.disconnect(peer)

    def crowded(self, error: BaseException) -> AgentLost:
        """Why no further client can be served."""
        return AgentLost(
            f"the agent cannot take another client: {why(error)}",
            log=str(self._driver.residence.paths.log),
        )

    def _take(self, peer: Peer, message: Any, fds: tuple[int, ...]) -> None:
        if isinstance(message, msg.Hello):
            self._hello(peer, message, fds)
            return
        if isinstance(message, msg.Ask):
            self._ask(peer, message)
            return
        if peer.hello is None or peer.job is None:
            raise InvalidInput(f"{type(message).__name__} came before Hello")
        driver = self._driver
        match message:
            case msg.OpenSave():
                self._open(peer, peer.job, message)
            case msg.Copied(save_id=save_id, wave=wave):
                driver.tell_machine(ev.WaveCopied(peer.client, save_id, wave))
            case msg.SaveFailed(save_id=save_id, error=error):
                self._save_failed(peer, peer.job, save_id, from_wire(error))
            case msg.Released(save_id=save_id):
                driver.tell_machine(ev.WriterStopped(peer.client, save_id))
            case msg.Expect(total_bytes=total_bytes):
                driver.expect_save(peer, total_bytes)
            case msg.Mapped(offset=offset, length=length):
                if offset < 0 or length <= 0 or offset % PAGE_BYTES or length % PAGE_BYTES:
                    raise InvalidInput(f"a client mapped {length} bytes at {offset}: no pages")
                driver.tell_machine(ev.AheadMapped(peer.client, offset, length))
            case msg.Settle(request_id=request_id):
                self._settle_later(peer, peer.job, request_id)
            case msg.ReadOpen() | msg.Took() | msg.ReadClose():
                self._read(peer, peer.job, message)
            case msg.Damaged(digests=digests):
                log.error("%d damaged chunk(s) in %s", len(digests), peer.job.path)
                for digest in digests:
                    peer.job.store.known.discard(digest)
            case msg.Foreground(share=share):
                if share is None:
                    driver.foreground.leave(peer.client)
                elif 0 <= share <= 1:
                    driver.foreground.enter(peer.client, share)
                else:
                    raise InvalidInput(f"a client asked for a share of {share}")
            case msg.Bye():
                driver.parted(peer)

    def _read(self, peer: Peer, job: Job, message: msg.ReadOpen | msg.Took | msg.ReadClose) -> None:
        if job.joining is not None:
            self._driver.reads.ask(peer, job, message)
        elif isinstance(message, msg.ReadOpen):
            why = "the job is of one node"
            self._driver.send(peer, msg.ReadRefused(message.request_id, why))

    # -- clients ---------------------------------------------------------

    def _hello(self, peer: Peer, hello: msg.Hello, fds: tuple[int, ...]) -> None:
        if "\0" in hello.store or not os.path.isabs(hello.store):
            raise InvalidInput(f"a client named the store {hello.store[:200]!r}: no absolute path")
        path = os.path.realpath(hello.store)
        here: Place | None = None
        there: Place | None = None
        try:
            here = find_place(path)
            there = find_place(hello.rest, fds[0]) if fds else here
        except OSError as error:
            if error.errno in NO_DESCRIPTOR:
                raise
            here = there = None  # a store that is away does not say which it is
        if here == there:
            self._welcome(peer, hello, path, here)
        else:
            self._prove(peer, hello, path, os.dup(fds[0]))

    def _prove(self, peer: Peer, hello: msg.Hello, path: str, shown: int) -> None:
        """Find out whether the client means the directory that is at its path here."""

        def over(error: GroupIOError | None) -> None:
            def step() -> None:
                if error is not None:
                    raise error
                self._welcome(peer, hello, path, None)

            if peer.connected:
                self._guard(peer, step)

        def prove() -> None:
            error: GroupIOError | None = None
            try:
                if not is_same_place(path, shown, hello.rest):
                    error = reasons.other_directory(self._driver.node, path)
            except GroupIOError as failed:
                error = None if reasons.is_away(failed) else failed
            except OSError as failed:
                log.warning("which directory is at %s is not known: %s", path, failed)
            finally:
                os.close(shown)
            self._driver.post(lambda: over(error))

        thread = threading.Thread(target=prove, name="groupio-place", daemon=True)
        try:
            start_some([thread])
        except GroupIOError:
            os.close(shown)
            raise

    def _welcome(self, peer: Peer, hello: msg.Hello, path: str, place: Place | None) -> None:
        driver = self._driver
        if peer.hello is not None or hello.client_id in driver.clients:
            raise InvalidInput("a client said Hello twice")
        if hello.version != msg.PROTOCOL_VERSION:
            raise InvalidInput(
                f"the client speaks protocol version {hello.version}, this agent "
                f"{msg.PROTOCOL_VERSION}; use one release of groupio on a node"
            )
        driver.watches.add(peer)
        driver.lives_on(peer)
        peer.hello = hello
        peer.job = driver.job_of(path, place, hello)
        peer.notes = staged_notes(peer.process.pid)
        driver.clients[hello.client_id] = peer
        driver.send(
            peer,
            msg.Welcome(
                agent_pid=os.getpid(),
                version=msg.PROTOCOL_VERSION,
                log=str(driver.residence.paths.log),
                notes=peer.notes,
                reads=peer.job.joining is not None,
            ),
        )
        arrived = ev.ClientArrived(
            client=peer.client,
            process=peer.process,
            rank=hello.rank,
            world_size=hello.world_size,
            job=hello.job,
            launch_id=hello.launch_id,
            gave_up=hello.gave_up,
            has_saved=hello.has_saved,
            node="" if peer.job.joining is None else driver.node,
        )
        peer.job.tell(arrived)
        driver.replaces(peer)
        host = peer.job.host
        if host is not None and not host.controller.store_open:
            host.open_store()

    def _open(self, peer: Peer, job: Job, message: msg.OpenSave) -> None:
        hello = peer.hello
        assert hello is not None
        peer.opened = True
        peer.called_at[message.save_id] = message.called_at
        try:
            items, layout = self._driver.flushing.tables.get(message.items, message.items_id)
        except GroupIOError as error:
            self._refuse(peer, message.save_id, error)
            return
        if self._driver.draining and job.joining is not None:
            self._refuse(peer, message.save_id, reasons.draining(message.epoch))
            return
        self._driver.flushing.items[peer.client, message.save_id] = (items, message.items_id)
        self._driver.doors.opened(job, peer.client, message)
        now = time.monotonic()
        opened = ev.MemberOpened(
            node=self._driver.node,
            client=peer.client,
            process=peer.process,
            rank=hello.rank,
            world_size=hello.world_size,
            save_id=message.save_id,
            epoch=message.epoch,
            deadline_s=message.deadline_s,
            elapsed_s=max(0.0, now - message.called_at),
            at=now,
            total_bytes=layout.total_bytes,
            bytes_logical=message.bytes_logical,
            items_id=message.items_id,
            replicated=message.replicated,
            when_full=message.when_full,
            job=hello.job,
            # The line that it asked for has begun: another controller must not begin it again.
            rewind_to=None if peer.rewound else hello.rewind_to,
            launch_id=hello.launch_id,
            metadata=message.metadata,
            door=message.door,
            replicas=hello.replicas if job.joining is not None else 1,
            resumed_from=message.resumed_from,
            begin_after=message.begin_after,
            side=message.side,
        )
        self._driver.tell_machine(
            ev.LeaseAsked(peer.client, message.save_id, hello.rank, layout, opened)
        )
        job.tell(opened)

    def _refuse(self, peer: Peer, save_id: int, error: GroupIOError) -> None:
        self._driver.send(peer, msg.Failed(save_id, to_wire(error)))

    def forget(self, peer: Peer) -> None:
        """The client is gone for good: nothing is sent to it, and no group waits for its items."""
        if peer.job is not None:
            settling = peer.job.settling
            settling[:] = [waiting for waiting in settling if waiting[0] is not peer]
        if not self._driver.machine.has_save(peer.client):
            self._driver.flushing.forget(peer.client)

    def _save_failed(self, peer: Peer, job: Job, save_id: int, error: GroupIOError) -> None:
        self._driver.tell_machine(ev.WriterStopped(peer.client, save_id))
        job.tell(ev.MemberFailed(peer.client, save_id, error))

    # -- answers ---------------------------------------------------------

    def tell(self, effect: fx.TellReached | fx.TellFailed) -> None:
        """Send a level or a failure to its member, if it is still there."""
        self._tell(effect)
        if isinstance(effect, fx.TellFailed):
            self._driver.doors.decided(effect.seat, committed=False)
        elif effect.level is Level.DURABLE:
            self._driver.doors.decided(effect.seat, committed=True)

    def _what_held(self, since: float) -> str:
        """What a deadline that passed has to do with the pace of this node, if anything."""
        uplink = self._driver.uplink
        if not uplink.writes.held_since(since):
            return ""
        why = "gave way to foreground intervals"
        if uplink.rate is not None:
            why = f"kept to the stated uplink of {uplink.rate:.0f} bytes/s"
        return f" Meanwhile node {self._driver.node}'s writes to its stores {why}."

    def _split(self, job: Job | None, missing: tuple[int, ...]) -> str:
        """What a copy of the job's store, in use on this node, has to do with missing ranks."""
        if job is None or not job.store.store_id:
            return ""
        for other in self._driver.jobs.values():
            if other is job or other.store.store_id != job.store.store_id:
                continue
            peers = (p for p in self._driver.clients.values() if p.job is other)
            there = {p.hello.rank for p in peers if p.hello is not None}
            if ranks := tuple(sorted(there.intersection(missing))):
                return reasons.split_over_copies(ranks, other.path, job.path)
        return ""

    def _tell(self, effect: fx.TellReached | fx.TellFailed) -> None:
        seat, metrics = effect.seat, self._driver.metrics
        over = isinstance(effect, fx.TellFailed) or effect.level is Level.DURABLE
        if over:
            self._driver.flushing.items.pop((seat.client, seat.save_id), None)
        if isinstance(effect, fx.TellFailed):
            self._driver.machine.forget(seat.client, seat.save_id)
            metrics.add("groupio_groups", 1, str(effect.error.outcome))
            log.warning("rank %d: %s", seat.rank, effect.error.message)
        peer = self._driver.clients.get(seat.client)
        if peer is None:
            return
        called_at = (peer.called_at.pop if over else peer.called_at.get)(seat.save_id, None)
        if isinstance(effect, fx.TellFailed):
            error = to_wire(effect.error)
            if isinstance(effect.error, GroupTimeout) and called_at is not None:
                error["message"] += self._what_held(called_at)
                error["message"] += self._split(peer.job, effect.error.missing)
            self._driver.send(peer, msg.Failed(seat.save_id, error))
            return
        self._driver.seated(peer)
        now = time.monotonic()
        if called_at is not None:
            metrics.observe("groupio_level_seconds", now - called_at, str(effect.level))
        if over:
            peer.rewound = peer.job is not None and peer.job.joining is not None
            metrics.add("groupio_groups", 1, "committed")
        self._driver.send(
            peer,
            msg.Reached(
                save_id=seat.save_id,
                level=str(effect.level),
                at=now,
                first_arrival=effect.first_arrival,
                last_arrival=effect.last_arrival,
                notes=effect.notes + self._notes(peer, effect.level),
                store_id="" if peer.job is None else peer.job.store.store_id,
            ),
        )

    def _notes(self, peer: Peer, level: Level) -> tuple[str, ...]:
        if level is Level.STAGED:
            return peer.notes
        job = peer.job
        if level is not Level.DURABLE or job is None:
            return ()
        place = ("durable: node-local path, does not survive node loss",)
        mode = (f"segments: {job.store.io_mode} writes",) if job.store.io_mode else ()
        local = job.host is not None and job.host.controller.node_local
        return (place if local else ()) + mode

    def rule_out(self, effect: fx.TellUnreachable) -> None:
        """Tell a member that its save goes on, but not to this level."""
        peer = self._driver.clients.get(effect.seat.client)
        if peer is not None:
            self._driver.send(
                peer,
                msg.Unreachable(effect.seat.save_id, str(effect.level), to_wire(effect.error)),
            )

    def _settle_later(self, peer: Peer, job: Job, request_id: int) -> None:
        """Remember who wants to hear that earlier incarnations' epochs are decided."""
        if job.host is not None:
            job.host.open_store()
        elif job.joining is not None:
            job.joining.settle(peer.client, request_id)
        job.settling.append((peer, request_id))

    def settle_without(self, job: Job, error: GroupIOError | None = None) -> None:
        """Nothing is undecided where there is no store; ``error``: why it is not known."""
        waiting, job.settling[:] = list(job.settling), []
        for peer, request_id in waiting:
            wire = None if error is None else to_wire(error)
            self._driver.send(peer, msg.Settled(request_id, wire))

    def settled(self, client: str, request_id: int) -> None:
        """A controller elsewhere says so for this client."""
        for job in self._driver.jobs.values():
            for waiting in list(job.settling):
                peer, number = waiting
                if (peer.client, number) == (client, request_id):
                    job.settling.remove(waiting)
                    self._driver.send(peer, msg.Settled(request_id))

    def settle(self) -> None:
        """Answer those who wait for the epochs of earlier incarnations."""
        for job in self._driver.jobs.values():
            if job.host is None:
                continue
            controller, still = job.host.controller, []
            for peer, request_id in job.settling:
                if controller.opening or controller.undecided_for(peer.client):
                    still.append((peer, request_id))
                else:
                    self._driver.send(peer, msg.Settled(request_id))
            job.settling[:] = [waiting for waiting in still if waiting[0].connected]

    def _ask(self, peer: Peer, message: msg.Ask) -> None:
        body: dict[str, Any]
        match message.what:
            case "status":
                number = message.request_id
                Survey(self._driver, lambda b: self._driver.send(peer, msg.Answer(number, b)))
                return
            case "metrics":
                body = {"text": self._metrics()}
            case "drain" | "stop":
                self._driver.drain(abort_unstaged=message.what == "stop")
                body = {"pid": os.getpid(), "draining": True}
            case _:
                raise InvalidInput(f"unknown question {message.what!r}")
        self._driver.send(peer, msg.Answer(message.request_id, body))

    def _metrics(self) -> str:
        driver = self._driver
        for state, size in status(driver)["agent"]["memory"].items():
            if state != "budget":
                driver.metrics.set("groupio_memory_bytes", size, state)
        driver.metrics.set("groupio_memory_budget_bytes", driver.machine.ledger.budget)
        driver.metrics.set("groupio_index_bytes", index_bytes(driver))
        driver.metrics.set("groupio_clients", len(driver.clients))
        hosts = [job.host for job in driver.jobs.values() if job.host is not None]
        in_flight = sum(len(host.controller.groups) for host in hosts)
        driver.metrics.set("groupio_groups_in_flight", in_flight)
        return driver.metrics.render()
