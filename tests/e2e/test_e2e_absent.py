"""Ranks that connected and then never come to the save: the others hear of it in seconds."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from e2e_help import data, save_all

from groupio.errors import AgentLost, GroupAborted, Outcome, from_wire
from groupio.protocol.presence import ENDED_GRACE_S

SOON_S = ENDED_GRACE_S + 35.0
"""Well below the deadline of the saves, which is 600 s."""


def gathering(node: Any, members: int) -> None:
    """Wait until so many members are in a group that waits for more."""
    node.until(
        lambda s: any(
            group["phase"] == "gathering" and group["world_size"] - len(group["missing"]) == members
            for job in s["jobs"]
            for group in job["groups"]
        )
    )


def test_ranks_that_end_before_their_first_save(node: Any, tmp_path: Path) -> None:
    store = tmp_path / "store"
    ranks = node.world(4, store)
    looks = node.rank(1, 4, store)
    started = time.monotonic()
    ranks[0].send("save", epoch=5, items=data(0, 1000))
    gathering(node, 1)
    looks.kill()  # another client of a rank that lives: nothing is lost
    ranks[2].kill()
    ranks[3].end()  # closes its client and exits, as at the end of a script
    for one in ranks[:2]:
        error = from_wire(one.answer(SOON_S)["error"])
        assert isinstance(error, GroupAborted)
        assert error.members == (2, 3)
        assert error.epoch == 5
        assert error.outcome is Outcome.NOT_COMMITTED
        if one.rank == 0:
            ranks[1].send("save", epoch=5, items=data(1, 1000))  # later than the others
    assert time.monotonic() - started < SOON_S
    assert ranks[0].ask("epochs")["epochs"] == []


def test_a_rank_that_is_started_again_in_time_is_not_missed(node: Any, tmp_path: Path) -> None:
    store = tmp_path / "store"
    ranks = node.world(3, store)
    ranks[1].kill()
    for one in (ranks[0], ranks[2]):
        one.send("save", epoch=5, items=data(one.rank, 1000))
    gathering(node, 2)
    again = node.rank(1, 3, store)
    again.send("save", epoch=5, items=data(1, 1000))
    for one in (ranks[0], again, ranks[2]):
        assert one.answer()["error"] is None
        one.ask("wait", epoch=5, timeout_s=30)
    # The end of a rank that is missing nowhere, and of others while the store works, is no news.
    save_all([ranks[0], again, ranks[2]], 6, lambda r: r)
    ranks[2].end()
    assert ranks[0].ask("epochs")["epochs"] == [5, 6]


def test_the_agent_dies_between_two_calls_of_one_epoch(node: Any, tmp_path: Path) -> None:
    store = tmp_path / "store"
    ranks = node.world(3, store)
    ranks[0].send("save", epoch=5, items=data(0, 1000))
    ranks[1].send("save", epoch=5, items=data(1, 1000))
    gathering(node, 2)
    node.kill_agent()
    for one in ranks[:2]:
        assert isinstance(from_wire(one.answer()["error"]), AgentLost)
    # Rank 1 saves again, as rank 2 does, who noticed nothing; rank 0 goes on without this epoch.
    started = time.monotonic()
    ranks[1].send("save", epoch=5, items=data(1, 1000))
    ranks[2].send("save", epoch=5, items=data(2, 1000))
    for one in ranks[1:]:
        error = from_wire(one.answer(SOON_S)["error"])
        assert isinstance(error, GroupAborted)
        assert error.members == (0,)
        assert "lost the agent" in error.message
    assert time.monotonic() - started < SOON_S
    save_all(ranks, 6, lambda r: r)
