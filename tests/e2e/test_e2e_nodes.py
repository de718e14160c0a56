"""A job of four nodes with two ranks each saves as a group, and gets back what it saved."""

from __future__ import annotations

import os
import time
from typing import Any

from nodes_help import MIB, call_save, committed, items, outcomes, released, restored, save, until


def stored(cluster: Any) -> int:
    """Bytes of all files, once nothing is in flight any more."""
    until(lambda: not os.listdir(cluster.store / "inflight"), 20, cluster.logs)
    return sum(p.stat().st_size for p in cluster.store.rglob("*") if p.is_file())


def test_every_chunk_is_stored_once_whatever_a_link_can_do(make_cluster: Any) -> None:
    cluster = make_cluster(4, replicas="2").up()
    ranks = cluster.connect(2)
    assert committed(save(ranks, 1))
    unique = 2 * MIB + 8 * (2 * MIB + 3)
    assert unique <= stored(cluster) <= 1.02 * unique + 32768
    for one in ranks:
        member = (one.rank + 3) % 8
        one.send("load", expect=items(member, 1), epoch=1, member=member)
    for one in ranks:
        one.answer()

    first = stored(cluster)
    found = save(ranks, 2)
    assert committed(found)
    assert all(one["times"]["replicated"] for one in found)
    assert stored(cluster) - first <= 8 * (2 * MIB + 3) * 1.02 + 32768

    # One node writes at 2 MiB/s, another one's fabric port sends at 4: it takes longer, no more.
    cluster.nodes[1].write_slowly(2 * MIB)
    if cluster.net is not None:
        cluster.net.throttle(2, 4 * MIB)
    began = time.monotonic()
    found = save(ranks, 3)
    assert committed(found)
    assert all(one["times"]["replicated"] for one in found)
    assert time.monotonic() - began < 30
    cluster.nodes[1].let("slow")
    if cluster.net is not None:
        cluster.net.free(2)

    # An agent stands still for 5 s: links bear that, nothing is lost.
    for node in (cluster.ruler, cluster.others[0]):
        epoch = 4 if node is cluster.ruler else 5
        with node.stopped_agent(5):
            call_save(ranks, epoch)
        released(ranks)
        assert committed(outcomes(ranks, epoch))
    restored(ranks[0], 8, 5)


def test_states_without_bytes(make_cluster: Any) -> None:
    cluster = make_cluster(2).up()
    ranks = cluster.connect(1)
    for epoch, state in ((1, {}), (2, {"a": {"seed": 1, "bytes": 0}}), (3, {"a": None})):
        for one in ranks:
            one.send("save", epoch=epoch, items=state)
        for one in ranks:
            assert one.answer()["error"] is None
        assert committed(outcomes(ranks, epoch))
        for one in ranks:
            one.ask("load", expect=state, epoch=epoch)
