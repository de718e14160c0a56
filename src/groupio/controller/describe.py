"""Describes a job for ``groupio status``, as its controller sees it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from groupio.controller import messages as cm
    from groupio.controller.host import Host


def describe(host: Host) -> dict[str, Any]:
    """The job's state as plain values; sizes in bytes, times in seconds."""
    controller, now = host.controller, time.monotonic()
    incarnation = controller.incarnation
    return {
        "store": host.path,
        "job": host.store.job,
        "term": host.term,
        "incarnation": incarnation.number if incarnation is not None else None,
        "lineage": controller.lineage if controller.lineages else None,
        "last_committed": controller.latest if controller.latest >= 0 else None,
        "io_mode": host.store.io_mode or None,
        "store_away": host.away.describe(now),
        "saved": host.store.saved.describe(),
        "nodes": _nodes(host),
        "groups": [
            {
                "epoch": group.epoch,
                "phase": str(group.phase),
                "world_size": group.world_size,
                "missing": list(group.missing),
                "copied": sum(seat.copied for seat in group.seats.values()),
                "levels": [str(level) for level in group.levels],
                "waits_for_nodes": list(group.waits_for),
                "nodes": list(group.nodes),
                "replicas": group.first.replicas,
                "age_s": round(now - group.first.at + group.first.elapsed_s, 3),
            }
            for group in controller.groups.values()
        ],
    }


def _nodes(host: Host) -> list[dict[str, Any]]:
    nodes = host.controller.nodes
    return [
        {
            "node": link.node,
            "domain": link.domain,
            "uplink_bytes_per_s": link.uplink_bytes_per_s,
            "fabric_bytes_per_s": link.fabric_bytes_per_s,
            "fabric_ok": link.fabric_ok,
            "address": nodes.addresses([link.node])[link.node],
            "has_controller": link.node == host.lines.own,
            "memory": _memory(host.lines.memory.get(link.node)),
        }
        for link in nodes.links(nodes.alive)
    ]


def _memory(said: cm.NodeMemory | None) -> dict[str, int] | None:
    """None until the node has said it."""
    if said is None:
        return None
    return {"budget": said.budget, "leased": said.leased, "cache": said.cache}
