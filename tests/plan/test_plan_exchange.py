"""Rounds of an exchange: everything arrives once, in bounded memory, without waiting in circles."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupio.model import ChunkTable
from groupio.plan.exchange import plan_rounds
from groupio.plan.sharing import Sharing, share_reading

SLOT = 4096


def table_of(lengths: npt.NDArray[np.int64]) -> ChunkTable:
    count = len(lengths)
    digests = np.zeros((count, 32), np.uint8)
    ends = np.cumsum(lengths)
    return ChunkTable(digests, lengths, np.zeros(count, np.int32), ends - lengths)


def sizes_of(sharing: Sharing, lengths: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    return [
        np.array(
            [
                lengths[share.rows[share.starts[b] : share.starts[b + 1]]].sum()
                for b in range(share.batches)
            ],
            np.int64,
        )
        for share in sharing.shares
    ]


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Sharing, list[npt.NDArray[np.int64]], int]:
    ranks = draw(st.integers(1, 7))
    lengths = np.array(draw(st.lists(st.integers(1, SLOT), max_size=40)), np.int64)
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    wanted = rng.random((ranks, len(lengths))) < draw(st.sampled_from([0.3, 0.7, 1.0]))
    sharing = share_reading(wanted, table_of(lengths), SLOT)
    return sharing, sizes_of(sharing, lengths), draw(st.sampled_from([1, SLOT, 4 * SLOT]))


@given(worlds())
def test_each_batch_comes_once_to_all_that_want_it(
    world: tuple[Sharing, list[npt.NDArray[np.int64]], int],
) -> None:
    sharing, sizes, window = world
    rounds = plan_rounds(sharing, sizes, window)
    pairs = list(zip(rounds.readers.tolist(), rounds.batches.tolist(), strict=True))
    every = [(r, b) for r, share in enumerate(sharing.shares) for b in range(share.batches)]
    assert sorted(pairs) == every
    assert (np.diff(rounds.rounds) >= 0).all()
    number_of = dict(zip(pairs, rounds.rounds.tolist(), strict=True))
    for rank in range(len(sharing.shares)):
        mine = rounds.of(sharing, rank)
        wanted = [(r, b) for r, b in every if sharing.shares[r].wanters[rank, b]]
        assert sorted(pair for one in mine for pair in one) == wanted
        numbers = [{number_of[pair] for pair in one} for one in mine]
        assert all(len(one) == 1 for one in numbers)
        assert sorted(numbers, key=min) == numbers
        for one in mine:
            incoming = [sizes[r][b] for r, b in one if r != rank]
            assert sum(incoming) <= window or len(incoming) == 1
    sent = Counter(zip(rounds.readers.tolist(), rounds.rounds.tolist(), strict=True))
    assert all(count == 1 for count in sent.values())


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_replicas_take_no_more_rounds_than_the_windows_ask_for(ranks: int) -> None:
    lengths = np.full(ranks * 8, SLOT, np.int64)
    wanted = np.ones((ranks, len(lengths)), np.bool_)
    sharing = share_reading(wanted, table_of(lengths), SLOT)
    rounds = plan_rounds(sharing, sizes_of(sharing, lengths), 16 * SLOT)
    # A rank receives all but its own, 16 in a round; a reader sends 8, one in a round.
    fewest = max(8, -(-len(lengths) // 16))
    assert rounds.rounds.max() + 1 <= fewest + 4
