"""How much memory it takes to know the epochs of a job."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from groupio.agent.identity import Writer
from groupio.controller.store import JobStore
from groupio.format.items import encode_items, items_id
from groupio.format.manifest import encode_manifest
from groupio.format.records import segment_name
from groupio.model import (
    ChunkTable,
    DecisionKey,
    EpochHeader,
    ItemKind,
    ItemSpec,
    Lineage,
    Manifest,
    MemberTable,
    SegmentRef,
)
from groupio.plan.layout import lay_out

WRITER = Writer.of_this_process()
MEMBERS = 4
ITEMS = 10_000
"""Tiny ones, of each member: as many chunks."""

KEPT_BYTES = 150
"""Per chunk of one epoch, with two epochs known that have no chunk in common."""

PEAK_BYTES = 600


def tables() -> list[tuple[ItemSpec, ...]]:
    """What each member saves, under names of its own."""
    size = 64
    return [
        tuple(
            ItemSpec(f"{rank}.layer.{i}", ItemKind.BYTES, "", (size,), (size,), (0,), size)
            for i in range(ITEMS)
        )
        for rank in range(MEMBERS)
    ]


def commit(store: JobStore, epoch: int, items: list[tuple[ItemSpec, ...]]) -> None:
    """An epoch of chunks that no other epoch has."""
    n = MEMBERS * ITEMS
    key = DecisionKey(1, epoch, 1)
    members = tuple(
        MemberTable(
            rank,
            table,
            items_id(encode_items(table)),
            np.arange(rank * ITEMS, (rank + 1) * ITEMS),
            64 * ITEMS,
        )
        for rank, table in enumerate(items)
    )
    chunks = ChunkTable(
        np.random.default_rng(epoch).integers(0, 256, (n, 32), dtype=np.uint8),
        np.full(n, 64, np.int64),
        np.zeros(n, np.int32),
        4096 + 64 * np.arange(n, dtype=np.int64),
    )
    header = EpochHeader(
        store_id=store.store_id, job="job", lineage=1, epoch=epoch, attempt=1, incarnation=1,
        world_size=MEMBERS, fingerprint=b"", content_id=b"", write_id="w", created_at=0.0,
        bytes_logical=64 * n, bytes_unique=64 * n, bytes_stored=64 * n + 8192,
    )  # fmt: skip
    segment = SegmentRef(segment_name(key, "n0", 0), 64 * n + 8192, own=True)
    store.backend.prepare(key, encode_manifest(Manifest(header, (segment,), chunks, members)))
    assert store.backend.commit_prepared(key)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JobStore]:
    """A store with two epochs, open for its controller."""
    made = JobStore(str(tmp_path / "store"), "job", "n0", WRITER)
    made.open(())
    made.create_lineage(Lineage(1, 0, -1, 0.0))
    items = tables()
    commit(made, 1, items)
    commit(made, 2, items)
    yield made
    made.close()


def test_what_is_known_of_an_epoch_is_small_and_so_is_learning_it(store: JobStore) -> None:
    n = MEMBERS * ITEMS
    follower = JobStore(store.path, "job", "n1", WRITER)
    follower.follow(create=False)
    follower.close()  # all modules are loaded
    tracemalloc.start()
    try:
        follower.follow(create=False)
        for epoch in (1, 2):
            follower.learn(DecisionKey(1, epoch, 1))
        kept, peak = (size / n for size in tracemalloc.get_traced_memory())
    finally:
        tracemalloc.stop()
    print(f"{kept:.0f} bytes a chunk are kept, {peak:.0f} at the peak")
    index = follower.known.index
    assert len(index.prefix) == 2 * n
    assert index.nbytes / n <= kept <= KEPT_BYTES
    assert peak <= PEAK_BYTES
    follower.close()


def test_the_leases_of_all_ranks_are_known_from_the_columns(store: JobStore) -> None:
    follower = JobStore(store.path, "job", "n1", WRITER)
    follower.follow(create=False)
    expected = {rank: lay_out(table).total_bytes for rank, table in enumerate(tables())}
    assert follower.lease_bytes == expected
    follower.close()


def test_a_controller_through_which_nobody_saves_knows_no_chunks(store: JobStore) -> None:
    rules = store.for_controller()
    assert rules.open(()).committed
    assert rules.known.index.nbytes == 0
    rules.close()
