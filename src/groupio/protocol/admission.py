"""Admits a group to memory on its nodes: on all at once, or on one after the other.

A group of several nodes first asks all of them not to wait. When one has no room now, the others
give back what they hold, and the nodes are asked again one after the other in the order of their
names, now to wait for room. All controllers follow that order, so that no two groups ever wait for
memory that the other one holds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from groupio.protocol import effects as fx
from groupio.protocol import events as ev


@dataclass(slots=True)
class Admission:
    """The orders that admit one group, by node, and their answers."""

    orders: dict[str, fx.AdmitGroup] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)
    """Nodes that hold memory, or may do so."""
    shares: dict[str, int] = field(default_factory=dict)
    """Bytes that each node keeps free for chunks of others."""
    cramped: set[str] = field(default_factory=set)
    """Nodes that cannot hold what replication needs."""
    over: bool = False
    """The group is given up: nobody is asked any more."""
    _admitted: set[str] = field(default_factory=set)
    _busy: set[str] = field(default_factory=set)
    _in_order: bool = False

    @property
    def complete(self) -> bool:
        """All nodes hold the group's memory."""
        return self._admitted == set(self.orders)

    def begin(self, orders: Iterable[fx.AdmitGroup]) -> list[fx.Effect]:
        """Ask all nodes."""
        self.orders = {order.node: order for order in orders}
        self.asked = set(self.orders)
        return list(self.orders.values())

    def admitted(self, event: ev.NodeAdmitted) -> list[fx.Effect]:
        """A node holds its part."""
        order = self.orders.get(event.node)
        if order is None or event.node in self._admitted:
            return []
        if self._in_order and not event.waited:
            # An answer of the first try; a node that is not asked again yet must not hold anything.
            late = event.node not in self.asked
            return [fx.RetractGroup(event.node, order.group)] if late else []
        # It may have been busy when it was asked first, and have room since it was asked again.
        self._busy.discard(event.node)
        self.asked.add(event.node)
        self._admitted.add(event.node)
        self.shares[event.node] = event.replica_bytes
        if event.replica_bytes < order.replica_bytes or not event.in_memory:
            self.cramped.add(event.node)
        return self._go_on()

    def busy(self, node: str) -> list[fx.Effect]:
        """A node has no room now."""
        if node not in self.asked or self._in_order:
            return []
        self.asked.discard(node)
        self._busy.add(node)
        return self._go_on()

    def lose(self, node: str) -> list[fx.Effect]:
        """A node that the group can do without is gone."""
        if self.orders.pop(node, None) is None:
            return []
        for names in (self.asked, self._admitted, self._busy, self.cramped):
            names.discard(node)
        self.shares.pop(node, None)
        return self._go_on()

    def _go_on(self) -> list[fx.Effect]:
        if self.over:
            return []
        if self._in_order:
            return self._next()
        if not self._busy or self.asked != self._admitted:
            return []
        self._in_order = True
        retracted = [fx.RetractGroup(n, self.orders[n].group) for n in sorted(self._admitted)]
        self._admitted, self.asked = set(), set()
        self.cramped = set()
        return [*retracted, *self._next()]

    def _next(self) -> list[fx.Effect]:
        """Ask the next node in order, once all before it hold their parts."""
        if self.asked != self._admitted or self.complete:
            return []
        node = min(self.orders.keys() - self.asked)
        self.asked.add(node)
        return [self._order(node)]

    def _order(self, node: str) -> fx.AdmitGroup:
        order = self.orders[node]
        return msgspec.structs.replace(order, wait=True) if self._in_order else order

    def again(self, node: str) -> list[fx.Effect]:
        """A node may not have heard its order."""
        if node in self.asked and node not in self._admitted:
            return [msgspec.structs.replace(self._order(node), again=True)]
        return []

    def holds(self, node: str) -> bool:
        """The node said that it holds its part."""
        return node in self._admitted
