"""``groupio status``: what the node's agent is doing."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live

from groupio.cli import asking
from groupio.cli.output import (
    ANSWER_IS_NO,
    OK,
    JsonFlag,
    console,
    duration,
    emit_json,
    rate,
    size,
    table,
    text,
)


def status(
    watch: Annotated[bool, typer.Option("--watch", help="Keep looking until Ctrl-C.")] = False,
    interval_s: Annotated[
        float, typer.Option("--interval", min=0.1, max=3600, help="Seconds between looks.")
    ] = 1.0,
    metrics: Annotated[
        bool, typer.Option("--metrics", help="Print the agent's counters as Prometheus text.")
    ] = False,
    as_json: JsonFlag = False,
) -> int:
    """Show the agent, its memory, its jobs with their nodes, and the groups in flight.

    Exit code 1 when no agent runs. With --watch --json, one JSON object a line.
    """
    if metrics:
        return _metrics(as_json)
    if not watch:
        answer = asking.ask("status")
        if as_json:
            emit_json("status", document(answer))
        else:
            console().print(picture(answer))
        return ANSWER_IS_NO if answer is None else OK
    try:
        if as_json:
            _watch_json(interval_s)
        else:
            _watch(interval_s)
    except KeyboardInterrupt:
        pass  # that is how watching ends
    return OK


def _metrics(as_json: bool) -> int:
    answer = asking.ask("metrics")
    if as_json:
        emit_json("metrics", {"running": answer is not None, **(answer or {"text": ""})})
    elif answer is not None:
        sys.stdout.write(answer["text"])
    else:
        console().print(picture(None))
    return ANSWER_IS_NO if answer is None else OK


def _watch_json(interval_s: float) -> None:
    while True:
        emit_json("status", document(asking.ask("status")), indent=None)
        time.sleep(interval_s)


def _watch(interval_s: float) -> None:
    if not sys.stdout.isatty():
        while True:
            console().print(picture(asking.ask("status")), end="\n\n")
            sys.stdout.flush()
            time.sleep(interval_s)
    with Live(picture(asking.ask("status")), console=console(), auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            live.update(picture(asking.ask("status")), refresh=True)


def document(answer: dict[str, Any] | None) -> dict[str, Any]:
    """The JSON body for an answer of the agent, or for its absence."""
    if answer is not None:
        return {"running": True, **answer}
    where = asking.paths()
    agent = {"runtime_dir": str(where.directory), "log": str(where.log)}
    return {"running": False, "agent": agent, "jobs": [], "clients": []}


def picture(answer: dict[str, Any] | None) -> RenderableType:
    """An answer of the agent, for people."""
    if answer is None:
        return f"no agent runs in {asking.paths().directory}; the first client starts one"
    jobs = answer["jobs"]
    parts: list[RenderableType] = [_agent(answer["agent"])]
    if jobs:
        parts += ["", _jobs(jobs)]
    for job in jobs:
        if why := job.get("why_not"):
            parts += ["", f"{text(job['store'])} has no controller yet: {text(why)}"]
        away = job.get("store_away")
        if away is not None:
            since = duration(away["for_s"])
            parts += ["", f"{text(job['store'])} is away for {since}: {text(away['error'])}"]
    nodes = [(job, node) for job in jobs for node in job.get("nodes", ())]
    if nodes:
        parts += ["", _nodes(nodes)]
    groups = [(job, group) for job in jobs for group in job["groups"]]
    if groups:
        parts += ["", _groups(groups)]
    if answer["clients"]:
        parts += ["", _clients(answer["clients"])]
    return Group(*parts)


def _agent(agent: dict[str, Any]) -> RenderableType:
    memory = agent["memory"]
    rows = table("agent", "")
    uptime = duration(agent["uptime_s"])
    draining = ", draining" if agent.get("draining") else ""
    rows.add_row("process", f"{agent['pid']}, version {agent['version']}, up {uptime}{draining}")
    rows.add_row("node", text(agent.get("node", "-")))
    rows.add_row("memory", f"{size(memory['leased'])} leased of {size(memory['budget'])}")
    warm = f"{size(memory['free'])} warm ({size(agent.get('cache_bytes', 0))} of it cache)"
    rows.add_row("", f"{warm}, {size(memory['quarantined'])} quarantined")
    if index := agent.get("index_bytes"):
        rows.add_row("", f"and {size(index)} for the index of stored chunks")
    if pace := _pace(agent.get("pace") or {}):
        rows.add_row("pace", pace)
    rows.add_row("log", text(agent["log"]))
    return rows


def _pace(pace: dict[str, Any]) -> str:
    """What holds bytes back on this node; "" when nothing does."""
    words = [
        f"{link} at most {rate(pace[f'{link}_bytes_per_s'])}"
        for link in ("uplink", "fabric")
        if pace.get(f"{link}_bytes_per_s") is not None
    ]
    if pace.get("share", 1.0) < 1:
        words.append(f"foreground: {pace['share']:.0%} of it")
    return ", ".join(words)


def _jobs(jobs: list[dict[str, Any]]) -> RenderableType:
    rows = table(
        *(
            "job",
            "store",
            "controller",
            "incarnation",
            "lineage",
            "latest",
            "saved",
            "deduplicated",
        ),
        right=("incarnation", "lineage", "latest", "saved", "deduplicated"),
    )
    for job in jobs:
        saved = job.get("saved") or {}
        rows.add_row(
            text(job["job"]),
            text(job["store"]),
            text(_controller(job)),
            *("-" if job.get(k) is None else str(job[k]) for k in _NUMBERS),
            size(saved.get("bytes_logical")),
            size(saved.get("bytes_deduplicated")),
        )
    return rows


_NUMBERS = ("incarnation", "lineage", "last_committed")


def _controller(job: dict[str, Any]) -> str:
    where = str(job.get("controller", "here"))
    term = f", term {job['term']}" if job.get("term") else ""
    return where + term + ("" if job.get("joined", True) else ", not found yet")


def _nodes(nodes: list[tuple[dict[str, Any], dict[str, Any]]]) -> RenderableType:
    rows = table(
        *("job", "node", "domain", "uplink", "fabric", "memory leased", "address", ""),
        right=("uplink", "fabric"),
    )
    for job, node in nodes:
        memory = node.get("memory")
        rows.add_row(
            text(job["job"]),
            text(node["node"]),
            text(node["domain"]),
            rate(node["uplink_bytes_per_s"]),
            rate(node["fabric_bytes_per_s"]) if node["fabric_ok"] else "off",
            f"{size(memory['leased'])} of {size(memory['budget'])}" if memory else "-",
            text(node["address"]),
            "controller" if node["has_controller"] else "",
        )
    return rows


def _groups(groups: list[tuple[dict[str, Any], dict[str, Any]]]) -> RenderableType:
    rows = table(
        *("job", "epoch", "phase", "level", "copied", "waits for", "age"), right=("epoch",)
    )
    for job, group in groups:
        rows.add_row(
            text(job["job"]),
            str(group["epoch"]),
            text(group["phase"]),
            ", ".join(group.get("levels", ())) or "-",
            f"{count_of(group['copied'])} of {group['world_size']}",
            _waits_for(group),
            duration(group["age_s"]),
        )
    return rows


def _waits_for(group: dict[str, Any]) -> str:
    parts = []
    if group["missing"]:
        parts.append(f"ranks {ranks(group['missing'])}")
    if group.get("waits_for_nodes"):
        parts.append("nodes " + ", ".join(text(node) for node in group["waits_for_nodes"]))
    return "; ".join(parts) or "-"


def _clients(clients: list[dict[str, Any]]) -> RenderableType:
    columns = list(dict.fromkeys(key for client in clients for key in client))
    rows = table(*columns)
    for client in clients:
        rows.add_row(*(text(client.get(column, "-")) for column in columns))
    return rows


def count_of(copied: int | list[int]) -> int:
    """How many ranks have copied, given their number or the list of them."""
    return copied if isinstance(copied, int) else len(copied)


def ranks(numbers: list[int]) -> str:
    """Ranks with runs joined: [0, 1, 2, 5] is "0-2, 5"."""
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
