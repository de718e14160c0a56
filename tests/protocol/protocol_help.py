"""Small builders for the tests of groupio.protocol."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from groupio.model import ChunkTable, ItemKind, ItemSpec, MemberTable, NodeReport
from groupio.plan.layout import Layout, lay_out
from groupio.protocol import events as ev

MIB = 1 << 20


def layout_of(nbytes: int) -> Layout:
    """The layout of a member that saves one item of so many bytes."""
    return lay_out([ItemSpec("x", ItemKind.BYTES, "", (nbytes,), (nbytes,), (0,), nbytes)])


def report_of(node: str, members: Mapping[int, str]) -> NodeReport:
    """A node's report; each member's content is named by a word, there are no bytes."""
    none = np.zeros(0, np.int64)
    return NodeReport(
        node=node,
        segments=(),
        chunks=ChunkTable(np.zeros((0, 32), np.uint8), none, none.astype(np.int32), none),
        members=tuple(
            MemberTable(rank, (), content.encode(), none, 0)
            for rank, content in sorted(members.items())
        ),
    )


def opened(rank: int = 0, world: int = 1, epoch: int = 1, **fields: Any) -> ev.MemberOpened:
    """A member's open with plausible values for what a test does not care about."""
    given: dict[str, Any] = {
        "node": "n0",
        "client": f"c{rank}",
        "process": ev.Process(100 + rank, 1),
        "rank": rank,
        "world_size": world,
        "save_id": 1,
        "epoch": epoch,
        "deadline_s": 600.0,
        "elapsed_s": 0.0,
        "at": 0.0,
        "total_bytes": 0,
        "bytes_logical": 0,
        "items_id": b"",
    }
    return ev.MemberOpened(**(given | fields))
