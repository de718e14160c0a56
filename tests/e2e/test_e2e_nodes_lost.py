"""A node of a job is lost: the epoch becomes durable, or a typed error says what to do."""

from __future__ import annotations

from typing import Any

from nodes_cases import failed, lose_at, lose_while_copying
from nodes_help import committed, save

from groupio.errors import AgentLost, GroupAborted


def test_before_staged_the_group_fails_and_names_the_node(make_cluster: Any) -> None:
    found, took = lose_while_copying(make_cluster, ruler=False, hurry=True)
    message = failed(found, GroupAborted)
    assert "is lost" in message
    assert "earlier epochs are intact" in message
    assert took < 6


def test_after_staged_without_replicas_its_bytes_are_missed(make_cluster: Any) -> None:
    found, _, lost, took = lose_at(make_cluster, "seal", ruler=False, replicas=1, hurry=True)
    message = failed(found, GroupAborted)
    assert lost.name in message
    assert "replicas=2" in message
    assert took < 6


def test_after_replicated_the_epoch_becomes_durable(make_cluster: Any) -> None:
    found, _, _, took = lose_at(make_cluster, "seal", ruler=False, replicas=2, hurry=True)
    assert committed(found)
    assert took < 8


def test_once_all_is_stored_it_is_not_needed(make_cluster: Any) -> None:
    found, _, _, took = lose_at(make_cluster, "prepare", ruler=False, replicas=1, hurry=True)
    assert committed(found)
    assert took < 6


def test_an_agent_alone_may_end_or_crash_between_saves(make_cluster: Any) -> None:
    cluster = make_cluster(3, hurry=True).up()
    ranks = cluster.connect()
    assert committed(save(ranks, 1))
    cluster.ruler.drain_agent()
    assert committed(save(ranks, 2))
    victim = cluster.others[0]
    crashed = victim.ranks[0]
    victim.kill_agent()
    # Its rank finds, or starts, another agent, which is not taken before the old one is lost.
    found = save(ranks, 3)
    if not committed(found):
        assert all(isinstance(one, GroupAborted | AgentLost) for one in found), found
        assert f"rank(s) {crashed.rank}" in str(found[0])
    assert committed(save(ranks, 4))
