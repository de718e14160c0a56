"""Memory that clients get ahead of their first saves, and what gives way when there is too much."""

from __future__ import annotations

from dataclasses import dataclass

from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol.ledger import Use, extent_bytes
from groupio.protocol.nodestate import NodeState, drop_content, punch


@dataclass(slots=True)
class Standby(NodeState):
    """Free memory of the node."""

    # -- standby ---------------------------------------------------------

    def _on_expected(self, client: str, total_bytes: int) -> list[fx.Effect]:
        """Give a client memory ahead of its first save, if there is room without taking any.

        It is free memory, which any group may take. A larger expectation replaces a smaller one.
        """
        length = extent_bytes(total_bytes)
        old = self._ahead.get(client)
        if old is None and client in self.arenas:
            return []  # it saved already, or others needed the memory
        held = 0 if old is None else old.length
        used = self.ledger.total() + self.ledger.reserved
        if length <= held or used - held + length > self.ledger.budget:
            return []
        effects = [*self._end_standby(client), *self._open_arena(client)]
        arena = self.arenas[client]
        extent = self._ahead[client] = self.ledger.lease(arena, length)
        self.ledger.free(extent)
        return [*effects, fx.Populate(arena, extent.offset, extent.length, client)]

    def _on_mapped(self, event: ev.AheadMapped) -> list[fx.Effect]:
        """Mapping touches the memory: what was given back meanwhile has to go once more."""
        arena = self.arenas.get(event.client)
        if arena is None:
            return []
        end = event.offset + event.length
        for extent in self.ledger.extents:
            overlaps = extent.offset < end and event.offset < extent.offset + extent.length
            if extent.arena == arena and overlaps:
                return []
        return [fx.Punch(arena, event.offset, event.length)]

    def _end_standby(self, client: str) -> list[fx.Effect]:
        """The memory that the client got ahead is in use now, or not what it needs."""
        extent = self._ahead.pop(client, None)
        if extent is None or extent.use is not Use.FREE:
            return []
        self.ledger.discard(extent)
        return [punch(extent)]

    def _give_way(self) -> list[fx.Effect]:
        """Give back free memory until the budget holds."""
        out = self.ledger.overcommit()
        self._ahead = {client: e for client, e in self._ahead.items() if e not in out}
        effects: list[fx.Effect] = []
        for extent in out:
            effects += [*drop_content(extent), punch(extent)]
        for arena in sorted(self._orphans - {e.arena for e in self.ledger.extents}):
            self._orphans.discard(arena)
            self.ledger.drop_arena(arena)
            effects.append(fx.CloseArena(arena))
        return effects
