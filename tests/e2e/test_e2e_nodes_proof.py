"""Lost nodes with the patience of real agents: typed errors and commits within stated bounds."""

from __future__ import annotations

import time
from typing import Any

import pytest
from nodes_cases import failed, lose_at, lose_while_copying
from nodes_help import call_save, committed, outcomes, released, restored, save

from groupio.errors import ControllerLost, GroupAborted, GroupTimeout

pytestmark = pytest.mark.proof

NODE_S = 8 + 4
"""A link is silent for 8 s until the node is lost; then comes what is left to do."""

RULER_S = 8 + 5 + 10 + 6
"""Silence, tries to reach the controller, the wait for the other nodes, the rest of the work."""


def test_before_staged(make_cluster: Any) -> None:
    found, took = lose_while_copying(make_cluster, ruler=False, hurry=False)
    failed(found, GroupAborted)
    assert took < NODE_S


@pytest.mark.parametrize("point", ["pull", "seal", "prepare", "decide"])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("ruler", [False, True])
def test_after_staged(make_cluster: Any, point: str, replicas: int, *, ruler: bool) -> None:
    if point == "pull" and replicas == 1:
        replicas = 3
    found, _, _, took = lose_at(make_cluster, point, ruler=ruler, replicas=replicas, hurry=False)
    assert took < (RULER_S if ruler else NODE_S)
    safe = point == "decide" or (replicas > 1 and point != "pull")
    if safe or (point == "prepare" and not ruler):
        assert committed(found)
    else:
        failed(found, ControllerLost if ruler else GroupAborted)


def test_the_controller_before_staged(make_cluster: Any) -> None:
    found, took = lose_while_copying(make_cluster, ruler=True, hurry=False)
    failed(found, ControllerLost)
    assert took < RULER_S


@pytest.mark.root
@pytest.mark.parametrize("inbound", [False, True])
def test_a_link_cut_one_way(make_cluster: Any, *, inbound: bool) -> None:
    cluster = make_cluster(3).up()
    ranks = cluster.connect()
    assert committed(save(ranks, 1))
    ends = [cluster.others[0].number, cluster.ruler.number]
    a, b = ends if inbound else ends[::-1]
    cluster.net.cut(a, b)
    began = time.monotonic()
    call_save(ranks, 2, deadline_s=20)
    released(ranks)
    for one in outcomes(ranks, 2):
        assert isinstance(one, GroupAborted | GroupTimeout), one
    assert time.monotonic() - began < 30
    cluster.net.mend(a, b)
    epoch = next(e for e in range(3, 8) if committed(save(ranks, e, deadline_s=20)))
    restored(ranks[0], 3, epoch)


@pytest.mark.root
def test_peers_that_cannot_reach_each_other(make_cluster: Any) -> None:
    """The epoch is durable all the same; the copies may have no other way."""
    cluster = make_cluster(3, replicas="2").up()
    ranks = cluster.connect()
    assert committed(save(ranks, 1))
    a, b = (node.number for node in cluster.others)
    cluster.net.cut(a, b)
    began = time.monotonic()
    assert committed(save(ranks, 2))
    assert time.monotonic() - began < 70
    restored(ranks[0], 3, 2)
