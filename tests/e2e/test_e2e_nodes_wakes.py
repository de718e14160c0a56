"""A controller that was paused until another one took over does no harm when it wakes up."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from nodes_help import call_save, committed, outcomes, released, restored, save, until

from groupio.errors import GroupIOError, Outcome


@pytest.mark.parametrize("point", ["seal", "prepare", "decide"])
def test_it_finds_all_decided(make_cluster: Any, point: str) -> None:
    cluster = make_cluster(3, hurry=True, equal_links=True, replicas="2").up()
    ranks = cluster.connect()
    assert committed(save(ranks, 1))
    ruler = cluster.ruler
    ruler.hold(point)
    call_save(ranks, 2)
    released(ranks)
    ruler.await_hold(point)
    for one in ranks:
        one.ask("wait", epoch=2, level="replicated", timeout_s=20)
    pid = ruler.agent_pid()
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        ruler.let(point)
        others = [one for one in ranks if one.node is not ruler]
        assert committed(outcomes(others, 2))
    finally:
        os.kill(pid, signal.SIGCONT)
    (own,) = ruler.ranks
    found = own.send("wait", epoch=2, timeout_s=30).outcome(40)
    if isinstance(found, GroupIOError):
        assert found.outcome is not Outcome.NOT_COMMITTED, found
    until(lambda: cluster.ruler is not ruler, 20, cluster.logs)
    epoch = next(e for e in range(3, 8) if committed(save(ranks, e)))
    for number in (2, epoch):
        restored(ranks[0], 3, number)
    keys = sorted(path.name for path in (cluster.store / "epochs").iterdir())
    assert len(keys) == len(set(keys))
