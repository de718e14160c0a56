"""The ranks of a host read each chunk once between them, whatever each of them wants."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from client_store import StoreBuilder, flip
from shared_ranks import NO_MEMORY, Outcome, Role, run

from groupio.client.store_reader import StoreReader
from groupio.model import CHUNK_BYTES, ChunkTable

LARGE = 6
TINY = 400


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreBuilder]:
    """Epoch 1 has LARGE whole chunks and as many halves in two segments, and TINY small ones."""
    builder = StoreBuilder(tmp_path_factory.mktemp("shared") / "store")
    random = np.random.default_rng(8)
    items = {f"large.{i}": random.bytes(CHUNK_BYTES) for i in range(LARGE)}
    items |= {f"half.{i}": random.bytes(CHUNK_BYTES // 2 + i) for i in range(LARGE)}
    items |= {f"tiny.{i:04d}": random.bytes(64 + i % 7) for i in range(TINY)}
    builder.commit(1, [items], segments=2)
    yield builder
    builder.close()


@pytest.fixture(scope="module")
def table(store: StoreBuilder) -> ChunkTable:
    with StoreReader.open(store.path) as reader:
        return reader.resolve().chunks


def rows_of(table: ChunkTable, at_least: int = 0, below: int = CHUNK_BYTES + 1) -> list[int]:
    chosen = (table.lengths >= at_least) & (table.lengths < below)
    return np.flatnonzero(chosen).tolist()


def check(outcomes: list[Outcome | None], roles: list[Role], table: ChunkTable) -> list[Outcome]:
    """All got all, each chunk left the store once, and nothing is left behind."""
    wanted = sorted({row for role in roles for row in role.rows})
    got = []
    for outcome, role in zip(outcomes, roles, strict=True):
        assert outcome is not None
        assert outcome.error is None, outcome.error
        assert outcome.content
        assert not any(outcome.damaged)
        assert tidy(outcome)
        mine = table.lengths[sorted(set(role.rows))].sum()
        assert outcome.bytes_forwarded <= mine
        got.append(outcome)
    assert sum(outcome.bytes_read for outcome in got) == table.lengths[wanted].sum()
    return got


def tidy(outcome: Outcome) -> bool:
    return (outcome.fds_left, outcome.threads_left, outcome.maps_left) == ([], 0, 0)


@pytest.mark.parametrize("parts", [False, True])
def test_equal_wants_are_read_once_and_evenly(
    store: StoreBuilder, table: ChunkTable, parts: bool
) -> None:
    roles = [Role(rows_of(table), parts=parts and place % 2 == 1) for place in range(4)]
    got = check(run(store.path, roles), roles, table)
    total = sum(outcome.bytes_read for outcome in got)
    for outcome in got:
        assert outcome.bytes_read + outcome.bytes_forwarded == total
        assert abs(outcome.bytes_read - total / 4) <= CHUNK_BYTES
        assert outcome.notes == []


def test_a_small_window_is_used_again_and_again(store: StoreBuilder, table: ChunkTable) -> None:
    roles = [Role(rows_of(table)) for _ in range(3)]
    check(run(store.path, roles, window_bytes=1), roles, table)


def test_disjoint_wants_go_straight_to_their_place(store: StoreBuilder, table: ChunkTable) -> None:
    every = rows_of(table)
    roles = [Role(every[place::3]) for place in range(3)]
    got = check(run(store.path, roles), roles, table)
    assert [outcome.bytes_forwarded for outcome in got] == [0, 0, 0]


def test_partly_common_wants(store: StoreBuilder, table: ChunkTable) -> None:
    every = rows_of(table)
    roles = [
        Role(every[: len(every) // 2]),
        Role(every[len(every) // 3 :], parts=True),
        Role([*every[::5], *every[::5]]),
        Role([]),
    ]
    got = check(run(store.path, roles, window_bytes=1, ranks=[4, 5, 6, 7]), roles, table)
    assert got[3].bytes_read == 0
    assert got[3].reads == 0


def test_tiny_chunks_travel_together(store: StoreBuilder, table: ChunkTable) -> None:
    roles = [Role(rows_of(table, below=100)) for _ in range(4)]
    got = check(run(store.path, roles), roles, table)
    assert max(outcome.reads for outcome in got) <= 4  # a run for each segment


@pytest.mark.parametrize("late", [0, 2])
def test_a_late_rank_is_waited_for(store: StoreBuilder, table: ChunkTable, late: int) -> None:
    roles = [Role(rows_of(table)[:40]) for _ in range(3)]
    roles[late].point, roles[late].act, roles[late].seconds = "fill", "late", 0.7
    check(run(store.path, roles), roles, table)


def test_a_slow_rank_delays_and_changes_nothing(store: StoreBuilder, table: ChunkTable) -> None:
    roles = [Role(rows_of(table, 1000)) for _ in range(3)]
    roles[1].point, roles[1].act, roles[1].seconds = "copy", "late", 0.02
    check(run(store.path, roles, window_bytes=1), roles, table)


def test_one_load_fills_several_times(store: StoreBuilder, table: ChunkTable) -> None:
    rows = rows_of(table)
    roles = [Role(rows, fills=3), Role(rows[:20], fills=3), Role([], fills=3)]
    outcomes = run(store.path, roles)
    for outcome, role in zip(outcomes, roles, strict=True):
        assert outcome is not None
        assert outcome.error is None
        assert outcome.content
        assert tidy(outcome)
        assert len(outcome.damaged) == 3
        both = outcome.bytes_read + outcome.bytes_forwarded
        assert both == 3 * table.lengths[list(role.rows)].sum()


def test_a_rank_that_met_damage_before_lets_the_others_read(
    store: StoreBuilder, table: ChunkTable
) -> None:
    for place, forwards in ((2, True), (0, False)):
        roles = [Role(rows_of(table)) for _ in range(3)]
        roles[place].point, roles[place].act = "fill", "damage"
        outcomes = run(store.path, roles)
        for number, outcome in enumerate(outcomes):
            assert outcome is not None
            assert tidy(outcome)
            if number == place:
                assert "record is damaged" in str(outcome.error)
                continue
            assert outcome.error is None
            assert outcome.content
            assert (outcome.bytes_forwarded > 0) == forwards
            assert (outcome.notes == []) == forwards


def test_without_memory_for_a_window_each_reads_alone_and_says_so(
    store: StoreBuilder, table: ChunkTable
) -> None:
    roles = [Role(rows_of(table)) for _ in range(3)]
    for outcome in run(store.path, roles, window_bytes=NO_MEMORY):
        assert outcome is not None
        assert outcome.error is None
        assert outcome.content
        assert tidy(outcome)
        assert outcome.bytes_read == table.lengths.sum()
        assert "no shared memory" in outcome.notes[0]


def test_one_rank_reads_by_itself(store: StoreBuilder, table: ChunkTable) -> None:
    roles = [Role(rows_of(table))]
    got = check(run(store.path, roles), roles, table)
    assert got[0].bytes_forwarded == 0


@pytest.mark.parametrize("fault", ["flipped", "missing"])
def test_damage_is_known_to_all_that_wanted_the_chunk(tmp_path: Path, fault: str) -> None:
    builder = StoreBuilder(tmp_path / "store")
    random = np.random.default_rng(8)
    items = {f"large.{i}": random.bytes(CHUNK_BYTES) for i in range(6)}
    items |= {f"tiny.{i:04d}": random.bytes(64) for i in range(50)}
    key = builder.commit(1, [items], segments=2)
    with StoreReader.open(builder.path) as reader:
        table = reader.resolve().chunks
    path = builder.segment_path(key)
    if fault == "missing":
        path.unlink()
        bad = set(np.flatnonzero(table.segments == 0).tolist())
    else:
        large, tiny = (
            int(np.flatnonzero((table.segments == 0) & (table.lengths == size))[1])
            for size in (CHUNK_BYTES, 64)
        )
        flip(path, int(table.offsets[large]) + 77)
        flip(path, int(table.offsets[tiny]) + 7)
        bad = {large, tiny}
    every = list(range(len(table)))
    whole = [row for row in every if row not in bad]
    roles = [Role(every), Role(every, parts=True), Role(whole), Role(every[::-1][:3])]
    outcomes = run(builder.path, roles)
    builder.close()
    for outcome, role in zip(outcomes, roles, strict=True):
        assert outcome is not None
        assert outcome.error is None, outcome.error
        assert outcome.content
        assert tidy(outcome)
        expected = sorted(
            (row for row in role.rows if row in bad),
            key=lambda row: (table.segments[row], table.offsets[row]),
        )
        assert outcome.damaged == [[table.digests[row].tobytes() for row in expected]]
