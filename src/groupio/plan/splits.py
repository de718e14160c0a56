"""Replicas that several members hand over in parts: has everyone handed over theirs?

Where holders of equal bytes divide them among each other, each relies on the others. Every holder
therefore adds a *split record*, an item declared replicated whose content says how the tensors
were divided and whose name says among how many members.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from groupio.format.structure import RESERVED, SAMPLE
from groupio.model import NodeReport

__all__ = ["SPLIT", "Unshared", "split_name", "unshared"]

SPLIT = f"{SAMPLE}{RESERVED}split:"
"""Prefix of the names of split records; the number of holders and the name of the group follow."""


@dataclass(frozen=True, slots=True)
class Unshared:
    """A split record that only ``ranks`` have, of the ``holders`` that divided the tensors."""

    ranks: tuple[int, ...]
    holders: int


def split_name(holders: int, group: str) -> str:
    """The name of the split record of ``holders`` members; ``group`` tells them from others."""
    return f"{SPLIT}{holders}:{group}"


def unshared(reports: Sequence[NodeReport]) -> list[Unshared]:
    """The split records that not all holders have, so that parts of tensors are missing."""
    names: dict[bytes, list[str]] = {}
    having: dict[str, list[int]] = {}
    for report in reports:
        for member in report.members:
            mine = names.get(member.items_id)
            if mine is None:
                mine = [item.name for item in member.items if item.name.startswith(SPLIT)]
                names[member.items_id] = mine
            for name in mine:
                having.setdefault(name, []).append(member.rank)
    found = []
    for name, ranks in having.items():
        holders = name.removeprefix(SPLIT).partition(":")[0]
        # A caller's own item of such a name divides nothing.
        if holders.isdecimal() and len(ranks) != int(holders):
            found.append(Unshared(tuple(sorted(ranks)), int(holders)))
    return found
