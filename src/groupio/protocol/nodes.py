"""The table of the agents that take part in a job, as its controller knows them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import msgspec

from groupio.errors import InvalidInput
from groupio.model import NodeLink
from groupio.protocol import events as ev


@dataclass(frozen=True, slots=True)
class Agent:
    """One agent: ``life`` names its process, ``address`` is where peers reach its fabric."""

    life: str
    address: str
    store_id: str
    path: str
    """Of its store, for messages."""


@dataclass(slots=True)
class Nodes:
    """Agents by node. Empty for good where a job has one agent, which never joins."""

    known: bool = False
    """Some agent joined: from then on, only nodes in this table are alive."""
    liars: set[str] = field(default_factory=set)
    """Nodes that sent wrong bytes; nobody is told to fetch from them."""
    unproved: set[str] = field(default_factory=set)
    """Living nodes that have not proved yet that they see the controller's store."""
    _agents: dict[str, Agent] = field(default_factory=dict)
    _links: dict[str, NodeLink] = field(default_factory=dict)

    @property
    def alive(self) -> tuple[str, ...]:
        """The names of all living nodes, sorted."""
        return tuple(sorted(self._agents))

    def __contains__(self, node: str) -> bool:
        return node in self._agents

    def life(self, node: str) -> str:
        """The life of a living node's agent, "" for another node."""
        agent = self._agents.get(node)
        return "" if agent is None else agent.life

    @property
    def paths(self) -> dict[str, str]:
        """The paths of the store on all living nodes."""
        return {node: agent.path for node, agent in self._agents.items()}

    def gone(self, node: str) -> bool:
        """The node's agent is lost, or never joined a job that agents join."""
        return self.known and node not in self._agents

    def refuse(self, event: ev.NodeJoined, store_id: str) -> InvalidInput | None:
        """Why the agent cannot take part, or None."""
        if event.store_id and store_id and event.store_id != store_id:
            return other_store(event.node, event.store_id, store_id)
        other = self._agents.get(event.node)
        if other is not None and other.life != event.life:
            return InvalidInput(
                f"Two agents call themselves node {event.node}: one at {other.address}, one at "
                f"{event.address}; set GROUPIO_NODE to another name for one of the two machines."
            )
        return None

    def strangers(self, store_id: str) -> list[tuple[str, str, InvalidInput]]:
        """Node, life and error of each agent that has another store than this one."""
        return [
            (node, agent.life, other_store(node, agent.store_id, store_id))
            for node, agent in sorted(self._agents.items())
            if agent.store_id and store_id and agent.store_id != store_id
        ]

    def join(self, event: ev.NodeJoined) -> bool:
        """Take an agent in; False when this life of it was there already."""
        new = event.node not in self._agents
        self.known = True
        self._agents[event.node] = Agent(event.life, event.address, event.store_id, event.path)
        self._links[event.node] = event.link
        if new:
            self.liars.discard(event.node)
        return new

    def lose(self, node: str, life: str) -> bool:
        """Forget an agent; False when this life of it is not there."""
        if self.life(node) != life or node not in self._agents:
            return False
        del self._agents[node], self._links[node]
        self.unproved.discard(node)
        return True

    def measure(self, link: NodeLink) -> None:
        """The node's links have other rates now."""
        if link.node in self._links:
            self._links[link.node] = link

    def links(self, names: Collection[str], avoid: Collection[str] = ()) -> tuple[NodeLink, ...]:
        """The links of those of ``names`` that are alive, sorted by node.

        Liars and the nodes in ``avoid`` keep out of the fabric.
        """
        shunned = self.liars.union(avoid)
        return tuple(
            msgspec.structs.replace(self._links[node], fabric_ok=False)
            if node in shunned
            else self._links[node]
            for node in sorted(self._agents.keys() & set(names))
        )

    def addresses(self, names: Collection[str]) -> dict[str, str]:
        """Where the fabrics of those of ``names`` that are alive are reached."""
        return {n: self._agents[n].address for n in sorted(self._agents.keys() & set(names))}


def other_store(node: str, its: str, ours: str) -> InvalidInput:
    """The node's path leads to another store than the controller's."""
    return InvalidInput(
        f"The store path of node {node} leads to store {its}, that of this job to store {ours}; "
        "mount the same file system on all nodes of the job."
    )
