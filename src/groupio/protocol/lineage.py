"""Selects the committed epochs of the line that ``latest`` follows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from groupio.model import EPOCH_MAX, DecisionKey, Lineage

FIRST = Lineage(number=1, parent=0, after_epoch=-1)
"""The lineage of a new store; it needs no record."""


def by_number(lineages: Iterable[Lineage]) -> dict[int, Lineage]:
    """Lineages by number, the first one included."""
    return {FIRST.number: FIRST} | {line.number: line for line in lineages}


def current(lineages: Mapping[int, Lineage]) -> int:
    """The newest lineage: the one that new epochs go to."""
    return max(lineages)


def reach(lineages: Mapping[int, Lineage], number: int) -> dict[int, int]:
    """The lineages that the line of ``number`` runs through, each with its last epoch in the line.

    A line is its own lineage without end, then its parent up to ``after_epoch``, and so on; an
    ancestor is cut by the lowest rewind on the way.
    """
    limits = {number: EPOCH_MAX}
    limit = EPOCH_MAX
    line = lineages.get(number)
    while line is not None and line.parent in lineages and line.parent not in limits:
        limit = min(limit, line.after_epoch)
        limits[line.parent] = limit
        line = lineages[line.parent]
    return limits


def visible(
    keys: Iterable[DecisionKey], lineages: Mapping[int, Lineage], number: int
) -> dict[int, DecisionKey]:
    """The commits that the line of lineage ``number`` shows, by epoch.

    Epochs grow along a line, so no epoch stands in it twice; should a store say otherwise, the
    newest lineage wins.
    """
    limits = reach(lineages, number)
    shown: dict[int, DecisionKey] = {}
    for key in sorted(keys):
        if key.epoch <= limits.get(key.lineage, -1):
            shown[key.epoch] = key
    return shown
