"""Measures what the loss of a process costs: ``python benchmarks/node_loss.py --json FILE``.

Three real agents on loopback with a rank each, two copies, patience as in production. Seconds from
the loss until every surviving rank is DURABLE; a process is killed, so its machine still closes its
connections. The agents are those of the end-to-end tests, which can be held at a step.

``agent``       an agent and its rank are killed when the epoch is REPLICATED and not yet DURABLE
``controller``  the same with the agent that has the controller
``drained``     the controller's agent ends in order, then all ranks save
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "e2e"))

from nodes_help import Cluster, MachineNode, call_save, committed, outcomes, released, save

HELD = "seal"


def lose(cluster: Cluster, victim: MachineNode) -> float:
    """Lose a node with a replicated epoch."""
    ranks = [rank for node in cluster.nodes for rank in node.ranks]
    for node in cluster.nodes:
        node.hold(HELD)
    call_save(ranks, 2)
    released(ranks)
    for node in cluster.nodes:
        node.await_hold(HELD)
    left = [rank for rank in ranks if rank.node is not victim]
    for rank in left:
        rank.ask("wait", epoch=2, level="replicated", timeout_s=20)
    began = time.monotonic()
    victim.lose()
    for node in cluster.nodes:
        node.let(HELD)
    found = outcomes(left, 2)
    seconds = time.monotonic() - began
    assert committed(found), found
    return seconds


def drained(cluster: Cluster) -> float:
    """Save after the controller's agent has ended."""
    ranks = [rank for node in cluster.nodes for rank in node.ranks]
    cluster.ruler.drain_agent()
    began = time.monotonic()
    assert committed(save(ranks, 2))
    return time.monotonic() - began


KINDS: dict[str, Callable[[Cluster], float]] = {
    "agent": lambda cluster: lose(cluster, cluster.others[0]),
    "controller": lambda cluster: lose(cluster, cluster.ruler),
    "drained": drained,
}


def measure(kind: str) -> float:
    """One loss in a fresh cluster."""
    with tempfile.TemporaryDirectory(prefix="groupio-loss-") as folder:
        cluster = Cluster(Path(folder), 3, None, equal_links=True, replicas="2")
        try:
            assert committed(save(cluster.up().connect(), 1))
            return KINDS[kind](cluster)
        finally:
            for node in cluster.nodes:
                node.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    runs = {kind: [round(measure(kind), 2) for _ in range(options.runs)] for kind in KINDS}
    found = {
        "seconds": {kind: statistics.median(times) for kind, times in runs.items()},
        "runs": runs,
        "command": f"python benchmarks/node_loss.py --runs {options.runs}",
        "conditions": {
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
            "load_before": round(load, 2),
        },
    }
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
