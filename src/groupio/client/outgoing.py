"""A save's items on their way out: prepared, described and laid out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from groupio.client.values import Prepared, prepare
from groupio.format.items import encode_items, items_id
from groupio.plan.layout import Layout, lay_out


@dataclass(frozen=True, slots=True)
class Outgoing:
    """``table`` is the encoded item table, ``items_id`` its digest."""

    prepared: Prepared
    table: bytes
    items_id: bytes
    layout: Layout


class Packer:
    """Prepares saves. A job saves the same names and shapes again and again: what was said of
    them last time is used again where it still holds. Thread-safe."""

    def __init__(self) -> None:
        self._last: Outgoing | None = None
        self._specs: dict[str, Any] = {}

    def pack(self, items: Mapping[str, Any], replicated: Iterable[str]) -> Outgoing:
        """All about ``items`` that a save needs; InvalidInput when they cannot be saved."""
        last = self._last
        prepared = prepare(items, replicated, self._specs)
        # Cheap when they are equal: most are the very objects of the last time.
        if last is not None and last.prepared.specs == prepared.specs:
            return Outgoing(prepared, last.table, last.items_id, last.layout)
        table = encode_items(prepared.specs)
        outgoing = Outgoing(prepared, table, items_id(table), lay_out(prepared.specs))
        self._specs = {spec.name: spec for spec in prepared.specs}
        # Without its sources: the tensors of an earlier save are not kept alive.
        kept = Prepared(prepared.specs, ())
        self._last = Outgoing(kept, table, outgoing.items_id, outgoing.layout)
        return outgoing
