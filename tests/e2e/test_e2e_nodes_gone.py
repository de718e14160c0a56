"""A segment to which new epochs refer is gone: one save of the job fails, the next one is whole."""

from __future__ import annotations

from typing import Any

import nodes_help
import pytest
from nodes_help import committed, restored, save

from groupio.errors import IntegrityError


def test_chunks_that_are_gone_are_written_anew_on_all_nodes(
    make_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = nodes_help.items
    monkeypatch.setattr(nodes_help, "items", lambda rank, epoch: items(rank, 1))
    cluster = make_cluster(2, hurry=True).up()
    ranks = cluster.connect()
    assert committed(save(ranks, 1))
    for segment in (cluster.store / "segments").iterdir():
        segment.unlink()
    failed = save(ranks, 2)
    assert all(isinstance(one, IntegrityError) for one in failed), failed
    assert "save again" in str(failed[0])
    found = save(ranks, 3)
    assert committed(found), found
    restored(ranks[0], len(ranks), 3)
    held = sum(path.stat().st_size for path in (cluster.store / "segments").iterdir())
    assert committed(save(ranks, 4))
    after = sum(path.stat().st_size for path in (cluster.store / "segments").iterdir())
    assert after == held, "what is there again is referred to again"
