"""The blocks of a manifest that is written: item tables and arrays of refs, equal ones once."""

from __future__ import annotations

import numpy as np

from groupio.errors import InvalidInput
from groupio.format.columns import Section, pack_array, pack_bytes
from groupio.format.items import encode_items, items_id
from groupio.model import MemberTable

PackedTables = dict[bytes, tuple[Section, bytes]]
"""Item tables as they are stored, by their ids."""


class Blocks:
    """Collects item tables and arrays of refs; equal ones become one block."""

    def __init__(self, earlier: PackedTables) -> None:
        self.tables: PackedTables = {}
        self._earlier = earlier
        self.sections: list[Section] = []
        self.stored: list[bytes] = []
        self._by_content: dict[bytes, int] = {}

    def items(self, member: MemberTable) -> int:
        """The block of the member's item table."""
        block = self._by_content.get(member.items_id)
        if block is not None:
            return block
        packed = self._earlier.get(member.items_id)
        if packed is None:
            table = encode_items(member.items)
            if items_id(table) != member.items_id:
                raise InvalidInput(
                    f"the manifest cannot be written: the items_id of rank {member.rank} is not "
                    "the digest of its item table"
                )
            packed = pack_bytes(table)
        self.tables[member.items_id] = packed
        return self._add(member.items_id, *packed)

    def refs(self, member: MemberTable, chunks: int) -> int:
        """The block of the member's refs."""
        refs = member.refs
        if len(refs) and not 0 <= int(refs.min()) <= int(refs.max()) < chunks:
            raise InvalidInput(
                f"the manifest cannot be written: a ref of rank {member.rank} is not one of the "
                f"{chunks} chunks"
            )
        narrow = np.ascontiguousarray(refs, "<i4")
        # The prefix keeps an array of refs from ever being taken for the id of an item table.
        content = b"refs" + narrow.tobytes()
        block = self._by_content.get(content)
        return self._add(content, *pack_array(narrow)) if block is None else block

    def _add(self, content: bytes, section: Section, stored: bytes) -> int:
        block = self._by_content[content] = len(self.stored)
        self.sections.append(section)
        self.stored.append(stored)
        return block
