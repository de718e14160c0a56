"""A save's items on their way out: prepared, described and laid out."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from groupio.client.arguments import check_patterns
from groupio.client.copying import copy_range
from groupio.client.forms import Form
from groupio.client.sources import Flat
from groupio.client.values import Prepared, prepare
from groupio.format.items import encode_items, items_id
from groupio.model import ItemSpec
from groupio.plan.layout import Layout, lay_out


@dataclass(frozen=True, slots=True)
class Outgoing:
    """``table`` is the encoded item table, ``items_id`` its digest."""

    prepared: Prepared
    table: bytes
    items_id: bytes
    layout: Layout

    def detached(self) -> Outgoing:
        """The same with the bytes copied: the caller may change what it gave.

        MemoryError when there is no room for the copy.
        """
        size = self.layout.total_bytes
        memory = np.empty(max(size, 1), np.uint8)
        address = int(memory.ctypes.data)
        copy_range(self.prepared, self.layout, 0, size, address, lambda: False)
        starts = self.layout.item_start.tolist()
        sources = tuple(
            Flat(address + start, memory) if spec.nbytes and spec.alias < 0 else None
            for spec, start in zip(self.prepared.specs, starts, strict=True)
        )
        return replace(self, prepared=Prepared(self.prepared.specs, sources))


class Packer:
    """Prepares saves. A job saves the same names and shapes again and again: what was said of
    them last time is used again where it still holds. Thread-safe."""

    def __init__(self) -> None:
        self._last: _Last | None = None

    def pack(self, items: Mapping[str, Any], replicated: Iterable[str]) -> Outgoing:
        """All about ``items`` that a save needs; InvalidInput when they cannot be saved."""
        with _collector_paused():
            return self._pack(items, replicated)

    def _pack(self, items: Mapping[str, Any], replicated: Iterable[str]) -> Outgoing:
        last = self._last
        declared = check_patterns(replicated)
        if last is not None and last.form is not None and isinstance(items, Mapping):
            prepared = last.form.prepare(items, declared)
            if prepared is not None:
                return last.outgoing(prepared)
        prepared = prepare(items, declared, {} if last is None else last.specs)
        form = Form.of(items, prepared, declared)
        # Cheap when they are equal: most are the very objects of the last time.
        if last is not None and last.listed == prepared.specs:
            last = replace(last, form=form)
        else:
            table = encode_items(prepared.specs)
            specs = {spec.name: spec for spec in prepared.specs}
            layout = lay_out(prepared.specs)
            last = _Last(specs, prepared.specs, table, items_id(table), layout, form)
        self._last = last
        return last.outgoing(prepared)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """A first save makes many objects that stay. The garbage collector would look at them, and at
    all that the caller's program has, again and again, and find nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True, slots=True)
class _Last:
    """What an earlier save leaves; it keeps no tensor alive."""

    specs: Mapping[str, ItemSpec]
    listed: tuple[ItemSpec, ...]
    table: bytes
    items_id: bytes
    layout: Layout
    form: Form | None

    def outgoing(self, prepared: Prepared) -> Outgoing:
        return Outgoing(prepared, self.table, self.items_id, self.layout)
