"""A save's items on their way out: prepared, described and laid out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from groupio.client.values import Prepared, prepare
from groupio.format.items import encode_items, items_id
from groupio.plan.layout import Layout, lay_out

_LAYOUTS_MAX = 4


@dataclass(frozen=True, slots=True)
class Outgoing:
    """``table`` is the encoded item table, ``items_id`` its digest."""

    prepared: Prepared
    table: bytes
    items_id: bytes
    layout: Layout


class Packer:
    """Prepares saves, and remembers the layouts of recent item tables. Thread-safe."""

    def __init__(self) -> None:
        self._layouts: OrderedDict[bytes, Layout] = OrderedDict()

    def pack(self, items: Mapping[str, Any], replicated: Iterable[str]) -> Outgoing:
        """All about ``items`` that a save needs; InvalidInput when they cannot be saved."""
        prepared = prepare(items, replicated)
        table = encode_items(prepared.specs)
        digest = items_id(table)
        layout = self._layouts.get(digest)
        if layout is None:
            layout = lay_out(prepared.specs)
            self._layouts[digest] = layout
            while len(self._layouts) > _LAYOUTS_MAX:
                try:
                    self._layouts.popitem(last=False)
                except KeyError:
                    break  # another thread was faster
        return Outgoing(prepared, table, digest, layout)
