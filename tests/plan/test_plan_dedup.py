"""Diverging replicas, content id, fingerprint and the manifest of an epoch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_help import digest, member, raw, report, tensor

from groupio.errors import IntegrityError, InvalidInput, Retry
from groupio.model import (
    CHUNK_BYTES,
    DecisionKey,
    ItemKind,
    ItemSpec,
    Manifest,
    NodeLink,
    NodeReport,
    SegmentRef,
)
from groupio.plan.dedup import (
    Divergence,
    build_manifest,
    content_id,
    divergence,
    fingerprint,
    merge,
)

W = tensor("w", (4,), replicated=True)
OWN = tensor("own", (4,))


def build(reports: list[NodeReport], world: int, **changes: Any) -> Manifest:
    facts: dict[str, Any] = {
        "store_id": "5" * 32,
        "job": "job",
        "key": DecisionKey(2, 100, 3),
        "incarnation": 4,
        "world_size": world,
        "fingerprint": b"f" * 32,
        "write_id": "w",
        "created_at": 12.5,
    }
    return build_manifest(reports, **{**facts, **changes})


# Layout order of [W, OWN] is w, own: the replicas' pack comes first.
def test_equal_replicas_do_not_diverge() -> None:
    reports = [
        report("n0", {0: ([W, OWN], "ab"), 1: ([W, OWN], "ac")}),
        report("n1", {2: ([W, OWN], "ad")}),
    ]
    assert divergence(reports) == []
    assert divergence(reports, merge(reports)) == []


def test_the_odd_one_is_named() -> None:
    reports = [
        report("n0", {0: ([W, OWN], "ab"), 1: ([W, OWN], "xc")}),
        report("n1", {2: ([W, OWN], "ad")}),
    ]
    assert divergence(reports) == [Divergence("w", (1,), ((0, 2), (1,)))]


def test_without_a_majority_all_are_named() -> None:
    pair = [report("n0", {0: ([W], "a"), 1: ([W], "b")})]
    assert divergence(pair) == [Divergence("w", (0, 1), ((0,), (1,)))]
    halves = [report("n0", {0: ([W], "a"), 1: ([W], "b"), 2: ([W], "b"), 3: ([W], "a")})]
    assert divergence(halves) == [Divergence("w", (0, 1, 2, 3), ((0, 3), (1, 2)))]


def test_members_with_other_private_items_are_compared() -> None:
    """Different item tables, the same replicas: the usual case under sharding."""
    tables = {r: [W, *(tensor(f"p{r}-{i}", (4,)) for i in range(r))] for r in range(3)}
    even = {r: (tables[r], ["a", *(f"p{r}{i}" for i in range(r))]) for r in tables}
    assert divergence([report("n0", even)]) == []
    odd = {**even, 2: (tables[2], ["b", "p20", "p21"])}
    assert divergence([report("n0", odd)]) == [Divergence("w", (2,), ((0, 1), (2,)))]


@pytest.mark.parametrize(
    "other",
    [
        tensor("w", (5,), replicated=True),
        tensor("w", (4,), dtype="int32", replicated=True),
        raw("w", 16, replicated=True),
    ],
)
def test_other_shape_dtype_or_kind_diverges(other: ItemSpec) -> None:
    reports = [report("n0", {0: ([W], "a"), 1: ([W], "a"), 2: ([other], "o")})]
    assert divergence(reports) == [Divergence("w", (2,), ((0, 1), (2,)))]


def test_values_of_other_sizes_diverge() -> None:
    items = [raw("lr", n, ItemKind.PLAIN, replicated=True) for n in (3, 4)]
    reports = [report("n0", {r: ([item], [f"v{r}"]) for r, item in enumerate(items)})]
    assert divergence(reports) == [Divergence("lr", (0, 1), ((0,), (1,)))]


def test_shards_are_compared_with_their_own_replicas() -> None:
    """Two halves on four ranks (hybrid sharding): each half is equal on its two ranks."""
    halves = [tensor("w", (2,), of=(4,), at=(lo,), replicated=True) for lo in (0, 2)]
    saved = {r: ([halves[r % 2]], [f"half{r % 2}"]) for r in range(4)}
    assert divergence([report("n0", saved)]) == []
    saved[3] = ([halves[1]], ["wrong"])
    assert divergence([report("n0", saved)]) == [Divergence("w", (1, 3), ((1,), (3,)))]


def test_undeclared_items_may_differ_and_a_single_holder_is_fine() -> None:
    reports = [report("n0", {0: ([OWN, W], ["w", "a"]), 1: ([OWN], ["b"])})]
    assert divergence(reports) == []


def test_a_tied_replica_is_compared_by_the_owners_chunks() -> None:
    tied = [OWN, tensor("tied", (4,), replicated=True, alias=0)]
    reports = [report("n0", {0: (tied, "a"), 1: (tied, "b")})]
    assert divergence(reports) == [Divergence("tied", (0, 1), ((0,), (1,)))]


def test_one_differing_chunk_of_many_is_enough() -> None:
    big = [tensor("w", (3, CHUNK_BYTES), item_bytes=1, replicated=True), W]
    reports = [report("n0", {0: (big, "abcw"), 1: (big, "abcw"), 2: (big, "axcw")})]
    assert divergence(reports) == [Divergence("w", (2,), ((0, 1), (2,)))]


def test_chunks_that_do_not_fit_the_table_are_refused() -> None:
    one = report("n0", {0: ([W], "a")})
    wrong = replace(one, members=(member(0, [W], [0, 0]),))
    with pytest.raises(InvalidInput, match="member 0 reports 2 chunks"):
        divergence([wrong])


@given(
    contents=st.lists(st.lists(st.sampled_from("abc"), min_size=2, max_size=2), min_size=1),
    nodes=st.integers(1, 3),
    split_tables=st.booleans(),
)
@settings(deadline=None)
def test_divergence_is_what_a_comparison_finds(
    contents: list[list[str]], nodes: int, split_tables: bool
) -> None:
    names = [tensor(n, (4,), replicated=True) for n in ("u", "v")]
    saved: list[dict[int, tuple[list[ItemSpec], list[str]]]] = [{} for _ in range(nodes)]
    for rank, values in enumerate(contents):
        extra = rank % 2 if split_tables else 0
        items = [*names, *(tensor("own", (4,)) for _ in range(extra))]
        saved[rank % nodes][rank] = (items, [*values, *("z" * extra)])
    found = divergence([report(f"n{i}", s) for i, s in enumerate(saved)])
    expected = {n for i, n in enumerate("uv") if len({values[i] for values in contents}) > 1}
    assert {one.item for one in found} == expected
    for one in found:
        column = [values["uv".index(one.item)] for values in contents]
        assert sorted(r for group in one.groups for r in group) == list(range(len(contents)))
        for group in one.groups:
            assert len({column[r] for r in group}) == 1
        top = max(one.groups, key=len)
        if 2 * len(top) > len(contents):
            assert set(one.ranks) == set(range(len(contents))) - set(top)
        else:
            assert set(one.ranks) == set(range(len(contents)))


def test_content_id_depends_on_content_alone() -> None:
    apart = [report("n0", {0: ([W, OWN], "ab")}), report("n1", {1: ([W, OWN], "ac")})]
    together = [report("n9", {1: ([W, OWN], "ac"), 0: ([W, OWN], "ab")}, stored=False)]
    known = content_id(apart, 2)
    assert known == content_id(together, 2)
    assert known != content_id([report("n0", {0: ([W, OWN], "ab"), 1: ([W, OWN], "ad")})], 2)
    assert known != content_id([report("n0", {1: ([W, OWN], "ab"), 0: ([W, OWN], "ac")})], 2)
    renamed = [W, tensor("other", (4,))]
    assert known != content_id([report("n0", {0: (renamed, "ab"), 1: ([W, OWN], "ac")})], 2)


@pytest.mark.parametrize("ranks", [[0], [0, 2], [1, 2], [0, 1, 2], [-1, 0]])
def test_a_group_has_each_rank_once(ranks: list[int]) -> None:
    reports = [report("n0", {r: ([W], "a") for r in ranks})]
    with pytest.raises(InvalidInput, match="group of 2"):
        content_id(reports, 2)
    with pytest.raises(InvalidInput, match="group of 2"):
        build(reports, 2)


def test_a_rank_on_two_nodes_is_refused() -> None:
    reports = [report("n0", {0: ([W], "a"), 1: ([W], "a")}), report("n1", {1: ([W], "a")})]
    with pytest.raises(InvalidInput, match=r"repeated or unknown are \[1\]"):
        build(reports, 2)


def test_fingerprint_depends_on_all_it_names() -> None:
    ids = {0: digest("a"), 1: digest("b")}
    where = {"n0": [0], "n1": [1]}
    links = [NodeLink("n0", 1e9, 5e9, "a"), NodeLink("n1", 2e9, 5e9, "b")]
    known = fingerprint(ids, where, links=links)
    assert known == fingerprint(dict(reversed(ids.items())), where, ["n1", "n0"], links)
    assert known == fingerprint(ids, dict(reversed(where.items())), links=links)
    others = [
        fingerprint({0: digest("a"), 1: digest("c")}, where, links=links),
        fingerprint({0: digest("b"), 1: digest("a")}, where, links=links),
        fingerprint({0: digest("a")}, where, links=links),
        fingerprint(ids, {"n0": [0, 1], "n1": []}, links=links),
        fingerprint(ids, {"n0": [0], "n2": [1]}, links=links),
        fingerprint(ids, where, ["n0"], links),
        fingerprint(ids, where, [], links),
        fingerprint(ids, where, links=links[::-1]),
        *(
            fingerprint(ids, where, links=[links[0], msgspec.structs.replace(links[1], **change)])
            for change in (
                {"uplink_bytes_per_s": 1e9},
                {"fabric_bytes_per_s": 1e9},
                {"domain": "a"},
                {"fabric_ok": False},
            )
        ),
        fingerprint(ids, where),
    ]
    assert len({known, *others}) == len(others) + 1


def test_manifest_of_one_node() -> None:
    one = report("n0", {1: ([W, OWN], "ac"), 0: ([W, OWN], "ab")})
    made = build([one], 2, metadata={"note": "x"}, replicated=["w*"])
    assert made.header.lineage == 2
    assert (made.header.epoch, made.header.attempt, made.header.incarnation) == (100, 3, 4)
    assert made.header.bytes_logical == 64
    assert made.header.bytes_unique == 48
    assert made.header.bytes_stored == one.segments[0].bytes
    assert made.header.content_id == content_id([one], 2)
    assert made.header.metadata == {"note": "x"}
    assert made.header.replicated == ("w*",)
    assert [m.rank for m in made.members] == [0, 1]
    assert made.chunks.digests is one.chunks.digests
    for m in made.members:
        stored = next(other for other in one.members if other.rank == m.rank)
        assert m.refs.tolist() == stored.refs.tolist()
    assert build([one], 2, merged=merge([one])).chunks.offsets.tolist() == [4096, 4112, 4128]


@given(
    contents=st.lists(
        st.lists(st.sampled_from("abcdef"), min_size=3, max_size=3), min_size=1, max_size=6
    ),
    nodes=st.integers(1, 3),
    old=st.sets(st.sampled_from("abcdef")),
)
@settings(deadline=None)
def test_every_member_finds_its_chunks(
    contents: list[list[str]], nodes: int, old: set[str]
) -> None:
    items = [raw(f"i{i}", 100 + i) for i in range(3)]
    # The digest stands for content of one length.
    named = [[f"{value}{i}" for i, value in enumerate(values)] for values in contents]
    older = {
        f"{value}{i}": (SegmentRef("old.seg", 9000, False, 7), 5000 + 10 * i)
        for value in old
        for i in range(3)
    }
    saved: list[dict[int, tuple[list[ItemSpec], list[str]]]] = [{} for _ in range(nodes)]
    for rank, values in enumerate(named):
        saved[rank % nodes][rank] = (items, values)
    reports = [report(f"n{i}", s, older=older) for i, s in enumerate(saved)]
    made = build(reports, len(contents))
    unique = {value for values in named for value in values}
    assert len(made.chunks) == len(unique)
    for m, values in zip(made.members, named, strict=True):
        assert [made.chunks.digests[ref].tobytes() for ref in m.refs] == [*map(digest, values)]
        assert made.chunks.lengths[m.refs].tolist() == [100, 101, 102]
        for ref, value in zip(m.refs.tolist(), values, strict=True):
            segment = made.segments[made.chunks.segments[ref]]
            assert segment.own == (value not in older)
            assert segment.age == (0 if segment.own else 8)
            if value in older:
                assert made.chunks.offsets[ref] == older[value][1]
    assert {s.name for s in made.segments if s.own} == {f"n{i}.seg" for i in range(nodes)}
    assert len({s.name for s in made.segments}) == len(made.segments)
    assert made.header.bytes_stored == sum(r.segments[0].bytes for r in reports)
    assert made.header.bytes_unique == int(made.chunks.lengths.sum())
    assert made.header.bytes_logical == 303 * len(contents)


def test_a_chunk_that_two_nodes_stored_is_taken_from_the_first() -> None:
    reports = [report("n0", {0: ([W], "a")}), report("n1", {1: ([W, OWN], "ab")})]
    made = build(reports, 2)
    assert [made.segments[s].name for s in made.chunks.segments] == ["n0.seg", "n1.seg"]
    unstored = [report("n0", {0: ([W], "a")}, stored=False), reports[1]]
    assert [s.name for s in build(unstored, 2).segments] == ["n1.seg"]


def test_unused_older_segments_are_left_out_and_the_higher_age_counts() -> None:
    old = [SegmentRef("old.seg", 9000, False, age) for age in (3, 5, 4)]
    reports = [
        report(f"n{i}", {i: ([W], "a")}, older={"a": (segment, 4096)})
        for i, segment in enumerate(old)
    ]
    unused = SegmentRef("unused.seg", 10, False, 1)
    reports[0] = replace(reports[0], segments=(unused, *reports[0].segments))
    reports[0] = replace(
        reports[0], chunks=replace(reports[0].chunks, segments=np.array([2], np.int32))
    )
    made = build(reports, 3)
    assert [s.name for s in made.segments] == ["n0.seg", "old.seg", "n1.seg", "n2.seg"]
    assert made.segments[1].age == 6
    assert made.chunks.segments.tolist() == [1]


def test_reports_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(IntegrityError, match="in no segment") as homeless:
        build([report("n0", {0: ([W], "a")}, stored=False)], 1)
    assert homeless.value.chunk == digest("a").hex()
    assert homeless.value.retry is Retry.WHOLE
    reports = [
        report(f"n{i}", {i: ([W], "a")}, older={"a": (SegmentRef("old.seg", size, False), 4096)})
        for i, size in enumerate((9000, 9001))
    ]
    with pytest.raises(IntegrityError, match=r"old\.seg") as torn:
        build(reports, 2)
    assert torn.value.path == "old.seg"


def test_an_epoch_of_empty_items() -> None:
    made = build([report("n0", {0: ([raw("nothing", 0)], "")})], 1)
    assert len(made.chunks) == 0
    assert made.header.bytes_logical == made.header.bytes_unique == 0
