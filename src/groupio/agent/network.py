"""The agent's side of jobs that span nodes: keys, connections to other agents, its holdings."""

from __future__ import annotations

import logging
import os
import uuid
from functools import partial
from typing import TYPE_CHECKING

from groupio.agent.holdings import Holdings
from groupio.agent.identity import reachable
from groupio.agent.lending import yield_to_others
from groupio.agent.links import Links
from groupio.agent.reading import Reads
from groupio.controller import messages as cm
from groupio.controller.gate import Gate, no_such_job
from groupio.controller.host import Host
from groupio.controller.keys import Keys
from groupio.controller.store import JobStore
from groupio.errors import GroupIOError, InvalidInput
from groupio.exhaustion import ThreadPool
from groupio.fabric.open import open_fabric
from groupio.model import NodeLink
from groupio.protocol import events as ev
from groupio.protocol import reasons

if TYPE_CHECKING:
    from groupio.agent.driver import Driver

log = logging.getLogger(__name__)

FETCH_THREADS = 8
"""Pulls from so many peers at a time."""

ORDER_THREADS = 4
"""Rounds of so many groups at a time."""


class Network:
    """One per agent, made when the first job of several nodes comes. Runs in the event loop."""

    def __init__(self, driver: Driver) -> None:
        """InvalidInput when this node cannot be reached as the settings ask, or not without token.

        Nothing is left open then.
        """
        self._driver = driver
        settings = driver.settings
        self.life = uuid.uuid4().hex
        self.token = Keys.from_env(os.environ)
        """The keys of the configured token; without one each store has its own."""
        self.listens_at, port = _listen(settings.listen, self.token is not None)
        self.announced = _announced(self.listens_at)
        self.holdings = Holdings(driver.memory.view)
        token = None if self.token is None else self.token.fabric_key
        self.fabric = open_fabric(settings, self.listens_at, self.announced, token, driver.budget)
        self.reads = Reads(driver, self.holdings, self.fabric)
        self.fabric_address = self._serve()
        self.fetching = ThreadPool(FETCH_THREADS, "fetch")
        self.orders = ThreadPool(ORDER_THREADS, "order", initializer=yield_to_others)
        self.hosts: dict[str, Host] = {}
        self._gates: dict[str, tuple[Keys, Gate]] = {}
        """By store id; one for all, named "", where there is a token."""
        self._paths: dict[str, str] = {}
        self._port = port
        self.links = Links(
            driver.node,
            settings.failure_domain or driver.node,
            uplink=settings.uplink_bytes_per_s,
            fabric=settings.fabric_bytes_per_s,
            engine=self.fabric,
            pool=self.fetching,
            changed=lambda link: driver.post(lambda: self._tell_links(link)),
        )

    def _serve(self) -> str:
        try:
            return self.fabric.serve(self.reads)
        except (GroupIOError, OSError) as error:
            self.reads.close()
            self.fabric.close()
            if isinstance(error, GroupIOError):
                raise
            raise InvalidInput(
                f"cannot listen on {self.listens_at}: {error.strerror or error}; set "
                "GROUPIO_LISTEN to an address of this node that other nodes reach"
            ) from error

    def _tell_links(self, link: NodeLink) -> None:
        for job in self._driver.jobs.values():
            if job.joining is not None:
                job.joining.tell(ev.LinkMeasured(link))

    def keys_of(self, store: JobStore) -> Keys:
        """The keys of the job in an open store. Blocks; InvalidInput where it needs a token."""
        if self.token is not None:
            return self.token
        keys = Keys.of(store.backend)
        self.fabric.trust(store.store_id, keys.fabric_key)
        return keys

    def claim(self, store_id: str, path: str) -> None:
        """Let the job at ``path`` be that of this store. StorageError when a copy is in use.

        From any thread. Agents find each other by the id of their store.
        """
        owner = self._paths.setdefault(store_id, path)
        if owner != path:
            raise reasons.copied_store(path, owner)

    def release(self, store_id: str, path: str) -> None:
        """The job at ``path`` is over; a copy of its store may be used now."""
        if self._paths.get(store_id) == path:
            del self._paths[store_id]

    def gate_address(self, store_id: str, keys: Keys) -> str:
        """Where agents of other nodes reach the controller of a store in this process.

        Who knows the key of one store is let in there only. InvalidInput when there is no way in.
        """
        name = store_id if keys.of_store else ""
        if name in self._gates and self._gates[name][0].fabric_key != keys.fabric_key:
            self.close_gate(name)  # the store has another key by now
        if name not in self._gates:
            self._gates[name] = keys, self._open_gate(name, keys)
        port = self._gates[name][1].address.rpartition(":")[2]
        return f"tcp://{self.announced}:{port}"

    def _open_gate(self, only: str, keys: Keys) -> Gate:
        find = partial(self._find, only)
        node, port = self._driver.node, self._port
        if keys.of_store and port and self._gates:
            port = 0  # another store's way in has it, and others look the address up
        return Gate(f"tcp://{self.listens_at}:{port}", keys, node, self.life, find)

    def close_gate(self, store_id: str) -> None:
        """Let no agent in to the controller of this store any more, which has ended."""
        if store_id in self._gates:
            self._gates.pop(store_id)[1].close()

    def _find(self, only: str, hello: cm.NodeHello) -> Host:
        host = self.hosts.get(hello.store_id)
        if host is None or only not in ("", hello.store_id):
            raise no_such_job(hello)
        if hello.job != host.store.job:
            raise InvalidInput(
                f"node {hello.node} means job {hello.job!r}, and store {hello.store_id} belongs to "
                f"job {host.store.job!r}; give both the same name"
            )
        return host

    def part(self) -> None:
        """The controllers here rule no more: their agents look for the next ones meanwhile."""
        for host in self.hosts.values():
            host.hang_up("the controller's agent ends")

    def close(self) -> None:
        """End all connections; transfers in progress fail."""
        for _, gate in self._gates.values():
            gate.close()
        self.links.close()
        self.reads.close()
        self.fabric.close()
        self.orders.shutdown(wait=False, cancel_futures=True)
        self.fetching.shutdown(wait=False, cancel_futures=True)


def _listen(configured: str | None, has_token: bool) -> tuple[str, int]:
    """Host and port to listen at; port 0: any."""
    if configured is None:
        return ("0.0.0.0" if has_token else "127.0.0.1"), 0
    host, _, port = configured.rpartition(":")
    if not host or not port.isdecimal():
        return configured, 0
    return host, int(port)


def _announced(host: str) -> str:
    """What other nodes are told; InvalidInput when this node cannot tell its own address."""
    try:
        return reachable(host)
    except OSError as error:
        raise InvalidInput(
            f"this node listens on {host} and does not know which address of it others reach "
            f"({error.strerror or error}); set GROUPIO_LISTEN to that address"
        ) from error
