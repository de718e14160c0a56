"""After a node was lost in the middle of a transfer, the restarted job's saves are REPLICATED."""

from __future__ import annotations

from typing import Any

from nodes_help import (
    MIB,
    Cluster,
    call_save,
    committed,
    outcomes,
    released,
    save,
    until,
)

from groupio.errors import GroupIOError


def test_the_fabric_of_the_others_is_used_again_at_once(make_cluster: Any) -> None:
    cluster = make_cluster(3, hurry=True, equal_links=True, replicas="2").up()
    ranks = cluster.connect()
    assert committed(save(ranks, 1))
    lost = cluster.others[0]
    for node in cluster.nodes:
        node.hold("pull")
    call_save(ranks, 2)
    released(ranks)
    for node in cluster.nodes:
        node.await_hold("pull")
    lost.lose()
    for node in cluster.nodes:
        node.let("pull")
    left = [one for one in ranks if one.node is not lost]
    assert all(isinstance(one, GroupIOError) for one in outcomes(left, 2))
    for node in cluster.nodes:
        node.end_ranks()
    lost.start_agent()
    lost.wait_agent()
    ranks = cluster.connect()
    found = save(ranks, 3)
    assert committed(found), found
    links = {n["node"]: n["fabric_ok"] for n in cluster.ruler.status()["jobs"][0]["nodes"]}
    assert all(one["times"]["replicated"] for one in found), (links, found)
    until(lambda: budgets(cluster) == [256 * MIB] * 3, 20, cluster.logs)


def budgets(cluster: Cluster) -> list[Any]:
    """What the controller shows of each node's memory, whichever node it is on."""
    nodes = cluster.ruler.status()["jobs"][0]["nodes"]
    return [node["memory"] and node["memory"]["budget"] for node in nodes]
