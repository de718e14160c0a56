"""``groupio verify``: is everything there that was promised, to the last byte?"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from groupio.cli.catalog import open_store, read_catalog
from groupio.cli.inspection import Damage, Inspection, Inspector
from groupio.cli.output import (
    ANSWER_IS_NO,
    OK,
    JsonFlag,
    StoreArgument,
    console,
    emit_json,
    error_console,
    size,
    text,
)
from groupio.cli.show import LineageOption
from groupio.cli.status import ranks as number_list
from groupio.errors import FormatError, IntegrityError, NotFound, StorageError


def verify(
    store: StoreArgument,
    epoch: Annotated[
        str | None, typer.Argument(metavar="[EPOCH]", help="Only this epoch (default: all).")
    ] = None,
    read_data: Annotated[
        bool, typer.Option("--read-data", help="Read every byte and compare its digest.")
    ] = False,
    lineage: LineageOption = None,
    as_json: JsonFlag = False,
) -> int:
    """Check a store: all records, indexes and doors, and with --read-data every stored byte.

    Exit code 1 when something is damaged; each damage is located by path and chunk. What is
    undecided or garbage is listed, and is no damage.
    """
    with open_store(store) as backend:
        only = None
        if epoch is not None:
            catalog = read_catalog(backend)
            try:
                only = catalog.find(epoch, lineage)
            except (NotFound, FormatError, IntegrityError, StorageError):
                # A damaged record is no committed epoch; say what is wrong with it.
                keys = [bad.key for bad in catalog.unreadable if bad.key is not None]
                only = max((k for k in keys if str(k.epoch) == epoch), default=None)
                if only is None:
                    raise
        inspector = Inspector(backend, only)
        with _progress(read_data) as bars:
            task = bars.add_task("reading", total=inspector.data_bytes) if read_data else None

            def advance(count: int) -> None:
                if task is not None:
                    bars.advance(task, count)

            found = inspector.inspect(read_data=read_data, progress=advance)
            if task is not None:
                bars.update(task, completed=inspector.data_bytes)
        path = backend.path
    if as_json:
        emit_json("verify", _document(found, path, read_data))
    else:
        _print(found, read_data)
    return ANSWER_IS_NO if found.damage else OK


def _progress(wanted: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=error_console(),
        disable=not wanted,
        transient=True,
    )


def _document(found: Inspection, path: str, read_data: bool) -> dict[str, Any]:
    return {
        "store": path,
        "ok": not found.damage,
        "read_data": read_data,
        "epochs": list(found.epochs_checked),
        "segments": found.segments_checked,
        "chunks": found.chunks_checked,
        "doors": found.doors_checked,
        "bytes_read": found.bytes_read,
        "damage": [asdict(damage) for damage in found.damage],
        "leftovers": [asdict(leftover) for leftover in found.leftovers],
    }


def _print(found: Inspection, read_data: bool) -> None:
    out = console()
    for damage in found.damage:
        out.print(f"[red]{damage.kind}[/] {text(damage.path)}")
        out.print(f"    {text(_explain(damage))}")
    for leftover in found.leftovers:
        out.print(f"[yellow]{leftover.state}[/] {text(leftover.path)}")
        out.print(f"    {text(leftover.detail)}")
    extent = f"all {size(found.bytes_read)} of data" if read_data else "structure only"
    doors = f" and {found.doors_checked} doors" if found.doors_checked else ""
    out.print(
        f"{len(found.epochs_checked)} epochs, {found.segments_checked} segments, "
        f"{found.chunks_checked} chunks{doors} checked ({extent})"
    )
    if found.damage:
        out.print(f"[red]{len(found.damage)} damaged[/]")
    else:
        out.print("[green]ok[/]")


def _explain(damage: Damage) -> str:
    parts = [damage.detail]
    if damage.chunk is not None and damage.chunk not in damage.detail:
        parts.append(f"chunk {damage.chunk}")
    if damage.epochs:
        parts.append(f"hurts epoch {number_list(list(damage.epochs))}")
    return "; ".join(parts)
