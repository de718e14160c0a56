"""Every chunk gets one owner that holds it, and no link is left with much more than its share."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plan_help import raw, report

from groupio.errors import InvalidInput
from groupio.plan import write
from groupio.plan.merge import merge
from groupio.plan.write import Link, WriteClasses, WritePlan, assign, plan_write, write_classes

CHUNK = 1 << 22


def classes_of(rows: list[tuple[tuple[int, ...], int, int]]) -> WriteClasses:
    """Classes from (holders, length, count)."""
    counts = np.array([count for _, _, count in rows], np.int64)
    return WriteClasses(
        holders=tuple(holders for holders, _, _ in rows),
        lengths=np.array([length for _, length, _ in rows], np.int64),
        counts=counts,
        chunk_class=np.repeat(np.arange(len(rows)), counts).astype(np.int32),
    )


def check(classes: WriteClasses, links: list[Link], plan: WritePlan) -> None:
    """All chunks exactly once, at holders, and the sums are right."""
    given_out = np.zeros(len(classes.counts), np.int64)
    load = [0] * len(links)
    rows = zip(plan.classes.tolist(), plan.owners.tolist(), plan.counts.tolist(), strict=True)
    for c, owner, count in rows:
        assert count > 0
        assert owner in classes.holders[c]
        given_out[c] += count
        load[owner] += count * int(classes.lengths[c])
    assert given_out.tolist() == classes.counts.tolist()
    assert plan.link_bytes.tolist() == load
    busy = [sent / link.bytes_per_s for sent, link in zip(load, links, strict=True)]
    assert plan.makespan_s == pytest.approx(max(busy, default=0.0))
    assert (np.diff(plan.classes) >= 0).all()
    owners = assign(classes, plan)
    for c, holders in enumerate(classes.holders):
        assert set(owners[classes.chunk_class == c].tolist()) <= set(holders)
    assert np.bincount(owners[owners >= 0], minlength=len(links)).tolist() == [
        int(plan.counts[plan.owners == link].sum()) for link in range(len(links))
    ]


def fluid_bound(classes: WriteClasses, links: list[Link]) -> float:
    """The best possible makespan if chunks could be split: the fullest set of links."""
    best = 0.0
    for size in range(1, len(links) + 1):
        for chosen in combinations(range(len(links)), size):
            work = sum(
                int(count) * int(length)
                for holders, length, count in zip(
                    classes.holders, classes.lengths, classes.counts, strict=True
                )
                if set(holders) <= set(chosen)
            )
            best = max(best, work / sum(links[i].bytes_per_s for i in chosen))
    return best


@st.composite
def problems(draw: st.DrawFn) -> tuple[WriteClasses, list[Link]]:
    speeds = draw(st.lists(st.sampled_from([1e8, 5e8, 1e9, 2.5e9]), min_size=1, max_size=5))
    links = [Link(f"n{i}", speed) for i, speed in enumerate(speeds)]
    some = st.sets(st.integers(0, len(links) - 1), min_size=1).map(lambda s: tuple(sorted(s)))
    rows = draw(st.lists(st.tuples(some, st.integers(1, CHUNK), st.integers(0, 3000)), max_size=8))
    return classes_of(rows), links


@given(problem=problems())
@settings(deadline=None)
def test_plans_are_complete_and_near_the_best(problem: tuple[WriteClasses, list[Link]]) -> None:
    classes, links = problem
    plan = plan_write(classes, links)
    check(classes, links, plan)
    # No choice of owners can beat the fluid bound; whole chunks and the order of pouring may cost
    # one chunk per class and a tenth.
    chunk_s = CHUNK / min(link.bytes_per_s for link in links)
    best = fluid_bound(classes, links)
    assert best <= plan.makespan_s * (1 + 1e-9)
    assert plan.makespan_s <= 1.1 * best + (1 + len(classes.counts)) * chunk_s


@given(problem=problems(), seed=st.integers(0, 100))
@settings(deadline=None)
@example(problem=(classes_of([((0, 1), CHUNK, 7)]), [Link("a", 1e9), Link("b", 1e8)]), seed=0)
def test_with_equal_holders_no_link_is_a_chunk_late(
    problem: tuple[WriteClasses, list[Link]], seed: int
) -> None:
    classes, links = problem
    everyone = tuple(range(len(links)))
    classes = classes_of(
        [
            (everyone, length, count)
            for length, count in zip(classes.lengths.tolist(), classes.counts.tolist(), strict=True)
        ]
    )
    plan = plan_write(classes, links)
    check(classes, links, plan)
    total = int((classes.lengths * classes.counts).sum())
    ideal = total / sum(link.bytes_per_s for link in links)
    longest = int(classes.lengths.max(initial=0)) / min(link.bytes_per_s for link in links)
    assert plan.makespan_s <= ideal * (1 + 1e-9) + longest


def test_those_without_a_choice_go_first() -> None:
    classes = classes_of([((0, 1), CHUNK, 100), ((0,), CHUNK, 60), ((1,), CHUNK, 40)])
    plan = plan_write(classes, [Link("a", 1e9), Link("b", 1e9)])
    assert plan.link_bytes.tolist() == [100 * CHUNK, 100 * CHUNK]


def test_later_rounds_make_room() -> None:
    """The first class splits evenly before it knows that link 1 is needed by the second."""
    classes = classes_of([((0, 1), CHUNK, 120), ((1, 2), CHUNK - 1, 120)])
    links = [Link(n, 1e9) for n in "abc"]
    plan = plan_write(classes, links)
    check(classes, links, plan)
    assert plan.makespan_s <= 1.02 * fluid_bound(classes, links)


def test_slow_convergence_is_cut_off() -> None:
    """Work that has to move down a long chain of links: still a complete plan, after few rounds."""
    chain: list[tuple[tuple[int, ...], int, int]] = [
        ((i, i + 1), CHUNK - i, 100_000 if i == 0 else 10_000) for i in range(9)
    ]
    classes = classes_of(chain)
    links = [Link(f"n{i}", 1e9) for i in range(10)]
    plan = plan_write(classes, links)
    check(classes, links, plan)
    assert plan.makespan_s <= 1.05 * fluid_bound(classes, links)


def test_rounds_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """One round that is not the best yet still gives a complete plan."""
    monkeypatch.setattr(write, "ROUNDS_MAX", 1)
    classes = classes_of([((0, 1), CHUNK, 120), ((1, 2), CHUNK - 1, 120)])
    links = [Link(n, 1e9) for n in "abc"]
    plan = plan_write(classes, links)
    check(classes, links, plan)
    assert plan.makespan_s <= 1.5 * fluid_bound(classes, links)


def test_huge_loads_keep_the_counts_exact() -> None:
    """Chunks that cost next to nothing beside the load: rounding must not lose or invent any."""
    counts = [1 << 40, 1001, 7]
    classes = WriteClasses(
        ((0,), (0, 1), (0, 1, 2)),
        np.array([CHUNK, 1, 3], np.int64),
        np.array(counts, np.int64),
        np.empty(0, np.int32),
    )
    plan = plan_write(classes, [Link("a", 1e3), Link("b", 1e15), Link("c", 7e8)])
    for c, count in enumerate(counts):
        assert int(plan.counts[plan.classes == c].sum()) == count


def test_one_node_writes_everything() -> None:
    items = [raw(f"i{i}", 64 + i % 2) for i in range(4)]
    merged = merge([report("n0", {0: (items, ["a0", "b1", "c0", "d1"])})])
    classes = write_classes(merged)
    assert classes.holders == ((0,), (0,))
    assert classes.lengths.tolist() == [64, 65]
    assert classes.counts.tolist() == [2, 2]
    plan = plan_write(classes, [Link("n0", 1e9)])
    assert assign(classes, plan).tolist() == [0, 0, 0, 0]


def test_replicas_are_split_over_their_nodes_and_known_chunks_stay() -> None:
    items = [raw(f"i{i}", 64) for i in range(4)]
    reports = [
        report("n0", {0: (items, "abcd")}),
        report("n1", {1: (items, "abcd")}),
        report("n2", {2: (items, "xxxx")}),
    ]
    merged = merge(reports)
    wanted = np.array([True, True, True, True, False])
    classes = write_classes(merged, wanted)
    plan = plan_write(classes, [Link(node, 1e9) for node in merged.nodes])
    owners = assign(classes, plan)
    assert sorted(owners.tolist()) == [-1, 0, 0, 1, 1]
    assert owners.tolist() == [0, 0, 1, 1, -1]
    everything = write_classes(merged)
    assert everything.holders == ((0, 1), (2,))
    check(everything, [Link(n, 1e9) for n in "abc"], plan_write(everything, [Link("a", 1e9)] * 3))


def test_nothing_to_write() -> None:
    classes = write_classes(merge([]))
    plan = plan_write(classes, [])
    assert plan.makespan_s == 0.0
    assert assign(classes, plan).tolist() == []


@pytest.mark.parametrize("speed", [0.0, -1.0, float("inf"), float("nan")])
def test_a_link_needs_a_bandwidth(speed: float) -> None:
    with pytest.raises(InvalidInput, match="'slow'"):
        plan_write(classes_of([]), [Link("slow", speed)])


@pytest.mark.parametrize("holders", [(), (1,), (-1,), (0, 0)])
def test_holders_must_be_links(holders: tuple[int, ...]) -> None:
    with pytest.raises(InvalidInput, match="held by"):
        plan_write(classes_of([(holders, 10, 1)]), [Link("a", 1e9)])
