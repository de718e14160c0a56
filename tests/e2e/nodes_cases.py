"""What happens when nodes are lost: the same cases with hurried agents and with real patience."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from nodes_help import (
    Cluster,
    MachineNode,
    call_save,
    committed,
    outcomes,
    released,
    restored,
    save,
)

from groupio.errors import GroupIOError, Outcome

MakeCluster = Callable[..., Cluster]

IN_STORE = ("prepare", "decide")
"""Points that only the controller's node comes to."""


def failed(found: list[Any], kind: type[GroupIOError]) -> str:
    """Every rank was told this error, which says that nothing was committed; its message."""
    for one in found:
        assert type(one) is kind, found
        assert one.outcome is Outcome.NOT_COMMITTED, one
    return str(found[0].message)


def lose_at(
    make: MakeCluster, point: str, *, ruler: bool, replicas: int, **patience: bool
) -> tuple[list[Any], Cluster, MachineNode, float]:
    """Epoch 1 is saved; a node is lost while epoch 2 is at the point, with agent and rank.

    Returns what the other ranks were told, the cluster, the lost node, and seconds until then.
    """
    cluster = make(3, equal_links=True, replicas=str(replicas), **patience).up()
    ranks = cluster.connect()
    assert committed(save(ranks, 1))
    lost = cluster.ruler if ruler else cluster.others[0]
    holding = [cluster.ruler] if point in IN_STORE else cluster.nodes
    for node in holding:
        node.hold(point)
    call_save(ranks, 2)
    released(ranks)
    for node in holding:
        node.await_hold(point)
    left = [one for one in ranks if one.node is not lost]
    for one in left:
        if replicas > 1 and point in ("seal", *IN_STORE):
            one.ask("wait", epoch=2, level="replicated", timeout_s=20)
    began = time.monotonic()
    lost.lose()
    for node in holding:
        node.let(point)
    found = outcomes(left, 2)
    took = time.monotonic() - began
    restored(left[0], 3, 2 if committed(found) else 1)
    expected = [1, 2] if committed(found) else [1]
    assert left[-1].ask("epochs")["epochs"] == expected
    return found, cluster, lost, took


def lose_while_copying(make: MakeCluster, *, ruler: bool, hurry: bool) -> tuple[list[Any], float]:
    """A node is lost before STAGED: a rank of another node still copies."""
    cluster = make(3, hurry=hurry).up()
    ranks = cluster.connect()
    assert committed(save(ranks, 1))
    lost = cluster.ruler if ruler else cluster.others[0]
    slow = next(one for one in ranks if one.node is not lost)
    slow.ask("hold_copies", folder=str(slow.node.holds))
    slow.node.hold("copy")
    call_save(ranks, 2)
    slow.node.await_hold("copy")
    left = [one for one in ranks if one.node is not lost]
    quick = [one for one in left if one is not slow]
    began = time.monotonic()
    lost.lose()
    released(quick)
    found = outcomes(quick, 2)
    took = time.monotonic() - began
    slow.node.let("copy")
    released([slow])
    found += outcomes([slow], 2)
    restored(left[0], 3, 1)
    return found, took
