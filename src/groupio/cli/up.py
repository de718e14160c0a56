"""``groupio up``: one agent on each node of a cluster that somebody else runs."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Annotated, Any

import typer

from groupio.agent import process, spawn
from groupio.agent.identity import node_name
from groupio.cli.options import (
    ControllerOption,
    DomainOption,
    FabricOption,
    IdleOption,
    MemoryOption,
    RuntimeDirOption,
    UplinkOption,
    settings_with,
)
from groupio.cli.output import (
    ANSWER_IS_NO,
    OK,
    CommandError,
    JsonFlag,
    console,
    emit_json,
    table,
    text,
)

DRAIN_S = 600.0
"""How long ``--down`` waits for saves in flight on a node."""

TOKEN_FILE = "GROUPIO_TOKEN_FILE"


def up(
    ray: Annotated[bool, typer.Option("--ray", help="The nodes of a Ray cluster.")] = False,
    address: Annotated[
        str, typer.Option("--address", help="The cluster, as ray.init takes it.")
    ] = "auto",
    down: Annotated[
        bool, typer.Option("--down", help="Drain the agents instead, and wait for their end.")
    ] = False,
    memory: MemoryOption = None,
    uplink: UplinkOption = None,
    fabric: FabricOption = None,
    domain: DomainOption = None,
    controller: ControllerOption = None,
    idle: IdleOption = "never",
    runtime_dir: RuntimeDirOption = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=1, help="Seconds to wait for all nodes.")
    ] = 120.0,
    as_json: JsonFlag = False,
) -> int:
    """Start one agent on each node of a cluster, or leave the one that runs there.

    Each node's own GROUPIO_* variables count, and the options, which are the same for all nodes,
    win over them. Run it again when nodes were added. Exit code 1 when a node has no agent
    afterwards (with --down: still has one).
    """
    if not ray:
        raise CommandError("say whose nodes: groupio up --ray")
    flags = {
        "memory": memory,
        "uplink": uplink,
        "fabric": fabric,
        "domain": domain,
        "controller": controller,
        "idle": idle,
        "runtime_dir": runtime_dir,
    }
    settings_with(**flags)  # a mistake shows here, not on each node
    wait_s = max(timeout_s, DRAIN_S) if down else timeout_s
    rows = _on_ray(address, flags, down, wait_s)
    if as_json:
        emit_json("up", {"nodes": rows})
    else:
        shown = table("node", "agent", "process", "log")
        for row in rows:
            words = (row["node"], row["state"], row["pid"] or "-", row["log"] or row["error"])
            shown.add_row(*(text(word) for word in words))
        console().print(shown)
    good = ("ended",) if down else ("started", "runs")
    return OK if all(row["state"] in good for row in rows) else ANSWER_IS_NO


def _on_ray(
    address: str, flags: dict[str, str | None], down: bool, timeout_s: float
) -> list[dict[str, Any]]:
    try:
        # By name: what its types are depends on whether it is installed.
        ray: Any = import_module("ray")
        strategies: Any = import_module("ray.util.scheduling_strategies")
    except ModuleNotFoundError as error:
        raise CommandError(
            f"--ray needs the package {error.name}: pip install 'groupio[ray]'"
        ) from error
    # The secret itself would pass through Ray's own tables; the name of a file may.
    shared = {TOKEN_FILE: os.environ[TOKEN_FILE]} if TOKEN_FILE in os.environ else {}
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        raise CommandError(f"no Ray cluster answers at {address}: {error}") from error
    try:
        task = ray.remote(num_cpus=0, max_retries=0)(drain_here if down else start_here)
        asked = {}
        for node in ray.nodes():
            if node["Alive"]:
                place = strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                chosen = task.options(
                    scheduling_strategy=place, runtime_env={"env_vars": shared} if shared else None
                )
                asked[chosen.remote(flags)] = node["NodeManagerHostname"]
        done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s)
        rows = [_row(ray, one, name, one in done) for one, name in asked.items()]
        return sorted(rows, key=lambda row: str(row["node"]))
    finally:
        ray.shutdown()


def _row(ray: Any, asked: Any, name: str, answered: bool) -> dict[str, Any]:
    row = {"node": name, "state": "silent", "pid": None, "log": "", "error": "no answer in time"}
    if answered:
        try:
            row |= {"error": ""} | ray.get(asked)
        except ray.exceptions.RayError as error:
            row |= {"state": "failed", "error": str(error).strip().splitlines()[-1]}
    return row


def start_here(flags: dict[str, str | None]) -> dict[str, Any]:
    """Start the agent of the node that this runs on, unless it runs; who it is."""
    settings = settings_with(**flags)
    where = spawn.agent_paths(settings)
    process.make_runtime_dir(where)
    before = process.holder_pid(where) if process.is_alive(where) else None
    spawn.ensure_agent(settings, settings.connect_timeout_s)
    pid = process.holder_pid(where)
    return {
        "node": node_name(settings.node),
        "state": "runs" if pid == before else "started",
        "pid": pid,
        "log": str(where.log),
    }


def drain_here(flags: dict[str, str | None]) -> dict[str, Any]:
    """Let the agent of the node that this runs on finish and end."""
    from groupio.cli import asking

    settings = settings_with(**flags)
    if settings.runtime_dir is not None:
        os.environ["GROUPIO_RUNTIME_DIR"] = settings.runtime_dir
    where = spawn.agent_paths(settings)
    pid = process.holder_pid(where) if where.alive.exists() else None
    asking.ask("drain")
    return {
        "node": node_name(settings.node),
        "state": "ended" if asking.wait_until_gone(DRAIN_S) else "still works",
        "pid": pid,
        "log": str(where.log),
    }
