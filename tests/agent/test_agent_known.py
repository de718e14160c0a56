"""The index of known chunks, against a dictionary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupio.agent.known import KnownChunks
from groupio.errors import InvalidInput
from groupio.model import ChunkTable, EpochHeader, Manifest, SegmentRef

OWN = SegmentRef("own.seg", 1 << 20, own=True)


def epoch(
    number: int,
    digests: Sequence[bytes],
    *,
    segments: tuple[SegmentRef, ...] = (OWN,),
    store_id: str = "s" * 32,
    **columns: Any,
) -> Manifest:
    """A committed epoch that has these chunks, of length 10 unless said otherwise."""
    n = len(digests)
    header = EpochHeader(
        store_id=store_id, job="j", lineage=1, epoch=number, attempt=1, incarnation=1,
        world_size=1, fingerprint=b"", content_id=b"", write_id="", created_at=0.0,
        bytes_logical=0, bytes_unique=0, bytes_stored=0,
    )  # fmt: skip
    chunks = ChunkTable(
        np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 32),
        np.array(columns.get("lengths", [10] * n), np.int64),
        np.array(columns.get("in_segments", [0] * n), np.int32),
        np.array(columns.get("offsets", range(4096, 4096 + 16 * n, 16)), np.int64),
    )
    return Manifest(header, segments, chunks, ())


def digest(number: int) -> bytes:
    return number.to_bytes(32, "little")


@given(
    # Few distinct first and last bytes: prefixes collide, and whole digests nearly do.
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), unique=True, max_size=16),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=16),
    st.data(),
)
def test_find_is_exact(
    stored: list[tuple[int, int]], asked: list[tuple[int, int]], data: st.DataObject
) -> None:
    def full(pair: tuple[int, int]) -> bytes:
        return bytes([pair[0]]) * 8 + bytes(23) + bytes([pair[1]])

    model = {full(pair): 4096 + 16 * i for i, pair in enumerate(stored)}
    known = KnownChunks()
    known.add_epoch(epoch(1, list(model)))
    dead = data.draw(st.sampled_from(list(model)) if model else st.none())
    if dead is not None:
        known.discard(dead)
        del model[dead]
    index = known.index
    queries = [full(pair) for pair in asked]
    raw = np.frombuffer(b"".join(queries), np.uint8).reshape(-1, 32)
    rows = index.find(raw, np.full(len(queries), 10, np.int64))
    found = [int(index.offsets[row]) if row >= 0 else None for row in rows.tolist()]
    assert found == [model.get(query) for query in queries]
    assert (index.find(raw, np.full(len(queries), 11, np.int64)) == -1).all()


def test_a_hit_names_segment_and_offset_as_not_own() -> None:
    known = KnownChunks()
    older = SegmentRef("older.seg", 9, own=False, age=5)
    known.add_epoch(epoch(1, [digest(1), digest(2)], segments=(OWN, older), in_segments=[1, 0]))
    assert known.lookup(digest(1), 10) == (older, 4096)
    assert known.lookup(digest(2), 10) == (SegmentRef("own.seg", 1 << 20, own=False), 4112)
    assert known.lookup(digest(1), 9) is None
    assert known.lookup(digest(3), 10) is None


def test_only_the_epochs_added_last_are_known_and_the_newest_wins() -> None:
    known = KnownChunks(epochs_kept=2)
    known.add_epoch(epoch(1, [digest(1)]))
    known.add_epoch(epoch(2, [digest(2), digest(9)], segments=(SegmentRef("b", 1, own=True),)))
    known.add_epoch(epoch(3, [digest(9)], segments=(SegmentRef("c", 1, own=True),)))
    assert known.lookup(digest(1), 10) is None
    assert known.lookup(digest(2), 10) is not None
    hit = known.lookup(digest(9), 10)
    assert hit is not None
    assert hit[0].name == "c"


def test_segments_that_were_referred_to_for_long_are_not_referred_to_again() -> None:
    known = KnownChunks(rewrite_after_epochs=64)
    young, old = SegmentRef("young", 1, own=False, age=63), SegmentRef("old", 1, own=False, age=64)
    known.add_epoch(epoch(1, [digest(1), digest(2)], segments=(young, old), in_segments=[0, 1]))
    assert known.lookup(digest(1), 10) is not None
    assert known.lookup(digest(2), 10) is None


def test_a_damaged_chunk_stays_unknown_until_it_was_written_anew() -> None:
    known = KnownChunks()
    known.add_epoch(epoch(1, [digest(1), digest(2)]))
    running = known.index
    known.discard(digest(1))
    assert known.lookup(digest(1), 10) is None
    assert not running.alive.all(), "a job that runs already must not refer to it either"
    still_refers = SegmentRef("own.seg", 1 << 20, own=False)
    known.add_epoch(epoch(2, [digest(1), digest(2)], segments=(still_refers,)))
    assert known.lookup(digest(1), 10) is None
    assert known.lookup(digest(2), 10) is not None
    known.add_epoch(epoch(3, [digest(1)], segments=(SegmentRef("new.seg", 9, own=True),)))
    hit = known.lookup(digest(1), 10)
    assert hit is not None
    assert hit[0].name == "new.seg"


def test_another_store_replaces_everything() -> None:
    known = KnownChunks()
    known.add_epoch(epoch(1, [digest(1)]))
    known.add_epoch(epoch(1, [digest(2)], store_id="t" * 32))
    assert known.lookup(digest(1), 10) is None
    assert known.lookup(digest(2), 10) is not None


def test_a_digest_of_another_size_is_refused() -> None:
    with pytest.raises(InvalidInput, match="32 bytes, not 3"):
        KnownChunks().discard(b"abc")


def test_epochs_in_turn_keep_what_the_model_keeps() -> None:
    """Against a dictionary that is built anew from the manifests of the epochs kept."""
    order = np.random.default_rng(5).integers(1, 12, 80).tolist()
    known, kept = KnownChunks(epochs_kept=3), dict[int, dict[bytes, tuple[str, int]]]()
    for number in order:
        rng = np.random.default_rng(number)
        found = [digest(int(i)) for i in rng.permutation(30)[: rng.integers(0, 20)]]
        segments = (
            SegmentRef(f"{number}", 9, own=True),
            SegmentRef("older", 9, own=False, age=3),
            SegmentRef("worn", 9, own=False, age=63 + number % 2),
        )
        homes = rng.integers(0, 3, len(found)).tolist()
        known.add_epoch(epoch(number, found, segments=segments, in_segments=homes))
        kept.pop(number, None)
        kept[number] = {
            name: (segments[home].name, 4096 + 16 * i)
            for i, (name, home) in enumerate(zip(found, homes, strict=True))
            if segments[home].age < 64
        }
        while len(kept) > 3:
            del kept[next(iter(kept))]
        model = {name: place for one in kept.values() for name, place in one.items()}
        index = known.index
        segment_of = [index.refs[number].name for number in index.segments.tolist()]
        places = zip(segment_of, index.offsets.tolist(), strict=True)
        rows = [row.tobytes() for row in index.digests]
        assert dict(zip(rows, places, strict=True)) == model
        assert len({ref.name for ref in index.refs}) == len(index.refs) <= 3 + 2
        assert index.nbytes == 58 * len(model)
