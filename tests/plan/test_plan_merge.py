"""Equal digests are one chunk over all nodes, and the nodes that have it are its holders."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_help import digest, member, raw

from groupio.errors import IntegrityError, InvalidInput, Retry
from groupio.model import ChunkTable, NodeReport
from groupio.plan.merge import find_holders, find_rows, merge


def bare(node: str, digests: list[bytes], lengths: list[int] | None = None) -> NodeReport:
    """A report of chunks that no member refers to."""
    n = len(digests)
    table = ChunkTable(
        np.frombuffer(b"".join(digests), np.uint8).reshape(n, 32),
        np.array(lengths if lengths is not None else [d[31] + 1 for d in digests], np.int64),
        np.full(n, -1, np.int32),
        np.zeros(n, np.int64),
    )
    return NodeReport(node, (), table, ())


# Few values that often share their first eight bytes, so that ties in the sort column are common.
DIGESTS = st.builds(
    lambda head, middle, tail: bytes([head]) * 8 + bytes([middle]) * 16 + bytes([tail]) * 8,
    st.integers(0, 2),
    st.integers(0, 2),
    st.integers(0, 2),
)


@given(held=st.lists(st.lists(DIGESTS, max_size=12), max_size=5))
@settings(deadline=None)
def test_merge_is_a_dictionary_of_digests(held: list[list[bytes]]) -> None:
    merged = merge([bare(f"n{r}", digests) for r, digests in enumerate(held)])
    expected = list(dict.fromkeys(d for digests in held for d in digests))
    assert [row.tobytes() for row in merged.digests] == expected
    assert merged.lengths.tolist() == [d[31] + 1 for d in expected]
    for digests, rows in zip(held, merged.rows, strict=True):
        assert rows.tolist() == [expected.index(d) for d in digests]
    for i, d in enumerate(expected):
        holders = merged.holder_sets[merged.holder_set[i]]
        assert holders == tuple(r for r, digests in enumerate(held) if d in digests)
    assert len(set(merged.holder_sets)) == len(merged.holder_sets)


def test_many_nodes_and_their_sets() -> None:
    """Sets that differ only far apart are told apart."""
    nodes = 150
    held = [[digest("all")] for _ in range(nodes)]
    for r in (0, 70, 149):
        held[r].append(digest("some"))
    held[149].append(digest("last"))
    merged = merge([bare(f"n{r}", digests) for r, digests in enumerate(held)])
    sets = [merged.holder_sets[s] for s in merged.holder_set]
    assert sets == [tuple(range(nodes)), (0, 70, 149), (149,)]


def test_one_report_without_duplicates_keeps_its_arrays() -> None:
    only = bare("n", [digest(i) for i in range(100)])
    merged = merge([only])
    assert merged.digests is only.chunks.digests
    assert merged.lengths is only.chunks.lengths
    assert merged.rows[0].tolist() == list(range(100))
    assert merged.holder_sets == ((0,),)


def test_reports_that_cannot_be_are_refused() -> None:
    with pytest.raises(InvalidInput, match="same node"):
        merge([bare("n", []), bare("n", [])])
    short, long = bare("a", [digest(1)], [5]), bare("b", [digest(1)], [6])
    with pytest.raises(IntegrityError, match="6 and with 5") as caught:
        merge([short, long])
    assert caught.value.chunk == digest(1).hex()
    assert caught.value.retry is Retry.WHOLE
    for refs in ([0, 1], [-1, 0]):
        one = bare("a", [digest(1)])
        wrong = NodeReport("a", (), one.chunks, (member(7, [raw("x", 4)], refs),))
        with pytest.raises(InvalidInput, match="member 7"):
            merge([wrong])


@given(held=st.lists(DIGESTS, max_size=12), asked=st.lists(DIGESTS, max_size=12))
@settings(deadline=None)
def test_chunks_are_found_by_digest(held: list[bytes], asked: list[bytes]) -> None:
    merged = merge([bare("n", held)])
    known = [row.tobytes() for row in merged.digests]
    table = np.frombuffer(b"".join(asked), np.uint8).reshape(-1, 32)
    assert find_rows(merged, table).tolist() == [
        known.index(d) if d in known else -1 for d in asked
    ]


@given(held=st.lists(st.sets(st.integers(0, 9)), max_size=4), scale=st.sampled_from([1, 40]))
@settings(deadline=None)
def test_holders_are_the_different_sets(held: list[set[int]], scale: int) -> None:
    # Far apart, so that sets differ in more than one word of bits.
    rows = [np.array([], np.int64) for _ in range(scale * len(held))]
    for holder, mine in enumerate(held):
        rows[holder * scale] = np.array(sorted(mine), np.int64)
    number, sets = find_holders(rows, 10)
    expected = [tuple(h * scale for h, mine in enumerate(held) if c in mine) for c in range(10)]
    assert [sets[i] for i in number] == expected
    assert list(sets) == list(dict.fromkeys(expected))


def test_holders_of_chunks_that_one_node_has_take_little_memory() -> None:
    nodes, each = 1024, 64
    rows = [np.arange(node * each, (node + 1) * each) for node in range(nodes)]
    rows[1] = np.concatenate((rows[1], rows[0][:1]))
    tracemalloc.start()
    try:
        number, sets = find_holders(rows, nodes * each)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sets[0] == (0, 1)
    assert sets[1:] == tuple((node,) for node in range(nodes))
    assert number.tolist() == [0, *np.repeat(np.arange(1, nodes + 1), each)[1:]]
    assert most < 80 * nodes * each
