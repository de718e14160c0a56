"""Many small chunks that several members have alike are hashed one by one only once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agent_tools import Saved, Store, blob, saved, tensor
from blake3 import blake3

from groupio.agent import hashing, pipeline
from groupio.agent.hashing import MANY_CHUNKS, are_many, digest_of_all
from groupio.agent.workers import WorkerPool

TINY = [tensor(f"t{n}", n % 30 + 1) for n in range(1000)]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    pool = WorkerPool()
    yield Store(tmp_path / "store", pool)
    assert pool.close(10.0)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many chunks were hashed one by one, a number for each call."""
    calls: list[int] = []
    original = hashing.digest_chunks

    def counted(view: memoryview, starts: Any, lengths: Any) -> list[bytes]:
        calls.append(len(lengths))
        return original(view, starts, lengths)

    monkeypatch.setattr(pipeline, "digest_chunks", counted)
    return calls


def alike(member: Saved, other: Saved, item: int = -1) -> Saved:
    """``other``, with the chunks of ``member`` but for one byte of ``item``; padding stays."""
    view = other.view()
    for number in range(len(member.layout.chunk_start)):
        start = int(member.layout.chunk_start[number])
        view[start : start + int(member.layout.chunk_length[number])] = member.chunk(number)
    if item >= 0:
        view[int(member.layout.item_start[item])] ^= 1
    return Saved(other.items, other.layout, other.arena, bytes(view))


@pytest.mark.parametrize("framed", [False, True])
def test_members_that_are_alike_are_hashed_once(
    store: Store, hashed: list[int], framed: bool
) -> None:
    first = saved(TINY, 1)
    members = [first, *(alike(first, saved(TINY, seed)) for seed in (2, 3))]
    report = store.save(1, members, framed=framed)
    store.check(report, members)
    assert sum(hashed) == len(TINY)
    assert len(report.chunks) == len(TINY)
    assert all((member.refs == report.members[0].refs).all() for member in report.members)


def test_one_byte_makes_the_difference(store: Store, hashed: list[int]) -> None:
    first = saved(TINY, 1)
    members = [first, alike(first, saved(TINY, 2), item=700), alike(first, saved(TINY, 3))]
    report = store.save(1, members)
    store.check(report, members)
    assert sum(hashed) == 2 * len(TINY)
    assert len(report.chunks) == len(TINY) + 1
    refs = [member.refs for member in report.members]
    assert np.flatnonzero(refs[0] != refs[1]).tolist() == [int(first.layout.item_chunk[700])]
    assert (refs[0] == refs[2]).all()


def test_equal_bytes_cut_otherwise_are_other_chunks(store: Store, hashed: list[int]) -> None:
    halves = saved([blob(f"h{n}", 32) for n in range(2 * MANY_CHUNKS)], 1)
    wholes = saved([blob(f"w{n}", 64) for n in range(2 * MANY_CHUNKS)], 1)
    members = [halves, wholes]
    store.check(store.save(1, members), members)
    assert len(hashed) == 2


def test_many_chunks_of_a_job_that_does_not_write(store: Store, hashed: list[int]) -> None:
    first = saved(TINY, 1)
    members = [first, alike(first, saved(TINY, 2))]
    written, only_hashed = store.save(1, members), store.save(2, members, write=False)
    digests = [r.chunks.digests[r.members[1].refs].tolist() for r in (written, only_hashed)]
    assert digests[0] == digests[1]
    assert sum(hashed) == 2 * len(TINY)


def test_the_digest_of_all_depends_on_each_byte_and_each_border() -> None:
    data = memoryview(np.random.default_rng(0).bytes(1000))
    starts, lengths = np.array([0, 10, 30]), np.array([10, 20, 5])
    of_all = digest_of_all(data, starts, lengths)
    spread = memoryview(bytes(data[:10]) + b"padding" + bytes(data[10:35]))
    assert digest_of_all(spread, np.array([0, 17, 37]), lengths) == of_all
    assert digest_of_all(data, starts + 1, lengths) != of_all
    assert digest_of_all(data, np.array([0, 11, 30]), np.array([11, 19, 5])) != of_all
    assert of_all != blake3(data[:35]).digest()
    assert are_many(np.full(MANY_CHUNKS, 64))
    assert not are_many(np.full(MANY_CHUNKS - 1, 64))
    assert not are_many(np.full(MANY_CHUNKS, 1 << 20))
