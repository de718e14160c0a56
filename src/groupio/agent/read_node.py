"""One committed epoch that ranks of this node, or of others, read through this agent.

The machine (:class:`groupio.protocol.reading.NodeReader`) says what to get from where; this
executes it. Everything goes through a window of memory that ranks and peers are served from.
Whatever goes wrong here ends the read on this node: its ranks then read from the store themselves.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from groupio.agent.read_handing import Handing, Request
from groupio.agent.read_incoming import Incoming
from groupio.agent.read_memory import ReadMemory
from groupio.agent.read_sources import Epoch
from groupio.agent.read_window import ReadWindow, Slot, why_no_window
from groupio.errors import GroupIOError, InvalidInput
from groupio.fabric.base import Served
from groupio.model import DecisionKey
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol import messages as msg
from groupio.protocol import reading_messages as rm
from groupio.protocol.reading import NodeReader

if TYPE_CHECKING:
    from groupio.agent.job import Job
    from groupio.agent.peer import Peer
    from groupio.agent.reading import Reads

log = logging.getLogger(__name__)

JOIN_S = 5.0
"""Without a controller for so long the store is read without the other nodes."""

LINGER_S = 10.0
"""What was read stays for others so long after the last use."""

TICK_S = 0.5


class _Flow(NamedTuple):
    """What a read works with once its epoch is open."""

    epoch: Epoch
    memory: ReadMemory
    reader: NodeReader
    incoming: Incoming
    handing: Handing


class NodeRead:
    """The driver of one read on one node. It lives in the event loop; what peers ask, :meth:`find`
    and its like, comes from other threads."""

    def __init__(self, reads: Reads, job: Job, key: DecisionKey) -> None:
        self.job = job
        self.name = str(key)
        self.ended = False
        self.reads = reads
        self.driver = reads.driver
        self.requests: dict[str, Request] = {}
        self._key = key
        self._flow: _Flow | None = None
        self._window_bytes = 0
        self._fenced: dict[str, list[Slot]] = {}
        """What was lent to clients that left without a word, until their processes are gone."""
        self._pending: list[Callable[[], None]] = []
        """What waits until the read has begun."""
        self._begun = False
        self._events: deque[Any] = deque()
        self._tickets = count(1)
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._since = self._used_at = time.monotonic()
        reads.pool.submit(self._open)
        self._later("tick", TICK_S, self.guarded(self._tick))

    # -- beginning and end ------------------------------------------------------------------------

    def _open(self) -> None:
        try:
            epoch = Epoch.open(self.job.path, self._key)
        except GroupIOError as error:
            self.driver.post(partial(self.abandon, error.message))
        except Exception as error:
            log.exception("epoch %s cannot be opened", self.name)
            self.driver.post(partial(self.abandon, f"it cannot be opened ({error!r})"))
        else:
            self.driver.post(self.guarded(partial(self._opened, epoch)))

    def _opened(self, epoch: Epoch) -> None:
        if self.ended:
            epoch.backend.close()
            return
        self._window_bytes = self.reads.reserve()
        try:
            if not self._window_bytes:
                raise OSError(why_no_window(self.driver.machine.ledger.budget))
            window = ReadWindow(self._window_bytes)
        except OSError as error:
            epoch.backend.close()
            self.abandon(f"there is no memory to read with ({error})")
            return
        size = window.arriving.size
        reader = NodeReader(
            self.name,
            self.driver.node,
            epoch.table.lengths,
            store_bytes=size // 4,
            peers_bytes=size // 4,
            hold_bytes=size * 3 // 4,
        )
        memory = ReadMemory(window, self.reads.changed)
        incoming = Incoming(self, epoch, memory)
        here = self.reads.holdings.has(self.job.store.store_id, epoch.table.digests)
        handing = Handing(self, epoch, memory, incoming, here)
        self._flow = _Flow(epoch, memory, reader, incoming, handing)
        if self.job.joining is not None and self.job.joining.joined:
            self.joined()

    def joined(self) -> None:
        """There is a controller, new or again, that knows this node."""
        if self._flow is None or self.ended:
            return
        lengths = self._flow.epoch.table.lengths.astype(np.int32)
        self._tell(rm.ReadOpened(self.name, self.driver.node, lengths))
        if self._begun:
            self.run(rm.SwarmBack())
        else:
            self._begin(self._flow)

    def left(self) -> None:
        """There is no controller now."""
        if self._begun:
            self.run(rm.SwarmLost())

    def _begin(self, flow: _Flow, *, alone: bool = False) -> None:
        self._begun = True
        if alone:
            self.run(rm.SwarmLost())
        self.run(rm.ChunksHere(np.flatnonzero(flow.handing.staged_here).astype(np.int32)))
        pending, self._pending = self._pending, []
        for step in pending:
            step()

    def when_begun(self, step: Callable[[], None]) -> None:
        """Run ``step`` now, or as soon as the read has begun; not at all when it cannot."""
        if self._begun:
            step()
        elif not self.ended:
            self._pending.append(step)

    def abandon(self, why: str) -> None:
        """Read nothing more here: whoever asked reads from the store."""
        if self.ended:
            return
        log.warning("epoch %s of %s is not read here: %s", self.name, self.job.path, why)
        requests, self.requests = self.requests, {}
        self.end()
        for request in requests.values():
            self.driver.send(request.peer, msg.ReadRefused(request.number, why))

    def end(self) -> None:
        """Give everything back; what ranks and peers look at stays theirs until they are done."""
        if self.ended:
            return
        self.ended = True
        self.reads.forget(self)
        self._pending.clear()
        self._events.clear()
        for name in list(self._timers):
            self._stop(name)
        self._tell(rm.ReadClosed(self.name, self.driver.node))
        if self._flow is not None:
            self._flow.incoming.close()
            self._flow.memory.window.close()
        self.reads.give_back(self._window_bytes)

    def _tick(self) -> None:
        now = time.monotonic()
        self._later("tick", TICK_S, self.guarded(self._tick))
        if self._flow is None:
            return
        if not self._begun:
            joining = self.job.joining
            hope = joining is not None and joining.unjoined.may_be_taken
            if now - self._since >= JOIN_S and not hope:
                self._begin(self._flow, alone=True)
            return
        self._flow.incoming.give_up_late()
        if self.busy:
            self._used_at = now
        elif now - self._used_at >= LINGER_S:
            self._close(self._flow)

    @property
    def busy(self) -> bool:
        """Somebody reads, or gets chunks from here."""
        if self.requests or self._pending or self._fenced:
            return True
        flow = self._flow
        return flow is not None and (
            flow.incoming.waits or flow.memory.busy or not flow.reader.idle
        )

    def _close(self, flow: _Flow) -> None:
        rows = [row for row in flow.memory.rows() if not flow.handing.staged_here[row]]
        if rows:
            self.run(rm.ChunksLost(tuple(rows)))
        self.end()

    # -- clients ----------------------------------------------------------------------------------

    def ask(self, peer: Peer, message: msg.ReadOpen) -> None:
        """A rank of this node wants chunks."""
        who = _who(peer.client, message.request_id)
        self.requests[who] = Request(peer, message.request_id)
        self.when_begun(partial(self._ask, who, message))

    def _ask(self, who: str, message: msg.ReadOpen) -> None:
        request, flow = self.requests.get(who), self._flow
        if request is None or flow is None:
            return
        try:
            rows, starts, stops = _checked(message, flow.epoch.table.lengths)
        except InvalidInput as error:
            del self.requests[who]
            self.driver.send(request.peer, msg.ReadRefused(message.request_id, error.message))
            return
        if starts.any():
            request.starts = dict(zip(rows.tolist(), starts.tolist(), strict=True))
        if len(rows):
            arena = msg.ReadArena(message.request_id)
            self.driver.send(request.peer, arena, (flow.memory.window.fd,))
        else:
            del self.requests[who]  # it is counted among the members of its load
        load, members = message.load, message.members
        self.run(rm.ClientWants(who, message.request_id, rows, starts, stops, load, members))

    def took(self, client: str, message: msg.Took) -> None:
        """The rank has copied these."""
        who = _who(client, message.request_id)
        request = self.requests.get(who)
        if request is None or self._flow is None or len(message.rows) % 4:
            return
        rows = np.frombuffer(message.rows, "<i4").tolist()
        mine = tuple(row for row in dict.fromkeys(rows) if row in request.lent)
        for row in mine:
            self._flow.memory.take_back(request.lent.pop(row))
        self.run(rm.ClientTook(who, message.request_id, mine))

    def close(self, client: str, number: int) -> None:
        """The rank is done with its request."""
        self._leave(_who(client, number), fenced=True)

    def client_left(self, client: str, *, fenced: bool) -> None:
        """A rank is gone; ``fenced``: it looks at no memory any more."""
        for who in [name for name in self.requests if name.startswith(f"{client}/")]:
            self._leave(who, fenced=fenced)
        if fenced and self._flow is not None:
            for slot in self._fenced.pop(client, []):
                self._flow.memory.take_back(slot)
            self.guarded(self.go_on)()

    def lends_to(self, client: str) -> bool:
        """A rank may be looking at chunks of this read."""
        return client in self._fenced or any(
            r.peer.client == client for r in self.requests.values()
        )

    def _leave(self, who: str, *, fenced: bool) -> None:
        request = self.requests.pop(who, None)
        if request is None:
            return
        if not fenced:
            self._fenced.setdefault(request.peer.client, []).extend(request.lent.values())
        elif self._flow is not None:
            for slot in request.lent.values():
                self._flow.memory.take_back(slot)
        if self._begun:
            self.run(rm.ClientLeft(who))

    # -- the machine ------------------------------------------------------------------------------

    def run(self, event: Any) -> None:
        """Feed an event to the machine, after those before it; a defect ends this read only."""
        if self.ended or self._flow is None:
            return
        self._events.append(event)
        if len(self._events) == 1:
            self.guarded(partial(self._run_all, self._flow))()

    def _run_all(self, flow: _Flow) -> None:
        while self._events:
            event = self._events[0]
            effects = flow.reader.handle(event)
            if isinstance(event, rm.Arrived):
                flow.incoming.land(event, effects)
            for effect in effects:
                self._execute(flow, effect)
            if len(self._events) == 1:
                self.go_on()
            evicted = flow.memory.evicted()
            if evicted:
                self._events.append(rm.ChunksLost(tuple(evicted)))
            if self.ended:
                return
            self._events.popleft()

    def guarded(self, step: Callable[[], None]) -> Callable[[], None]:
        """``step``, whose defects end this read and not the agent."""

        def guarded() -> None:
            try:
                step()
            except Exception as error:
                log.exception("reading epoch %s failed", self.name)
                self.abandon(f"it met an internal error ({error!r})")

        return guarded

    def _execute(self, flow: _Flow, effect: Any) -> None:
        match effect:
            case rm.Tell(message=message):
                self._tell(message)
            case rm.Pull(peer=peer, rows=rows, starts=starts, stops=stops):
                flow.incoming.get(peer, zip(rows, starts, stops, strict=True))
            case rm.ReadStorage(rows=rows):
                lengths = flow.epoch.table.lengths[list(rows)].tolist()
                flow.incoming.get("", zip(rows, [0] * len(rows), lengths, strict=True))
            case rm.Deliver(client=who, rows=rows):
                flow.handing.deliver(who, rows)
            case rm.Damaged(client=who, rows=rows, why=why):
                request = self.requests.get(who)
                if request is not None:
                    data = np.array(rows, "<i4").tobytes()
                    self.driver.send(request.peer, msg.ReadDamaged(request.number, data, why))
            case rm.Release(rows=rows):
                flow.memory.release(rows)
            case rm.Keep(rows=rows):
                flow.memory.keep(rows)
            case rm.Serve() | rm.Refuse() | rm.Discard():
                pass  # peers are served by the fabric's threads; what is useless is gone already
            case fx.StartTimer(name=name, delay_s=delay_s):
                self._later(name, delay_s, partial(self.run, ev.TimerFired(name)))
            case _:
                raise AssertionError(f"not an effect of a reader: {effect!r}")

    def _tell(self, message: Any) -> None:
        if self.job.joining is not None:
            self.job.joining.tell_swarm(message)

    def _later(self, name: str, delay_s: float, step: Callable[[], None]) -> None:
        self._stop(name)
        loop = asyncio.get_running_loop()
        self._timers[name] = loop.call_later(delay_s, self.driver.do, step)

    def _stop(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()

    def count(self, source: str, nbytes: int) -> None:
        """So many bytes came from there for readers."""
        self.driver.metrics.add("groupio_read_bytes", nbytes, source)

    def go_on(self) -> None:
        """Memory may have become free: get and copy what waits for it."""
        if self._flow is not None and not self.ended:
            self._flow.incoming.get_late()
            self._flow.handing.stage_more()

    def staging_changed(self) -> None:
        """Chunks of the staging memory may be gone."""
        if self._flow is not None:
            digests = self._flow.epoch.table.digests
            here = self.reads.holdings.has(self.job.store.store_id, digests)
            self._flow.handing.staging_changed(here)

    # -- bytes go to peers ------------------------------------------------------------------------

    def row_of(self, digest: bytes) -> int:
        """The row of a chunk, -1 when the epoch does not have it. From any thread."""
        return -1 if self._flow is None else self._flow.epoch.rows.get(digest, -1)

    def find(self, row: int) -> Served | None:
        """A chunk that lies here, for another node. From any thread."""
        flow = self._flow
        if flow is None or self.ended:
            return None
        served = flow.memory.serve(row, int(flow.epoch.table.lengths[row]))
        return None if served is None else self.noted(row, served)

    def noted(self, row: int, served: Served) -> Served:
        """Let the machine know that a peer is getting the chunk. From any thread."""
        ticket = next(self._tickets)
        self.driver.post(partial(self.run, rm.PeerWants(ticket, row)))

        def release() -> None:
            served.release()
            self.driver.post(partial(self.run, rm.PeerDone(ticket, ok=True)))

        return Served(served.view, release)

    def expects(self, row: int) -> bool:
        """Whether the chunk is here or on its way here, as far as is known. From any thread."""
        if self._flow is None or self.ended:
            return not self.ended
        return row >= 0 and self._flow.reader.expects(row)


def _who(client: str, number: int) -> str:
    return f"{client}/{number}"


def _checked(
    message: msg.ReadOpen, lengths: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The arrays of a request; InvalidInput when they make no sense."""
    try:
        rows = np.frombuffer(message.rows, "<i4").astype(np.int32)
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(lengths):
            raise ValueError("a row is not in the table")
        starts, stops = np.zeros(len(rows), np.int64), lengths[rows]
        if message.stops:
            starts = np.frombuffer(message.starts, "<i8").astype(np.int64)
            stops = np.frombuffer(message.stops, "<i8").astype(np.int64)
            if len(starts) != len(rows) or len(stops) != len(rows):
                raise ValueError("the columns differ in length")
            if ((starts < 0) | (starts >= stops) | (stops > lengths[rows])).any():
                raise ValueError("a range does not lie in its chunk")
    except ValueError as error:
        raise InvalidInput(f"a request to read cannot be used: {error}") from None
    return rows, starts, stops
