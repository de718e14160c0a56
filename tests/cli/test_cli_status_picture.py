"""How ``status`` shows a job of many nodes."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from groupio.cli.output import rate
from groupio.cli.status import picture


def shown(answer: dict[str, Any]) -> str:
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(picture(answer))
    return console.export_text()


def test_nodes_links_levels_and_what_is_missing() -> None:
    memory = {"budget": 2 << 30, "leased": 1 << 30, "quarantined": 0, "free": 3 << 20}
    agent = {"pid": 1, "version": "0", "uptime_s": 9, "log": "/log", "node": "n0"}
    node = {"node": "n0", "domain": "rack-3", "uplink_bytes_per_s": 12.5e9}
    node |= {"fabric_bytes_per_s": 25e9, "fabric_ok": True, "address": "tcp://h:1"}
    group = {"epoch": 3, "phase": "storing", "world_size": 4, "missing": [], "copied": 4}
    group |= {"levels": ["staged", "replicated"], "waits_for_nodes": ["n1", "n2"], "age_s": 2}
    late = group | {"epoch": 4, "phase": "gathering", "missing": [1, 2], "levels": []}
    job = {"store": "/s", "job": "j", "incarnation": 1, "lineage": 1, "last_committed": 2}
    job |= {"controller": "tcp://h:9", "term": 7, "joined": True}
    job |= {"saved": {"bytes_logical": 3 << 30, "bytes_deduplicated": 1 << 30}}
    job |= {"store_away": {"for_s": 150, "error": "[stale] handle"}}
    job |= {"nodes": [node | {"has_controller": True}], "groups": [group, late]}
    lost = node | {"node": "n1", "fabric_ok": False, "has_controller": False}
    job["nodes"].append(lost)
    job["nodes"][0]["memory"] = {"budget": 8 << 30, "leased": 5 << 30, "cache": 1 << 30}
    lonely = {"store": "/t", "job": "k", "joined": False, "groups": []}
    lonely["why_not"] = "[n9] has another token"
    lines = shown(
        {
            "agent": agent | {"memory": memory, "cache_bytes": 2 << 20, "index_bytes": 58 << 20},
            "jobs": [job, lonely],
            "clients": [],
        }
    ).splitlines()
    words = [
        ("warm", "2.0 MiB of it cache"),
        ("58.0 MiB for the index of stored chunks",),
        ("tcp://h:9, term 7", "3.0 GiB"),
        ("here, not found yet", "-"),
        ("/t has no controller yet: [n9] has another token",),
        ("/s is away for 2 min", "[stale] handle"),
        ("rack-3", "12.5 GB/s", "25 GB/s", "5.0 GiB of 8.0 GiB", "tcp://h:1", "controller"),
        ("n1", "off"),
        ("storing", "staged, replicated", "4 of 4", "nodes n1, n2"),
        ("gathering", "ranks 1-2; nodes n1, n2"),
    ]
    for some in words:
        assert any(all(word in line for word in some) for line in lines), (some, lines)


def test_what_holds_bytes_back_is_shown() -> None:
    memory = {"budget": 2 << 30, "leased": 0, "quarantined": 0, "free": 0}
    agent = {"pid": 1, "version": "0", "uptime_s": 9, "log": "/log", "memory": memory}
    answer = {"agent": agent, "jobs": [], "clients": []}
    free = {"uplink_bytes_per_s": None, "fabric_bytes_per_s": None, "share": 1.0, "held_s": 0.0}
    agent["pace"] = free
    assert "pace" not in shown(answer)
    agent["pace"] = free | {"uplink_bytes_per_s": 1e9, "share": 0.1}
    assert "uplink at most 1 GB/s, foreground: 10% of it" in shown(answer)


def test_rates_are_in_powers_of_1000() -> None:
    assert [rate(r) for r in (12, 1500, 2.5e6, 125e6, 12.5e9, 4e12)] == [
        "12 B/s",
        "1.5 kB/s",
        "2.5 MB/s",
        "125 MB/s",
        "12.5 GB/s",
        "4000 GB/s",
    ]
