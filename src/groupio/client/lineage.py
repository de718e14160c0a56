"""Lineages as a client sees them: in which order a reader looks at decisions, and which loaded
epoch the next save goes on after.

Pure: a listing tells the keys of decisions but not which of them are commits, so what is decided
here is an order in which to open them. The first commit met is the answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Protocol

from groupio.errors import Outcome
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


class _Handle(Protocol):
    @property
    def outcome(self) -> Outcome: ...


class Origin:
    """The epoch that a client loaded by its number and has saved nothing after.

    A save that failed for certain saved nothing; one whose outcome is not known may have.
    """

    def __init__(self) -> None:
        self._key: DecisionKey | None = None
        self._saves: list[_Handle] = []

    def loaded(self, key: DecisionKey | None) -> None:
        """An epoch was loaded; None: as the latest one, or in place of a damaged one."""
        self._key, self._saves = key, []

    def now(self) -> DecisionKey | None:
        """The epoch after which a save that is called now goes on, where it is known."""
        outcomes = [save.outcome for save in self._saves]
        if Outcome.COMMITTED in outcomes:
            self._key, self._saves = None, []
        elif all(outcome is Outcome.NOT_COMMITTED for outcome in outcomes):
            self._saves = []
        return None if self._saves else self._key

    def saving(self, handle: _Handle) -> None:
        """A save begins."""
        if self._key is not None:
            self._saves.append(handle)
