"""``groupio agent``: start the node's agent, or let it finish and end."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import msgspec
import typer

from groupio.agent import process, spawn
from groupio.cli import asking
from groupio.cli.options import (
    ControllerOption,
    DomainOption,
    FabricOption,
    IdleOption,
    ListenOption,
    MemoryOption,
    NodeOption,
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
    text,
)

app = typer.Typer()

ForegroundFlag = Annotated[
    bool, typer.Option("--foreground", help="Become the agent, and end with Ctrl-C.")
]

TimeoutOption = Annotated[
    float, typer.Option("--timeout", min=0, help="Seconds to wait for the agent's end.")
]


@app.callback(invoke_without_command=True)
def _agent(
    context: typer.Context,
    memory: MemoryOption = None,
    uplink: UplinkOption = None,
    fabric: FabricOption = None,
    domain: DomainOption = None,
    node: NodeOption = None,
    listen: ListenOption = None,
    controller: ControllerOption = None,
    idle: IdleOption = None,
    runtime_dir: RuntimeDirOption = None,
    foreground: ForegroundFlag = False,
    as_json: JsonFlag = False,
) -> int:
    """Start, drain or stop this user's agent on this node; without a command, start it."""
    given = [v for k, v in context.params.items() if v not in (None, False)]
    if context.invoked_subcommand is not None:
        if given:
            raise CommandError(
                f"give the options behind the command: groupio agent {context.invoked_subcommand} "
                "[OPTIONS]"
            )
        return OK
    return run(
        memory,
        uplink,
        fabric,
        domain,
        node,
        listen,
        controller,
        idle,
        runtime_dir,
        foreground,
        as_json,
    )


@app.command("run")
def run(
    memory: MemoryOption = None,
    uplink: UplinkOption = None,
    fabric: FabricOption = None,
    domain: DomainOption = None,
    node: NodeOption = None,
    listen: ListenOption = None,
    controller: ControllerOption = None,
    idle: IdleOption = None,
    runtime_dir: RuntimeDirOption = None,
    foreground: ForegroundFlag = False,
    as_json: JsonFlag = False,
) -> int:
    """Start the agent unless one runs. The first client does the same by itself.

    Options win over GROUPIO_* variables.
    """
    flags = {
        "memory": memory,
        "uplink": uplink,
        "fabric": fabric,
        "domain": domain,
        "node": node,
        "listen": listen,
        "controller": controller,
        "idle": idle,
        "runtime_dir": runtime_dir,
    }
    settings = settings_with(**flags)
    _check_listening(settings.listen)
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
        return OK
    verb = "started" if pid != before else "already runs"
    console().print(f"agent {verb}: process {pid}, log {text(where.log)}")
    if pid == before and any(flags.values()):
        console().print("its settings stay as they are: `groupio agent drain` it first")
    return OK


def _check_listening(listen: str | None) -> None:
    """InvalidInput for a token of no use, or a numeric address that needs one.

    The agent itself looks at both only when its first job of several nodes comes.
    """
    # Imported here: the other commands do without.
    from groupio.controller.keys import Keys
    from groupio.controller.sockets import numeric, require_keys, split_address

    keys = Keys.from_env(os.environ)
    if listen is None:
        return
    has_port = listen.rpartition("]")[2].count(":") == 1
    address = f"tcp://{listen}" if has_port else f"tcp://{listen}:0"
    host, _ = split_address(address)
    if numeric(host):
        require_keys(address, host, keys, "listen on")


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
