"""Equal digests are one chunk over all nodes; structure ignores what the bytes are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_help import digest, member, raw, report

from groupio.errors import IntegrityError, InvalidInput, Retry
from groupio.model import ChunkTable, NodeReport
from groupio.plan.merge import merge, structure


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


def merged_structure(reports: list[NodeReport]) -> bytes:
    return structure(reports, merge(reports))


ITEMS = [raw(f"i{i}", 64) for i in range(3)]


def test_structure_ignores_bytes_and_arrival_order() -> None:
    first = [
        report("n0", {0: (ITEMS, "abc"), 1: (ITEMS, "abd")}),
        report("n1", {2: (ITEMS, "xbx")}),
    ]
    same = [report("n0", {0: (ITEMS, "qrs"), 1: (ITEMS, "qrt")}), report("n1", {2: (ITEMS, "yry")})]
    assert merged_structure(first) == merged_structure(same)
    base = first[0]
    back = np.arange(len(base.chunks))[::-1]
    turned = NodeReport(
        base.node,
        base.segments,
        ChunkTable(
            base.chunks.digests[back],
            base.chunks.lengths[back],
            base.chunks.segments[back],
            base.chunks.offsets[back],
        ),
        tuple(
            member(m.rank, m.items, (len(base.chunks) - 1 - m.refs).tolist()) for m in base.members
        ),
    )
    assert merged_structure([turned, first[1]]) == merged_structure(first)


def test_structure_sees_every_change() -> None:
    def two(one: str, other: str, rank: int = 1, node: str = "n1") -> list[NodeReport]:
        return [report("n0", {0: (ITEMS, one)}), report(node, {rank: (ITEMS, other)})]

    base = two("abc", "abd")
    changed = {
        "a duplicate less": two("abc", "aed"),
        "a duplicate more": two("abc", "abc"),
        "another duplicate": two("abc", "adc"),
        "a duplicate inside": two("aac", "aad"),
        "another rank": two("abc", "abd", rank=2),
        "another node": two("abc", "abd", node="n2"),
        "not stored": [base[0], report("n1", {1: (ITEMS, "abd")}, stored=False)],
        "other lengths": [
            report("n0", {0: ([*ITEMS[:2], raw("i2", 65)], "abc")}),
            base[1],
        ],
        "fewer nodes": base[:1],
    }
    known = merged_structure(base)
    for what, reports in changed.items():
        assert merged_structure(reports) != known, what


def test_structure_of_nothing() -> None:
    assert len(merged_structure([])) == 32
