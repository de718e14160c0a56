"""Agents that die or end are noticed by their connections: silence tells nothing in these tests."""

from __future__ import annotations

from typing import Any

from nodes_cases import lose_at
from nodes_help import committed, save


def test_a_killed_agent_is_noticed_at_once(make_cluster: Any) -> None:
    found, *_ = lose_at(make_cluster, "seal", ruler=False, replicas=2, patient=True)
    assert committed(found)


def test_a_killed_controller_is_noticed_at_once(make_cluster: Any) -> None:
    found, cluster, lost, _ = lose_at(make_cluster, "seal", ruler=True, replicas=2, patient=True)
    assert committed(found)
    assert cluster.ruler is not lost


def test_a_drained_controller_says_goodbye(make_cluster: Any) -> None:
    cluster = make_cluster(3, patient=True).up()
    ranks = cluster.connect()
    assert committed(save(ranks, 1))
    first = cluster.ruler
    first.drain_agent()
    assert committed(save(ranks, 2))
    assert cluster.ruler is not first


def test_an_agent_that_stands_still_is_not_taken_for_dead(make_cluster: Any) -> None:
    cluster = make_cluster(3, patient=True).up()
    ranks = cluster.connect()
    assert committed(save(ranks, 1))
    ruler, other = cluster.ruler, cluster.others[0]
    for node in (other, ruler):
        with node.stopped_agent(4):
            pass
        assert committed(save(ranks, 2 + (node is ruler)))
    assert cluster.ruler is ruler
    assert "is lost" not in cluster.logs()
