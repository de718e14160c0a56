"""Where diverging replicas begin to differ, by the digests of their chunks."""

from __future__ import annotations

from plan_help import raw, report, tensor

from groupio.model import CHUNK_BYTES, ItemKind, NodeReport
from groupio.plan.dedup import divergence, merge
from groupio.plan.difference import Difference, first_differences

W = tensor("w", (3, 1 << 20), replicated=True)  # three chunks
SMALL = tensor("small", (4,), replicated=True)


def located(reports: list[NodeReport]) -> list[Difference | None]:
    merged = merge(reports)
    return first_differences(reports, merged, divergence(reports, merged))


def test_the_first_chunk_that_differs() -> None:
    reports = [
        report("n0", {0: ([W], "abc"), 1: ([W], "abc")}),
        report("n1", {2: ([W], "axy")}),
    ]
    here = CHUNK_BYTES
    assert located(reports) == [Difference(W, (0, 2), here, 2 * here, (here, here))]


def test_all_that_differ_in_that_chunk_are_looked_at() -> None:
    reports = [report("n0", {r: ([W], chunks) for r, chunks in enumerate(["abc", "axc", "ayz"])})]
    assert located(reports) == [
        Difference(W, (0, 1, 2), CHUNK_BYTES, 2 * CHUNK_BYTES, (CHUNK_BYTES,) * 3)
    ]
    later = [report("n0", {r: ([W], chunks) for r, chunks in enumerate(["abc", "abz", "ayc"])})]
    assert located(later) == [
        Difference(W, (0, 2), CHUNK_BYTES, 2 * CHUNK_BYTES, (CHUNK_BYTES,) * 2)
    ]


def test_the_majority_is_what_others_are_compared_with() -> None:
    reports = [report("n0", {r: ([W], chunks) for r, chunks in enumerate(["abz", "abc", "abc"])})]
    assert located(reports) == [
        Difference(W, (1, 0), 2 * CHUNK_BYTES, 3 * CHUNK_BYTES, (2 * CHUNK_BYTES,) * 2)
    ]


def test_items_lie_elsewhere_in_other_tables() -> None:
    """Rank 1 has a large item of its own before it."""
    own = tensor("own", (1 << 19,))
    saved = {0: ([SMALL], ["s"]), 1: ([own, SMALL], ["o", "t"])}
    assert located([report("n0", saved)]) == [Difference(SMALL, (0, 1), 0, 16, (0, own.nbytes))]


def test_each_part_is_compared_with_its_like() -> None:
    halves = [tensor("w", (2,), of=(4,), at=(lo,), replicated=True) for lo in (0, 2)]
    saved = {r: ([halves[r % 2]], [f"half{r % 2}"]) for r in range(4)}
    saved[3] = ([halves[1]], ["wrong"])
    assert located([report("n0", saved)]) == [Difference(halves[1], (1, 3), 0, 8, (0, 0))]


def test_values_are_compared_too() -> None:
    item = raw("lr", 3, ItemKind.PLAIN, replicated=True)
    assert located([report("n0", {0: ([item], "a"), 1: ([item], "b")})]) == [
        Difference(item, (0, 1), 0, 3, (0, 0))
    ]


def test_no_place_without_a_common_shape() -> None:
    other = tensor("small", (5,), replicated=True)
    assert located([report("n0", {0: ([SMALL], "a"), 1: ([other], "b")})]) == [None]
    sizes = [raw("lr", n, ItemKind.PLAIN, replicated=True) for n in (3, 4)]
    assert located([report("n0", {r: ([item], [f"v{r}"]) for r, item in enumerate(sizes)})]) == [
        None
    ]
