"""The agent's event loop: sockets, processes and timers in; the machines' effects out.

One thread runs the machines. Hashing, writing, the store and the populating of memory have
threads of their own, which hand their results back as events.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

import groupio
from groupio.agent.desk import Desk
from groupio.agent.doors import Doors
from groupio.agent.flushing import Flushing
from groupio.agent.foreground import Foreground
from groupio.agent.identity import Writer, node_name
from groupio.agent.job import Job
from groupio.agent.lending import Memory, yield_to_others
from groupio.agent.memory import default_budget
from groupio.agent.metrics import Metrics
from groupio.agent.peer import Peer, Watches
from groupio.agent.process import Residence
from groupio.agent.rest import Rest
from groupio.agent.uplink import Uplink
from groupio.agent.workers import WorkerPool
from groupio.backend.place import Place, find_place
from groupio.controller.discover import Kind, find_controller
from groupio.controller.host import Host
from groupio.controller.store import JobStore
from groupio.errors import InvalidInput, to_wire
from groupio.exhaustion import ThreadPool, exhausted, is_exhaustion, why
from groupio.fabric.open import fabric_bytes
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol import messages as msg
from groupio.protocol import reading_messages as rm
from groupio.protocol import reasons
from groupio.protocol.agent import AgentMachine
from groupio.protocol.ledger import Ledger
from groupio.seldom import REFUSED_LOG_S, Seldom
from groupio.settings import Settings
from groupio.wire import PEER_CLOSED, BacklogFull, Channel, ChannelClosed

if TYPE_CHECKING:
    from groupio.agent.network import Network
    from groupio.agent.reading import Reads

log = logging.getLogger(__name__)

STOP_POLL_S = 0.05

ACCEPT_AGAIN_S = 0.1
"""Until the next try where no connection could be accepted."""

PROCESS_END_S = 0.1
"""A killed process loses its sockets a moment before it is seen to have ended."""


UNSEATED_KEPT = 8
"""So many clients of a process are kept whose saves never came to a group, as those of a store
that refuses all: whether their controller takes one of them for the member is not known here."""


class Driver:
    """The agent of one node: every client, job and byte of staging memory."""

    def __init__(self, settings: Settings, residence: Residence) -> None:
        self.settings = settings
        self.residence = residence
        self.node = node_name(settings.node)
        self.writer = Writer.of_this_process()
        self.started_at = time.monotonic()
        self.metrics = Metrics()
        self.budget = settings.memory_bytes or default_budget()
        """All memory of the agent, in bytes; what its fabric needs is not for arenas."""
        arenas = self.budget - fabric_bytes(settings, self.budget)
        self.machine = AgentMachine(self.node, Ledger(arenas))
        self.jobs: dict[str, Job] = {}
        self.peers: dict[int, Peer] = {}
        self.clients: dict[str, Peer] = {}
        self.watches = Watches(self._process_ended)
        self.memory = Memory(self)
        self.draining = False
        self.copies_active = 0
        self.uplink = Uplink(settings.uplink_bytes_per_s)
        self.workers = WorkerPool(copies_active=lambda: self.copies_active, uplink=self.uplink)
        self.rest = Rest(self.workers.submit_hash, time.monotonic)
        self.foreground = Foreground(self._pace, self._later)
        self.flushing = Flushing(self)
        self.doors = Doors(self)
        self.desk = Desk(self)
        self.network: Network | None = None
        """Once a job of several nodes has come."""
        self._crowded = Seldom(REFUSED_LOG_S)
        self._numbers = count(1)
        self._group_job: dict[int, Job] = {}
        self._queue: deque[Callable[[], None]] = deque()
        self._running = False
        self._closing = ThreadPool(1, "close", initializer=yield_to_others)
        self._idle_since: float | None = time.monotonic()
        self._done: asyncio.Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # -- life ---------------------------------------------------------

    async def run(self, ready: Callable[[], None]) -> None:
        """Serve until idle, drained or stopped; ``ready`` is called once clients can connect."""
        self._loop = asyncio.get_running_loop()
        self._done = self._loop.create_future()
        self._listen()
        self._loop.call_later(STOP_POLL_S, self._look_around)
        log.info(
            "agent %s on node %s, memory budget %d bytes",
            groupio.__version__,
            self.node,
            self.budget,
        )
        ready()
        await self._done
        self._loop.remove_reader(self.residence.listener.fileno())
        for peer in list(self.peers.values()):
            self._hang_up(peer)
        self.watches.close()
        if self.network is not None:
            self.network.part()
        for job in self.jobs.values():
            job.leave()
            job.end()
        if self.network is not None:
            self.network.close()
        self.memory.shut()
        self._closing.shutdown(wait=False, cancel_futures=True)
        self.doors.close()
        self.workers.close(timeout_s=5.0)
        self.memory.close()
        log.info("agent ends")

    def drain(self, *, abort_unstaged: bool = False) -> None:
        """Take no new groups, finish what is in flight, then end."""
        self.draining = True
        for job in self.jobs.values():
            if job.joining is None:
                job.tell(ev.Drain(abort_unstaged))
            else:
                job.joining.drain(abort_unstaged=abort_unstaged)

    def quit(self) -> None:
        """End now; what is not durable is lost."""
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    @property
    def idle(self) -> bool:
        """Nothing is in flight."""
        busy = self.machine.groups or self.doors.busy
        # Whoever follows a controller here finds another one when this agent drains.
        over = (job.quiet if self.draining else job.idle for job in self.jobs.values())
        return not busy and all(over)

    def _look_around(self) -> None:
        """Close stores that nobody uses; end when idle or drained."""
        assert self._loop is not None
        assert self._done is not None
        if self._done.done():
            return  # the threads are ending already
        self._loop.call_later(STOP_POLL_S, self._look_around)
        self.rest.look()
        for path, job in list(self.jobs.items()):
            if job.idle and not any(p.job is job and p.connected for p in self.peers.values()):
                if self.network is not None and self.network.reads.leave(job):
                    continue  # other nodes get chunks from here
                self._let_go(path)
        served = any(peer.connected for peer in self.clients.values())
        if not self.idle or (served and not self.draining):
            self._idle_since = None
            return
        now = time.monotonic()
        self._idle_since = self._idle_since or now
        if self.draining or now - self._idle_since >= self.settings.idle_s:
            self._retire()

    def _let_go(self, path: str) -> None:
        job = self.jobs.pop(path)
        for peer in self.watches.of_job(job):
            if not peer.connected and peer.fenced:
                self._forget(peer)
        self.doors.forget(path)
        job.leave()
        self._closing.submit(job.end)

    def _retire(self) -> None:
        """Take the socket away; a client that was just connecting starts another agent."""
        try:
            retired = self.residence.retire()
        except FileNotFoundError:
            # Somebody removed the runtime directory: no client can find this agent any more.
            retired = True
        if retired:
            self.quit()

    # -- connections ---------------------------------------------------------

    def _accept(self) -> None:
        try:
            sock, crowded = self.residence.accept()
        except OSError as error:
            # Not at once again: the listener stays readable.
            assert self._loop is not None
            self._loop.remove_reader(self.residence.listener.fileno())
            self._loop.call_later(ACCEPT_AGAIN_S, self._listen)
            if self._crowded.is_due("accept"):
                log.warning("no client can be taken: %s", why(error))
            return
        if sock is None:
            return
        channel = Channel(sock, msg.ToAgent)
        if crowded is not None:
            refused = self.desk.crowded(crowded)
            with contextlib.suppress(ChannelClosed):
                channel.enqueue(msg.Refused(to_wire(refused)))
            channel.close()
            self.residence.keep_spare()
            return
        pid, user = channel.peer()
        if user != os.getuid():
            log.warning("refused a connection of user %d", user)
            channel.close()
            return
        peer = Peer(channel, pid)
        assert self._loop is not None
        try:
            self._loop.add_reader(channel.fileno(), self._readable, peer)
        except OSError as error:
            # The kernel has no memory for it, or no watch (fs.epoll.max_user_watches).
            with contextlib.suppress(ChannelClosed):
                channel.enqueue(msg.Refused(to_wire(self.desk.crowded(error))))
            channel.close()
            return
        self.peers[id(peer)] = peer

    def _listen(self) -> None:
        assert self._loop is not None
        assert self._done is not None
        if not self._done.done():
            self._loop.add_reader(self.residence.listener.fileno(), self._accept)

    def _readable(self, peer: Peer) -> None:
        try:
            for received in peer.channel.feed():
                self.do(lambda r=received: self.desk.take(peer, r))  # type: ignore[misc]
        except ChannelClosed as error:
            if str(error) != PEER_CLOSED:
                log.warning("%s is dropped: %s", peer, error)
            self.disconnect(peer)

    def send(self, peer: Peer, message: Any, fds: tuple[int, ...] = ()) -> None:
        """Send without waiting; a client that is gone gets nothing."""
        if not peer.connected or peer.unreachable:
            return
        try:
            is_sent = peer.channel.enqueue(message, fds)
        except BacklogFull as error:
            log.warning(
                "%s is dropped: %s; it is stopped or hangs: look at it with `py-spy dump --pid "
                "%d`, continue it (SIGCONT) or end it; its saves that are not STAGED fail, and its "
                "next call connects again",
                peer,
                error,
                peer.pid,
            )
            self._unreachable(peer)
            return
        except ChannelClosed as error:
            # It may have gone before its Hello, as a tool does that is interrupted.
            log.debug("%s: %s", peer, error)
            self._unreachable(peer)
            return
        if not is_sent:
            assert self._loop is not None
            try:
                self._loop.add_writer(peer.channel.fileno(), self._writable, peer)
            except OSError as error:  # the kernel cannot watch it: it would never hear the rest
                log.warning("client of process %d is given up: %s", peer.pid, why(error))
                self._unreachable(peer)

    def _writable(self, peer: Peer) -> None:
        assert self._loop is not None
        try:
            if peer.channel.flush():
                self._loop.remove_writer(peer.channel.fileno())
        except ChannelClosed:
            self._loop.remove_writer(peer.channel.fileno())
            self._unreachable(peer)

    def _unreachable(self, peer: Peer) -> None:
        """Nothing can be sent to the client any more; what it sent before still counts.

        It may have said goodbye, and else its memory is kept until the end of its process.
        """

        def end() -> None:
            if peer.connected:
                self._readable(peer)
            self.disconnect(peer)

        assert self._loop is not None
        peer.unreachable = True
        self._loop.call_soon(end)

    def disconnect(self, peer: Peer) -> None:
        """The connection is over; the process behind it may live on."""
        if peer.connected:
            self._hang_up(peer)
            if peer.hello is not None:
                self.foreground.leave(peer.client)
                if not peer.process_gone and not peer.fenced:
                    assert self._loop is not None
                    self._loop.call_later(PROCESS_END_S, self._broke_off, peer)
        self._forget_if_over(peer)

    def _hang_up(self, peer: Peer) -> None:
        if peer.connected:
            assert self._loop is not None
            self._loop.remove_writer(peer.channel.fileno())
            self._loop.remove_reader(peer.channel.fileno())
            peer.connected = False
            peer.channel.close()

    def parted(self, peer: Peer) -> None:
        """The client said that it writes to no lease any more, and that it leaves."""
        peer.fenced = peer.closed = True
        self._member_gone(peer)

    def _broke_off(self, peer: Peer) -> None:
        """The connection ended without a word, and the process did not."""
        if peer.process_gone or peer.broke_off:
            return
        peer.broke_off = True
        if peer.unseen:
            peer.process_gone = True
        reads = None if self.network is None else self.network.reads
        has_memory = peer.client in self.machine.arenas
        peer.fenced = not has_memory and (reads is None or not reads.lends_to(peer.client))
        self._member_gone(peer)
        self._forget_if_over(peer)

    def lives_on(self, peer: Peer) -> None:
        """A process says Hello again: that it has ended is no longer waited for."""
        for one in list(self.clients.values()):
            if one.process == peer.process and not one.connected and not one.closed:
                self._broke_off(one)

    def _process_ended(self, peers: list[Peer]) -> None:
        for peer in peers:
            # What it sent before its end still counts.
            if peer.connected:
                self._readable(peer)
            peer.process_gone = True
            self._member_gone(peer)
            self.disconnect(peer)

    def _member_gone(self, peer: Peer) -> None:
        """Tell the machines that a client is gone."""
        # All that the fence of the memory asks is that it writes there no more.
        fenced = peer.fenced or peer.process_gone
        if self.network is not None:
            self.network.reads.client_left(peer.client, fenced=fenced)
        if peer.job is not None:
            peer.job.tell(ev.MemberGone(peer.client, peer.process_gone, peer.closed))
        self.tell_machine(ev.MemberGone(peer.client, fenced))

    def _forget_if_over(self, peer: Peer) -> None:
        """Keep a client that is gone only for what the end of its process changes.

        That frees memory that it may still write to, and its controller waits less long for a
        rank that ended than for one that may connect again.
        """
        if peer.connected:
            return
        self.peers.pop(id(peer), None)
        if peer.hello is None:
            return
        if peer.fenced or peer.process_gone:
            self.clients.pop(peer.client, None)
            job = peer.job
            if peer.process_gone or job is None or self.jobs.get(job.path) is not job:
                self._forget(peer)

    def _forget(self, peer: Peer) -> None:
        self.watches.remove(peer)
        self.desk.forget(peer)

    def replaces(self, peer: Peer) -> None:
        """Forget clients that this one follows as the same member of the same process.

        One that its controller may know as the member stays until it knows this one as that.
        """
        older = self.watches.before(peer)
        for one in older:
            if peer.seated or not one.opened:
                self._replaced(one)
        left = [one for one in self.watches.before(peer) if not one.seated]
        for one in left[: max(len(left) - UNSEATED_KEPT, 0)]:
            self._replaced(one)

    def seated(self, peer: Peer) -> None:
        """A save of the client is STAGED at least."""
        if not peer.seated:
            peer.seated = True
            self.replaces(peer)

    def _replaced(self, peer: Peer) -> None:
        if self.machine.has_save(peer.client):
            return  # its group is in flight
        peer.process_gone = True
        assert peer.job is not None
        peer.job.tell(ev.MemberGone(peer.client, process_gone=True))
        self._forget(peer)

    # -- machines ---------------------------------------------------------

    def do(self, step: Callable[[], None]) -> None:
        """Run ``step`` after the steps before it: effects keep their order."""
        self._queue.append(step)
        if self._running:
            return
        self._running = True
        try:
            while self._queue:
                try:
                    self._queue.popleft()()
                except Exception:
                    # A broken invariant stops the agent with evidence; it never goes on.
                    log.critical("the agent ends because of a defect", exc_info=True)
                    self.quit()
                    raise
        finally:
            self._running = False
        self.copies_active = self.machine.copies_active
        self.desk.settle()

    def post(self, step: Callable[[], None]) -> None:
        """Like :meth:`do`, from any thread."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self.do, step)
        except RuntimeError:
            log.info("an event came after the end of the loop")

    def groups_of(self, job: Job) -> tuple[int, ...]:
        """The groups of a job that this node has memory for."""
        return tuple(n for n, owner in self._group_job.items() if owner is job)

    def held(self, job: Job) -> tuple[ev.HeldGroup, ...]:
        """What a controller that takes over has to know of the node's groups."""
        return self.machine.held(self.groups_of(job))

    def job_of(self, path: str, place: Place | None, hello: msg.Hello) -> Job:
        """The job that owns the store at ``path``; InvalidInput when it cannot be as asked.

        ``place`` is what the path leads to, where that is known: a job that knows the same
        directory by another path has it.
        """
        path = self._known_path(path, place)
        where = replace(find_controller(hello.controller, {}), is_here=hello.hosts)
        if not hello.said and self.settings.controller is not None:
            where = find_controller(self.settings.controller, {})
        job = self.jobs.get(path)
        if job is not None and where.kind is not Kind.LOCAL and job.joining is None:
            if not job.idle:
                raise InvalidInput(
                    f"the store {path} is in use by a job of this node alone; end that job first, "
                    "or start this one with GROUPIO_CONTROLLER=local"
                )
            self._let_go(path)
            job = None
        if job is None:
            name = hello.job or os.path.basename(path) or "job"
            modes = (hello.file_mode, hello.umask)
            store = JobStore(path, name, self.node, self.writer, *modes, expected=hello.store_id)
            job = Job(path, store, place)
            if where.kind is Kind.LOCAL:
                job.host = Host(path, store, self, self._numbers)
                job.host.controller.draining = self.draining
            else:
                from groupio.agent.joining import Joining

                job.joining = Joining(self, job, where)
                self.machine.keeps_content = True
            self.jobs[path] = job
        elif hello.store_id:
            known = job.store.store_id or job.store.expected
            if known not in ("", hello.store_id):
                raise reasons.other_store(path, known, hello.store_id)
            job.store.expected = hello.store_id
        return job

    def _known_path(self, path: str, place: Place | None) -> str:
        """The path by which a job here knows this directory, such as one of another mount."""
        if path in self.jobs or place is None:
            return path
        for other, job in self.jobs.items():
            # File systems that the path does not lead to may be away, and would hold all up.
            if job.place is not None and job.place.device == place.device:
                with contextlib.suppress(OSError):
                    if find_place(other) == place:
                        return other
        return path

    def join_network(self) -> Network:
        """What jobs of several nodes need, made when the first one comes."""
        if self.network is None:
            from groupio.agent.network import Network

            self.network = Network(self)
            self._pace(self.foreground.share)
        return self.network

    @property
    def reads(self) -> Reads:
        """The reads of jobs that span nodes."""
        assert self.network is not None
        return self.network.reads

    def _pace(self, share: float) -> None:
        """Let storage traffic use this share of what it can."""
        self.uplink.set_share(share)
        if self.network is not None:
            self.network.fabric.pace.set_share(share)

    def _later(self, seconds: float, step: Callable[[], None]) -> None:
        assert self._loop is not None
        self._loop.call_later(seconds, self.do, step)

    def tell_machine(self, event: Any) -> None:
        """Feed an event to the agent machine and execute its effects."""
        self.do(lambda: self._run(self.machine.handle(event)))

    def delete_segments(self, host: Host, group: int) -> None:
        """Delete what an idle flush job wrote; called from the store's thread."""
        self.flushing.delete_segments(group)

    def see(self, group: int, rank: int, place: int, length: int) -> memoryview | None:
        """Bytes of a lease; called from the store's thread."""
        return self.flushing.see(group, rank, place, length)

    def store_opened(self, host: Host) -> None:
        """A controller of this process knows its store: make ready for the first saves."""
        job = self.jobs.get(host.path)
        if job is not None:
            self._stand_by(job)
            self.doors.recover(job)

    def _stand_by(self, job: Job) -> None:
        for peer in self.clients.values():
            if peer.job is job and peer.connected and peer.hello is not None:
                length = job.store.lease_bytes.get(peer.hello.rank, 0)
                if length:
                    self.expect_save(peer, length)

    def expect_save(self, peer: Peer, nbytes: int) -> None:
        """Prepare memory for the client, unless it has left: nothing would give it back then."""
        if not peer.fenced and not peer.process_gone:
            self.tell_machine(ev.SaveExpected(peer.client, nbytes))

    def order(self, host: Host, effect: fx.Effect) -> None:
        """Execute an order, or tell a member, of a controller of this process."""
        self.obey(self.jobs[host.path], effect)

    def obey(self, job: Job, effect: fx.Effect) -> None:
        """Execute what the job's controller ordered."""
        match effect:
            case fx.TellReached() | fx.TellFailed():
                job.over(effect)
                self.desk.tell(effect)
            case fx.TellUnreachable():
                self.desk.rule_out(effect)
            case fx.AdmitGroup():
                self.do(lambda: self._admit(job, effect))
            case (
                fx.RetractGroup()
                | fx.StartCopy()
                | fx.AbortGroup()
                | fx.StoreChunks()
                | fx.StoreAgain()
                | fx.TakeRoom()
                | fx.AdoptGroup()
            ):
                self.tell_machine(effect)
            case fx.ShowStore():
                assert job.joining is not None
                job.joining.show(effect)
            case rm.Assign() | rm.Yield() | rm.Unreadable() | rm.ReadSought() | rm.Peers():
                self.reads.take(job, effect)
            case fx.CloseGroup() | fx.DropHeld():
                self.tell_machine(effect)
                # Behind the effects that this has.
                self.do(lambda: self.do(self._forget_groups))
            case _:
                raise AssertionError(f"not an order: {effect!r}")

    def _run(self, effects: list[fx.Effect]) -> None:
        for effect in effects:
            self.do(lambda e=effect: self._execute_or_fail(e))  # type: ignore[misc]

    def _execute_or_fail(self, effect: fx.Effect) -> None:
        """Execute an effect; where the system lacks something for it, only its group fails."""
        try:
            self._execute(effect)
        except (OSError, MemoryError, RuntimeError) as error:
            group = self.machine.groups.get(getattr(effect, "group", -1))
            if group is None or not is_exhaustion(error):
                raise
            order = group.order
            doing = f"stage epoch {order.key.epoch} on node {self.node}"
            log.exception("cannot %s", doing)
            needed = sum(lease.layout.total_bytes for lease in group.leases.values())
            failed = exhausted(error, doing, needed=needed)
            self.tell_machine(ev.JobFailed(order.group, failed))

    def _execute(self, effect: fx.Effect) -> None:
        match effect:
            case fx.Report(event=event, group=group):
                self._group_job[group].tell(event)
            case fx.OpenArena() | fx.CloseArena() | fx.Punch() | fx.Populate() | fx.GrantLease():
                self.memory.execute(effect)
            case (
                fx.StartJob()
                | fx.AddWave()
                | fx.FinishJob()
                | fx.RepeatJob()
                | fx.RunOrder()
                | fx.CancelJob()
                | fx.EndJob()
            ):
                self.flushing.execute(effect)
                if isinstance(effect, fx.EndJob):
                    self.rest.group_over()
                    self.do(self._forget_groups)
            case fx.KeepContent(group=group, key=key):
                if self.network is not None:
                    self.network.holdings.settle(group)
                self._group_job[group].learn(key)
            case fx.DropContent(arena=arena, offset=offset, length=length):
                if self.network is not None:
                    self.network.holdings.drop(arena, offset, length)
                    self.network.reads.staging_changed()
            case _:
                raise AssertionError(f"not an effect of the agent machine: {effect!r}")

    def job_of_group(self, group: int) -> Job:
        """The job that the group belongs to."""
        return self._group_job[group]

    def _admit(self, job: Job, effect: fx.AdmitGroup) -> None:
        self._group_job[effect.group] = job
        self._run(self.machine.handle(effect))

    def _forget_groups(self) -> None:
        """Groups that the machine has no more are over; those that it will hear of are new."""
        over = [n for n in self._group_job if n not in self.machine.groups]
        for number in over:
            del self._group_job[number]
