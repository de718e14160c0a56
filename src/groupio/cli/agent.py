"""``groupio agent``: start the node's agent, or let it finish and end."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import msgspec
import typer

from groupio.agent import process, spawn
from groupio.cli import asking
from groupio.cli.output import ANSWER_IS_NO, OK, JsonFlag, console, emit_json, text
from groupio.settings import Settings

app = typer.Typer(help="Start, drain or stop this user's agent on this node.")

TimeoutOption = Annotated[
    float, typer.Option("--timeout", min=0, help="Seconds to wait for the agent's end.")
]


@app.callback(invoke_without_command=True)
def _agent(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(OK)


@app.command("run")
def run(
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Become the agent, and end with Ctrl-C.")
    ] = False,
    as_json: JsonFlag = False,
) -> int:
    """Start the agent unless one runs. The first client does the same by itself."""
    settings = Settings.from_env()
    where = spawn.agent_paths(settings)
    process.make_runtime_dir(where)
    if foreground:
        options = ["--runtime-dir", str(where.directory), "--foreground"]
        options += ["--settings", msgspec.json.encode(settings).decode()]
        os.execv(sys.executable, [sys.executable, "-m", "groupio.agent", *options])
    before = process.holder_pid(where) if process.is_alive(where) else None
    spawn.ensure_agent(settings, settings.connect_timeout_s)
    pid = process.holder_pid(where)
    if as_json:
        agent = {"pid": pid, "socket": str(where.socket), "log": str(where.log)}
        emit_json("agent-run", {"started": pid != before, "agent": agent})
    else:
        verb = "started" if pid != before else "already runs"
        console().print(f"agent {verb}: process {pid}, log {text(where.log)}")
    return OK


@app.command("drain")
def drain(timeout_s: TimeoutOption = 600.0, as_json: JsonFlag = False) -> int:
    """Take no new saves, finish those in flight, then end.

    Waits for the agent's end; exit code 1 when it takes longer than the timeout.
    """
    return _end("drain", timeout_s, as_json)


@app.command("stop")
def stop(timeout_s: TimeoutOption = 60.0, as_json: JsonFlag = False) -> int:
    """Like drain, but give up saves that are not STAGED yet. Nothing that is STAGED is lost.

    Waits for the agent's end; exit code 1 when it takes longer than the timeout.
    """
    return _end("stop", timeout_s, as_json)


def _end(what: str, timeout_s: float, as_json: bool) -> int:
    ran = asking.ask(what) is not None
    gone = asking.wait_until_gone(timeout_s)
    if as_json:
        emit_json(f"agent-{what}", {"ran": ran, "ended": gone})
    elif not gone:
        console().print(
            f"the agent still works after {timeout_s:g} s and ends when it is done; see "
            "`groupio status`"
        )
    else:
        console().print("the agent has ended" if ran else "no agent runs")
    return OK if gone else ANSWER_IS_NO
