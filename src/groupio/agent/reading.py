"""All reads of this agent: who asks for what, and what other nodes may get from here.

Reads go through an agent only where a job spans nodes. Each unique chunk then leaves the store
once for all nodes that read it, and not at all while some node has it in memory.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

from groupio.agent.holdings import Holdings
from groupio.agent.read_node import NodeRead
from groupio.agent.read_window import window_bytes
from groupio.client.chunk_reader import default_threads
from groupio.exhaustion import ThreadPool
from groupio.fabric.base import Fabric, Served
from groupio.format.records import parse_key
from groupio.model import DecisionKey
from groupio.protocol import events as ev
from groupio.protocol import messages as msg
from groupio.protocol import reading_messages as rm

if TYPE_CHECKING:
    from groupio.agent.driver import Driver
    from groupio.agent.job import Job
    from groupio.agent.peer import Peer

log = logging.getLogger(__name__)


class Reads:
    """The reads of all jobs, and the fabric's provider. The event loop's, but for the latter."""

    def __init__(self, driver: Driver, holdings: Holdings, fabric: Fabric) -> None:
        self.driver = driver
        self.holdings = holdings
        self.fabric = fabric
        self.changed = threading.Condition()
        """Notified when peers can get more chunks."""
        self.pool = ThreadPool(default_threads(), "read")
        self.storage = ThreadPool(default_threads(), "read-store")
        """Its threads may sleep; what is here already does not wait for them."""
        self._reads: dict[tuple[str, str], NodeRead] = {}
        self._addresses: dict[str, dict[str, str]] = {}

    # -- ranks of this node -----------------------------------------------------------------------

    def ask(self, peer: Peer, job: Job, message: msg.ReadOpen | msg.Took | msg.ReadClose) -> None:
        """Take a message of a rank."""
        match message:
            case msg.ReadOpen(key=key):
                if self.driver.draining:
                    why = "the agent is about to end"
                    self.driver.send(peer, msg.ReadRefused(message.request_id, why))
                else:
                    self._read(job, key).ask(peer, message)
            case msg.Took():
                for read in self._of(job):
                    read.took(peer.client, message)
            case msg.ReadClose(request_id=request_id):
                for read in self._of(job):
                    read.close(peer.client, request_id)

    def client_left(self, client: str, *, fenced: bool) -> None:
        """A rank is gone; ``fenced``: it looks at no memory any more."""
        for read in list(self._reads.values()):
            read.client_left(client, fenced=fenced)

    def lends_to(self, client: str) -> bool:
        """A rank may be looking at memory of a read."""
        return any(read.lends_to(client) for read in self._reads.values())

    # -- the controller ---------------------------------------------------------------------------

    def take(self, job: Job, message: Any) -> None:
        """Take what the job's swarm says."""
        if isinstance(message, rm.Peers):
            self._addresses[job.path] = message.addresses
            return
        key = parse_key(message.key)
        if key is None:
            log.error("the controller of %s speaks of epoch %r", job.path, message.key)
            return
        read = self._read(job, key)
        if not isinstance(message, rm.ReadSought):
            read.when_begun(lambda: read.run(message))

    def joined(self, job: Job) -> None:
        """The job has a controller, new or again, that knows this node."""
        for read in self._of(job):
            read.joined()

    def left(self, job: Job) -> None:
        """The job has no controller now."""
        for read in self._of(job):
            read.left()

    def leave(self, job: Job) -> bool:
        """The job is about to end here; True when it has to wait for a read."""
        reads = self._of(job)
        if any(read.busy for read in reads):
            return True
        for read in reads:
            read.end()
        self._addresses.pop(job.path, None)
        return False

    def address(self, job: Job, node: str) -> str | None:
        """Where the fabric of another node is."""
        return self._addresses.get(job.path, {}).get(node)

    # -- reads ------------------------------------------------------------------------------------

    def _read(self, job: Job, key: DecisionKey) -> NodeRead:
        name = job.path, str(key)
        read = self._reads.get(name)
        if read is None:
            read = self._reads[name] = NodeRead(self, job, key)
        return read

    def _of(self, job: Job) -> list[NodeRead]:
        return [read for read in self._reads.values() if read.job is job]

    def forget(self, read: NodeRead) -> None:
        """The read has ended."""
        self._reads.pop((read.job.path, read.name), None)

    def reserve(self) -> int:
        """Memory for a window, in bytes, accounted until :meth:`give_back`; 0: there is none."""
        ledger = self.driver.machine.ledger
        size = window_bytes(ledger.budget, ledger.available, ledger.reserved)
        if size:
            self.driver.tell_machine(ev.MemoryReserved(size))
        return size

    def give_back(self, nbytes: int) -> None:
        """The memory is used no more."""
        if nbytes:
            self.driver.tell_machine(ev.MemoryReserved(-nbytes))

    def staging_changed(self) -> None:
        """Chunks of the staging memory are gone."""
        for read in list(self._reads.values()):
            read.staging_changed()

    def close(self) -> None:
        """End all reads."""
        for read in list(self._reads.values()):
            read.end()
        for pool in (self.pool, self.storage):
            pool.shutdown(wait=False, cancel_futures=True)

    # -- what the fabric serves -------------------------------------------------------------------

    def find(self, job: str, digest: bytes, wait_s: float) -> Served | None:
        """See :class:`groupio.fabric.base.Provider`."""
        reads = self._in(job)
        if not reads:
            return self.holdings.find(job, digest, wait_s)
        served = self._find(reads, job, digest)
        if served is None and wait_s > 0:
            with self.changed:
                self.changed.wait(wait_s)
            served = self._find(reads, job, digest)
        return served

    def _find(self, reads: list[NodeRead], job: str, digest: bytes) -> Served | None:
        staged = self.holdings.find(job, digest, 0)
        for read in reads:
            row = read.row_of(digest)
            if row >= 0:
                served = read.find(row) if staged is None else read.noted(row, staged)
                if served is not None:
                    return served
        return staged

    def expects(self, job: str, digest: bytes) -> bool:
        """See :class:`groupio.fabric.base.Provider`."""
        if self.holdings.expects(job, digest):
            return True
        return any(read.expects(read.row_of(digest)) for read in self._in(job))

    def _in(self, store_id: str) -> list[NodeRead]:
        return [read for read in list(self._reads.values()) if read.job.store.store_id == store_id]
