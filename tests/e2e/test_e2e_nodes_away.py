"""The store is away for a while: nothing that is staged is lost, and new saves wait."""

from __future__ import annotations

from typing import Any

import pytest
from nodes_help import call_save, committed, outcomes, released, restored, save, until


@pytest.mark.proof
@pytest.mark.parametrize("size", [1, 3], ids=["one node", "three nodes"])
def test_what_is_staged_flushes_when_the_store_is_back(make_cluster: Any, size: int) -> None:
    cluster = make_cluster(size, hurry=True, replicas="2" if size > 1 else "1")
    for node in cluster.nodes:
        node.script = "away_agent.py"
    cluster.up()
    ranks = cluster.connect()
    assert committed(save(ranks, 1))
    for node in cluster.nodes:
        (node.holds / "away").write_text("")
    # Epoch 2 was called just before: its attempt is visible already.
    call_save(ranks, 2, deadline_s=60)
    if size == 1:
        away = lambda: cluster.nodes[0].status()["jobs"][0]["store_away"]  # noqa: E731
    else:
        away = lambda: cluster.ruler.status()["jobs"][0]["store_away"]  # noqa: E731
    assert until(away, 20, cluster.logs)["for_s"] >= 0
    for node in cluster.nodes:
        node.let("away")
    released(ranks)
    assert committed(outcomes(ranks, 2))
    restored(ranks[0], size, 2)


def test_a_sealed_epoch_is_copied_and_waits(make_cluster: Any) -> None:
    cluster = make_cluster(3, hurry=True, replicas="2")
    for node in cluster.nodes:
        node.script = "away_agent.py"
    cluster.up()
    ranks = cluster.connect()
    assert committed(save(ranks, 1))
    slow = ranks[0]
    slow.ask("hold_copies", folder=str(slow.node.holds))
    slow.node.hold("copy")
    call_save(ranks, 2)
    slow.node.await_hold("copy")
    for node in cluster.nodes:
        (node.holds / "away").write_text("")
    slow.node.let("copy")
    released(ranks)
    for one in ranks:
        one.send("wait", epoch=2, level="replicated", timeout_s=12).answer()
    ruler = cluster.ruler
    assert until(lambda: ruler.status()["jobs"][0]["store_away"], 20, cluster.logs)
    for node in cluster.nodes:
        node.let("away")
    assert committed(outcomes(ranks, 2))
    restored(ranks[0], 3, 2)


def test_one_node_writes_anew_what_it_had_sealed(make_cluster: Any) -> None:
    """It writes while its ranks copy, and keeps all in memory until that is durable."""
    cluster = make_cluster(1, hurry=True)
    node = cluster.nodes[0]
    node.script = "away_agent.py"
    cluster.up()
    ranks = cluster.connect(2)
    assert committed(save(ranks, 1))
    ranks[0].ask("hold_copies", folder=str(node.holds))
    node.hold("copy")
    call_save(ranks, 2)
    node.await_hold("copy")
    (node.holds / "away").write_text("")
    node.let("copy")
    released(ranks)
    for one in ranks:
        one.send("wait", epoch=2, level="staged", timeout_s=12).answer()
    assert until(lambda: node.status()["jobs"][0]["store_away"], 20, cluster.logs)
    node.let("away")
    assert committed(outcomes(ranks, 2))
    restored(ranks[0], 2, 2)
    assert committed(save(ranks, 3))
