"""Which decisions a reader has to look at for ``latest`` or for a number, and in which order.

Pure: a listing tells the keys of decisions but not which of them are commits, so what is decided
here is an order in which to open them. The first commit met is the answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby

from groupio.model import EPOCH_MAX, DecisionKey, Lineage
from groupio.protocol import lineage as lines


def newest_first(
    keys: Iterable[DecisionKey],
    lineages: Mapping[int, Lineage],
    up_to: int | None = None,
) -> Iterator[tuple[int, list[DecisionKey]]]:
    """The epochs of the current line, newest first, not newer than ``up_to``.

    Each with its decisions in the order in which to look at them: the newest lineage first, the
    last attempt first, for an attempt after a commit does not exist.
    """
    limits = lines.reach(lineages, lines.current(lineages))
    last = EPOCH_MAX if up_to is None else up_to
    shown = [k for k in keys if k.epoch <= last and k.epoch <= limits.get(k.lineage, -1)]
    shown.sort(key=lambda k: (k.epoch, k.lineage, k.attempt), reverse=True)
    for epoch, group in groupby(shown, key=lambda k: k.epoch):
        yield epoch, list(group)


def of_epoch(
    keys: Iterable[DecisionKey], lineages: Mapping[int, Lineage], epoch: int
) -> list[DecisionKey]:
    """The decisions of ``epoch`` in the order in which to look at them.

    The current line comes first; an epoch that a rewind abandoned can still be asked for.
    """
    limits = lines.reach(lineages, lines.current(lineages))
    found = [k for k in keys if k.epoch == epoch]
    return sorted(
        found,
        key=lambda k: (epoch <= limits.get(k.lineage, -1), k.lineage, k.attempt),
        reverse=True,
    )
