"""A job that lost a node after REPLICATED goes on from memory: storage is not read."""

from __future__ import annotations

from typing import Any

import pytest
from nodes_help import MIB, bytes_from, committed, items, save, total


@pytest.mark.parametrize(
    ("name", "hurry"),
    [("n1", True), ("n9", True), pytest.param("n9", False, marks=pytest.mark.proof)],
    ids=["same name", "another machine", "another machine, real patience"],
)
def test_the_lost_bytes_come_from_the_other_nodes(
    make_cluster: Any, name: str, *, hurry: bool
) -> None:
    cluster = make_cluster(3, hurry=hurry, equal_links=True, replicas="2").up()
    ranks = cluster.connect()
    found = save(ranks, 1)
    assert committed(found)
    assert all(one["times"]["replicated"] for one in found)
    lost = cluster.nodes[1]
    lost.lose()
    for node in cluster.nodes:
        node.end_ranks()
    lost.environ["GROUPIO_NODE"] = name
    lost.start_agent()
    lost.wait_agent()
    ranks = cluster.connect()
    for one in ranks:
        one.send("load", epoch=1, expect=items(one.rank, 1))
    for one in ranks:
        one.answer()
    assert total(cluster, "store") == 0, cluster.logs()
    assert bytes_from(lost, "peer") >= 4 * MIB
