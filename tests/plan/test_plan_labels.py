"""Moved chunks know of which tensors they are."""

from __future__ import annotations

import numpy as np
from plan_help import digest, member, tensor

from groupio.model import CHUNK_BYTES, ChunkTable, ItemSpec, NodeReport
from groupio.plan.grouped import GroupPlan
from groupio.plan.labels import label_moves
from groupio.plan.layout import lay_out
from groupio.plan.orders import Fetch, NodeOrder

ROWS = 2 * CHUNK_BYTES // 4
"""A float32 vector of two chunks."""


def fetch(words: list[str], lengths: list[int], *, write: bool) -> Fetch:
    """Chunks of node a."""
    n = len(words)
    names = np.frombuffer(b"".join(map(digest, words)), np.uint8).reshape(-1, 32)
    flags = np.full(n, write, np.bool_)
    return Fetch("a", names, np.array(lengths, np.int64), ~flags, flags, ())


def plan(*parts: Fetch) -> GroupPlan:
    """A plan in which node b fetches ``parts``."""
    none = np.empty(0, np.int64)
    orders = {"a": NodeOrder(none, (), True), "b": NodeOrder(none, tuple(parts), False)}
    return GroupPlan(orders, 1.0, 0, 0, 0, (), False)


def world() -> tuple[list[ItemSpec], NodeReport, list[int]]:
    """Two members of node a with a tensor of two chunks, a small one and an equal small one."""
    items = [tensor("long", (ROWS,)), tensor("short", (8,))]
    lengths = lay_out(tuple(items)).chunk_length.tolist()
    words = ["l0", "l1", "s", "other", "nobody"]
    sizes = [*lengths, lengths[2], 16]
    names = np.frombuffer(b"".join(map(digest, words)), np.uint8).reshape(-1, 32)
    nowhere, none = np.full(len(words), -1, np.int32), np.zeros(len(words), np.int64)
    chunks = ChunkTable(names, np.array(sizes, np.int64), nowhere, none)
    members = (member(0, items, [0, 1, 2]), member(1, items, [0, 1, 3]))
    return items, NodeReport("a", (), chunks, members), sizes


def test_nothing_is_labelled_that_is_only_kept() -> None:
    _, one, sizes = world()
    made = plan(fetch(["l0"], sizes[:1], write=False))
    assert label_moves(made, [one]) is made


def test_chunks_come_in_the_order_of_their_tensors() -> None:
    items, one, sizes = world()
    kept = fetch(["s"], [sizes[2]], write=False)
    moved = fetch(
        ["nobody", "other", "l1", "s", "l0"],
        [sizes[4], sizes[3], sizes[1], sizes[2], sizes[0]],
        write=True,
    )
    made = label_moves(plan(kept, moved), [one])
    untouched, part = made.orders["b"].fetch
    assert untouched is kept
    assert made.orders["a"].fetch == ()
    labels = part.labels
    assert labels is not None
    names = [labels.items[o].name if o >= 0 else "" for o in labels.owners.tolist()]
    assert names == ["", "long", "long", "short", "short"]
    assert labels.numbers.tolist() == [0, 0, 1, 0, 0]
    wanted = [digest(w) for w in ["nobody", "l0", "l1", "s", "other"]]
    assert [row.tobytes() for row in part.digests] == wanted
    assert part.lengths.tolist() == [sizes[4], sizes[0], sizes[1], sizes[2], sizes[3]]
    assert labels.items[0] == items[0]
