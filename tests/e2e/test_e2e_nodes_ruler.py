"""The node with the controller is lost: another one takes over what is all there."""

from __future__ import annotations

import time
from typing import Any

from nodes_cases import failed, lose_at, lose_while_copying
from nodes_help import call_save, committed, outcomes, released, save

from groupio.errors import ControllerLost


def test_before_staged_the_save_is_given_up(make_cluster: Any) -> None:
    found, took = lose_while_copying(make_cluster, ruler=True, hurry=True)
    assert "not in memory" in failed(found, ControllerLost)
    assert took < 12


def test_after_replicated_the_next_controller_finishes(make_cluster: Any) -> None:
    found, cluster, lost, took = lose_at(make_cluster, "seal", ruler=True, replicas=2, hurry=True)
    assert committed(found)
    assert cluster.ruler is not lost
    assert took < 15


def test_a_prepared_epoch_is_committed(make_cluster: Any) -> None:
    found, _, _, took = lose_at(make_cluster, "decide", ruler=True, replicas=1, hurry=True)
    assert committed(found)
    assert took < 12


def test_a_group_that_gathers_goes_on_with_the_next_controller(make_cluster: Any) -> None:
    cluster = make_cluster(3, hurry=True).up()
    ranks = cluster.connect()
    assert committed(save(ranks, 1))
    ruler = cluster.ruler
    early = [one for one in ranks if one.node is not ruler]
    call_save(early, 2)
    time.sleep(0.3)
    ruler.kill_agent()
    # Its rank did not call yet, and finds, or starts, another agent.
    call_save(ruler.ranks, 2)
    released(ranks)
    assert committed(outcomes(ranks, 2))
