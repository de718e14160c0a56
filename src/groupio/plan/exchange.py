"""In which order ranks hand batches of chunks to each other by collectives.

Every rank computes the same rounds from the same :class:`groupio.plan.sharing.Sharing`. In a round
each reader sends at most one batch, to all that want it, and no rank receives more than its
window holds; ranks without a part in a round go on to the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from groupio.plan.sharing import Sharing


@dataclass(frozen=True, slots=True)
class Rounds:
    """All batches in the order of their rounds: ``readers``, ``batches``, ``rounds`` int64[n]."""

    readers: npt.NDArray[np.int64]
    batches: npt.NDArray[np.int64]
    rounds: npt.NDArray[np.int64]

    def of(self, sharing: Sharing, rank: int) -> list[list[tuple[int, int]]]:
        """Reader and batch of what ``rank`` sends or receives, round by round, without gaps."""
        mine: dict[int, list[tuple[int, int]]] = {}
        for reader, share in enumerate(sharing.shares):
            at = np.flatnonzero(self.readers == reader)
            at = at[share.wanters[rank, self.batches[at]]]
            for number, batch in zip(
                self.rounds[at].tolist(), self.batches[at].tolist(), strict=True
            ):
                mine.setdefault(number, []).append((reader, batch))
        return [mine[number] for number in sorted(mine)]


def plan_rounds(
    sharing: Sharing, sizes: Sequence[npt.NDArray[np.int64]], window_bytes: int
) -> Rounds:
    """Rounds for all batches of ``sharing``; ``sizes[i]`` int64[batches] are those of reader i.

    ``window_bytes`` is what a rank may receive in a round, or one batch if that is larger.
    """
    ranks = len(sharing.shares)
    number = np.zeros(ranks, np.int64)
    received = np.zeros(ranks, np.int64)
    free = [0] * ranks
    rows: list[tuple[int, int, int]] = []
    for batch in range(max((share.batches for share in sharing.shares), default=0)):
        # Different readers come first in turn, so that none always waits for the others.
        for reader in np.roll(np.arange(ranks), -batch).tolist():
            share = sharing.shares[reader]
            if batch >= share.batches:
                continue
            others = share.wanters[:, batch].copy()
            others[reader] = False
            into = np.flatnonzero(others)
            size = int(sizes[reader][batch])
            full = (received[into] > 0) & (received[into] + size > window_bytes)
            chosen = max(free[reader], int((number[into] + full).max()))
            received[into] = np.where(number[into] < chosen, 0, received[into]) + size
            number[into] = chosen
            free[reader] = chosen + 1
            rows.append((chosen, reader, batch))
    table = np.array(sorted(rows), np.int64).reshape(-1, 3)
    return Rounds(table[:, 1], table[:, 2], table[:, 0])
