"""``groupio bench``: measures groupio beside its peers and the limits of the machine.

The benchmark itself is :mod:`groupio.bench`; here are its options and what it shows.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from groupio.cli.output import (
    ANSWER_IS_NO,
    OK,
    CommandError,
    console,
    error_console,
    say_error,
    size,
    table,
    text,
)

if TYPE_CHECKING:
    from groupio.bench.options import Options
    from groupio.bench.ratios import Gate, Summary

app = typer.Typer(
    help="Measure groupio beside its peers and the limits of the machine (most need torch)."
)

Ranks = Annotated[int, typer.Option("--ranks", help="Processes that save.")]
Megabytes = Annotated[
    int, typer.Option("--mb-per-rank", help="MiB that each rank passes (not for shape tiny).")
]
Shape = Annotated[
    str,
    typer.Option("--shape", help="fsdp, ddp, lora or tiny; several with commas, or all."),
]
Epochs = Annotated[int, typer.Option("--epochs", help="Epochs; the first is not in the medians.")]
Peers = Annotated[
    str | None,
    typer.Option(
        "--peers",
        help="torch_save, dcp, dcp_async, orbax, nvrx_local, torchsnapshot, with commas; "
        "none; or, if not given, all that are installed.",
    ),
]
StoreFolder = Annotated[
    Path | None,
    typer.Option(
        "--store",
        metavar="DIR",
        help="A folder on the file system to measure (default: that of temporary files).",
    ),
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the records to this file.")
]
HtmlFile = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write a report to this file.")
]
GateFlag = Annotated[
    bool, typer.Option("--gate", help="Exit with 1 when a ratio misses its target.")
]
Keep = Annotated[bool, typer.Option("--keep", help="Leave the saved files and the ranks' logs.")]
Timeout = Annotated[
    float, typer.Option("--timeout", metavar="S", help="Seconds that one shape may take.")
]
Settle = Annotated[
    float,
    typer.Option("--settle", metavar="S", help="Seconds that the disk rests before each figure."),
]
LoadRanks = Annotated[
    int | None,
    typer.Option("--load-ranks", help="Processes that load (default: as many as saved)."),
]
StepSeconds = Annotated[
    float, typer.Option("--step-s", help="Seconds of computing in one training step.")
]

Members = Annotated[int, typer.Option("--members", help="Client processes.")]
Agents = Annotated[
    int | None,
    typer.Option("--agents", help="Agents, each as of a node (default: members / 8, 2 or more)."),
]
Chunks = Annotated[int, typer.Option("--chunks", help="Chunks that each member saves.")]


IN_MEMORY = ("tmpfs", "ramfs")


@app.callback(invoke_without_command=True)
def _bench_help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(OK)


@app.command("save")
def save(
    ranks: Ranks = 4,
    mb_per_rank: Megabytes = 512,
    shape: Shape = "fsdp",
    epochs: Epochs = 5,
    peers: Peers = None,
    store: StoreFolder = None,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
    gate: GateFlag = False,
    keep: Keep = False,
    timeout: Timeout = 1800.0,
    settle: Settle = 0.5,
) -> int:
    """Save with every system, epoch by epoch in turn, beside memcpy and raw writes."""
    fields = _checked("save", ranks, mb_per_rank, epochs, timeout, settle)
    return _bench(fields, shape, peers, store, json_file, html_file, gate=gate, keep=keep)


@app.command("load")
def load(
    ranks: Ranks = 4,
    load_ranks: LoadRanks = None,
    mb_per_rank: Megabytes = 512,
    shape: Shape = "fsdp",
    epochs: Epochs = 3,
    peers: Peers = None,
    store: StoreFolder = None,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
    gate: GateFlag = False,
    keep: Keep = False,
    timeout: Timeout = 1800.0,
    settle: Settle = 0.5,
) -> int:
    """Save once, then load with every system in turn, cold and warm, beside a raw read.

    --epochs counts the repetitions. Another number of ranks than the one that saved loads every
    tensor whole on every rank.
    """
    fields = _checked("load", ranks, mb_per_rank, epochs, timeout, settle)
    fields["load_ranks"] = _in_range("--load-ranks", load_ranks or ranks, 64)
    return _bench(fields, shape, peers, store, json_file, html_file, gate=gate, keep=keep)


@app.command("step")
def step(
    ranks: Ranks = 1,
    mb_per_rank: Megabytes = 256,
    shape: Shape = "fsdp",
    epochs: Epochs = 3,
    step_s: StepSeconds = 1.0,
    store: StoreFolder = None,
    json_file: JsonFile = None,
    gate: GateFlag = False,
    keep: Keep = False,
    timeout: Timeout = 1800.0,
) -> int:
    """Train and save every step in the background: step time with groupio, dcp_async, neither.

    --epochs counts the rounds; each has four steps of every kind, of which three count.
    """
    fields = _checked("step", ranks, mb_per_rank, epochs, timeout, 0.5)
    fields["step_s"] = step_s
    return _bench(fields, shape, "dcp_async", store, json_file, None, gate=gate, keep=keep)


@app.command("coordination")
def coordination(
    members: Members = 64,
    agents: Agents = None,
    chunks: Chunks = 2000,
    epochs: Epochs = 15,
    store: StoreFolder = None,
    json_file: JsonFile = None,
    timeout: Timeout = 60.0,
) -> int:
    """Measure how long members on several nodes take to agree: real processes, over loopback.

    Two epochs more are saved first, which do not count. --timeout is for each step.
    """
    from groupio.bench import coordination as bench
    from groupio.bench import machine

    members = _in_range("--members", members, 1024, least=2)
    agents = _in_range("--agents", agents or max(2, members // 8), members, least=2)
    parent = _parent(store, json_file)
    conditions = machine.conditions(parent, " ".join(["groupio", *sys.argv[1:]]))
    _say_where(parent, conditions, chosen=store is not None)
    progress = error_console()
    with progress.status(f"starting {agents} agents and {members} members") as status:
        before = signal.signal(signal.SIGTERM, _interrupt)
        try:
            result = bench.measure(
                members=members,
                agents=agents,
                chunks=_in_range("--chunks", chunks, 100_000),
                chunk_bytes=64,
                epochs=_in_range("--epochs", epochs, 1000),
                warm_up=2,
                parent=parent,
                timeout_s=timeout,
                on_epoch=lambda epoch: status.update(f"epoch {epoch} of {epochs + 2}"),
            )
        finally:
            signal.signal(signal.SIGTERM, before)
    if json_file is not None:
        text_of = json.dumps({**result, "conditions": conditions}, indent=1)
        json_file.write_text(text_of + "\n", encoding="utf-8")
    console().print(_coordination_table(result))
    return OK


def _coordination_table(result: dict[str, Any]) -> Table:
    made = table("step", "median", right=("median",))
    rows = {
        "last report begun to last order taken": result["median_ms"],
        **{f"  {name}": value for name, value in result["stages_ms"].items()},
        "last member's call to all may copy": result["gather_ms"],
        "processor time of all agents for the first": result["agents_cpu_ms"],
    }
    for name, value in rows.items():
        made.add_row(name, f"{value:.1f} ms")
    return made


def _parent(store: Path | None, *files: Path | None) -> Path:
    """The folder to measure in, never the current one unasked; CommandError when it is none."""
    for file in files:
        if file is not None and not file.absolute().parent.is_dir():
            raise CommandError(f"there is no folder for {file}; make it first")
    parent = Path(tempfile.gettempdir()) if store is None else store
    if not parent.is_dir():
        raise CommandError(f"{parent} is not a directory; --store names one to measure in")
    return parent.resolve()


def _say_where(parent: Path, conditions: dict[str, Any], *, chosen: bool) -> None:
    kind = conditions["file_system"]
    if kind in IN_MEMORY:
        say_error(
            f"{parent} is {kind}: memory, not a disk, so the figures say nothing of a disk; "
            "--store names a folder on one"
        )
    elif not chosen:
        say_error(f"measuring in {parent} ({kind}); --store names another folder")


def _checked(
    command: str, ranks: int, mb_per_rank: int, epochs: int, timeout: float, settle: float
) -> dict[str, Any]:
    if not (timeout > 0 and settle >= 0):
        raise CommandError("--timeout must be more than 0 and --settle 0 or more, in seconds")
    return {
        "command": command,
        "ranks": _in_range("--ranks", ranks, 64),
        "mb_per_rank": _in_range("--mb-per-rank", mb_per_rank, 1 << 20),
        "epochs": _in_range("--epochs", epochs, 1000),
        "timeout_s": timeout,
        "settle_s": settle,
    }


def _in_range(option: str, value: int, most: int, *, least: int = 1) -> int:
    if not least <= value <= most:
        raise CommandError(f"{option} is {value}; it must be from {least} to {most}")
    return value


def _bench(
    fields: dict[str, Any],
    shape: str,
    peers: str | None,
    store: Path | None,
    json_file: Path | None,
    html_file: Path | None,
    *,
    gate: bool,
    keep: bool,
) -> int:
    from groupio.bench import machine, options, run  # these load numpy and more
    from groupio.bench.records import wrong_systems

    options.require_torch()
    shapes = options.choose_shapes(shape)
    systems, missing = options.choose_systems(peers)
    if fields["command"] == "step":
        systems = ("groupio", "dcp_async")
    parent = _parent(store, json_file, html_file)
    for name in missing:
        module = options.missing_module(name)
        say_error(f"peer not installed: {name} (there is no module {module})")
    conditions = machine.conditions(parent, " ".join(["groupio", *sys.argv[1:]]))
    _say_where(parent, conditions, chosen=store is not None)
    records: list[dict[str, Any]] = []
    for one in shapes:
        chosen = options.Options(shape=one, systems=systems, folder="", **fields)
        outcome = _measure(run, chosen, parent, conditions, keep)
        records += outcome.records
    if json_file is not None:
        json_file.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    _show(fields["command"], shapes, records)
    passed = _show_gates(fields["command"], records, html_file, fail=gate)
    wrong = wrong_systems(records)
    for name in wrong:
        note = next(r["note"] for r in records if r["system"] == name and "WRONG" in r["note"])
        say_error(f"{name}: {note.split(';')[0]}")
    return OK if passed and not wrong else ANSWER_IS_NO


def _measure(
    run: Any, options: Options, store: Path, conditions: dict[str, Any], keep: bool
) -> Any:
    progress = error_console()
    with progress.status(f"{options.shape}: starting {options.ranks} ranks") as status:

        def on_begin(system: str, epoch: int) -> None:
            status.update(f"{options.shape}: epoch {epoch} of {options.epochs}, {text(system)}")

        before = signal.signal(signal.SIGTERM, _interrupt)
        try:
            outcome = run.measure(options, store, conditions, keep=keep, on_begin=on_begin)
        finally:
            signal.signal(signal.SIGTERM, before)
    if outcome.kept:
        progress.print(f"kept: {outcome.kept}", markup=False)
    return outcome


def _interrupt(number: int, frame: object) -> None:
    """SIGTERM ends the run like Ctrl-C does: ranks and directories are cleaned up."""
    raise KeyboardInterrupt


def _show(command: str, shapes: tuple[str, ...], records: list[dict[str, Any]]) -> None:
    from groupio.bench.ratios import Summary

    out = console()
    for shape in shapes:
        colds = (True, False) if command == "load" else (None,)
        for cold in colds:
            word = {True: ", cold", False: ", warm", None: ""}[cold]
            out.print(f"\n[bold]{shape}{word}[/bold], medians of the epochs after the first")
            out.print(_TABLES[command](Summary(shape, records, cold=cold)))


def _save_table(summary: Summary) -> Table:
    columns = ("stall", "staged", "durable", "stored", "/memcpy", "/raw write", "/unique")
    made = table("system", *columns, right=columns)
    for name, row in summary.medians.items():
        made.add_row(
            name,
            *(_seconds(row[key]) for key in ("stall_s", "staged_s", "durable_s")),
            size(row["bytes_stored"]),
            _ratio(summary.ratio(name, "stall_s", "", "limit_stall_s")),
            _ratio(summary.ratio(name, "durable_s", "", "limit_durable_s")),
            _ratio(summary.ratio(name, "bytes_stored", "", "bytes_unique")),
        )
    limit = summary.medians["groupio"]
    made.add_row(
        "limit",
        _seconds(limit["limit_stall_s"]),
        "-",
        _seconds(limit["limit_durable_s"]),
        size(limit["bytes_unique"]),
    )
    return made


def _load_table(summary: Summary) -> Table:
    columns = ("load", "read", "load/limit", "load/dcp", "read/unique")
    made = table("system", *columns, right=columns)
    for name, row in summary.medians.items():
        made.add_row(
            name,
            _seconds(row["load_s"]),
            size(row["bytes_read"]),
            _ratio(summary.ratio(name, "load_s", "", "limit_load_s")),
            _ratio(summary.ratio(name, "load_s", "dcp")),
            _ratio(summary.ratio(name, "bytes_read", "", "bytes_unique")),
        )
    limit = summary.medians.get("groupio", {})
    made.add_row("limit", _seconds(limit.get("limit_load_s")), size(limit.get("bytes_unique")))
    return made


def _step_table(summary: Summary) -> Table:
    made = table("saving with", "step", "against none", right=("step", "against none"))
    for name, row in summary.medians.items():
        made.add_row(name, _seconds(row["step_s"]), _ratio(summary.ratio(name, "step_s", "none")))
    return made


_TABLES = {"save": _save_table, "load": _load_table, "step": _step_table}


def _show_gates(
    command: str, records: list[dict[str, Any]], html_file: Path | None, *, fail: bool
) -> bool:
    """Print each ratio beside its target; False when one misses it and that is to ``fail``."""
    from groupio.bench.ratios import gates

    found = gates(records, command)
    if html_file is not None:
        from groupio.bench.report import page

        html_file.write_text(page(records, command, found), encoding="utf-8")
    made = table("shape", "ratio", "value", "target", "", right=("value", "target"))
    for one in found:
        made.add_row(one.shape, text(one.what), _value(one), f"{one.target:.3f}", _verdict(one))
    console().print()
    console().print(made)
    missed = [one for one in found if not one.passed and not one.why]
    if fail and missed:
        words = ", ".join(f"{m.shape}: {m.what} {_value(m)}, not {m.target:.3f}" for m in missed)
        say_error(f"{len(missed)} ratios miss: {words}")
    return not (fail and missed)


def _value(gate: Gate) -> str:
    return "-" if gate.value is None else f"{gate.value:.3f}"


def _verdict(gate: Gate) -> str:
    if gate.value is None:
        return gate.why or "not measured"
    return "reached" if gate.passed else "missed"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
