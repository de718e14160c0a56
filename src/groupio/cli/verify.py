"""``groupio verify``: is everything there that was promised, to the last byte?"""

from __future__ import annotations

import os
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

from groupio.backend.tree import store_path
from groupio.cli.catalog import Catalog, open_store, read_catalog, with_parts
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
from groupio.cli.show import LineageOption, PartOption
from groupio.cli.status import ranks as number_list
from groupio.client.store_parts import part_store
from groupio.errors import FormatError, IntegrityError, NotFound, StorageError
from groupio.model import DecisionKey


def verify(
    store: StoreArgument,
    epoch: Annotated[
        str | None, typer.Argument(metavar="[EPOCH]", help="Only this epoch (default: all).")
    ] = None,
    read_data: Annotated[
        bool, typer.Option("--read-data", help="Read every byte and compare its digest.")
    ] = False,
    lineage: LineageOption = None,
    part: PartOption = None,
    as_json: JsonFlag = False,
) -> int:
    """Check a store: all records, indexes and doors, and with --read-data every stored byte.

    Its parts are checked, too; with EPOCH those that have it. Exit code 1 when something is
    damaged; each damage is located by path and chunk. What is undecided or garbage is listed, and
    is no damage.
    """
    stores = with_parts(store) if part is None else [(part, os.fspath(part_store(store, part)))]
    found: list[Inspection] = []
    absent: NotFound | None = None
    for _, one in stores:
        with open_store(one) as backend:
            try:
                only = None if epoch is None else _the_epoch(read_catalog(backend), epoch, lineage)
            except NotFound as error:
                absent = absent or error
                continue
            found.append(_inspect(Inspector(backend, only), read_data))
    if not found:
        assert absent is not None
        raise absent
    whole = _together(found)
    if as_json:
        emit_json("verify", _document(whole, store_path(store), read_data))
    else:
        _print(whole, read_data)
    return ANSWER_IS_NO if whole.damage else OK


def _the_epoch(catalog: Catalog, epoch: str, lineage: int | None) -> DecisionKey:
    try:
        return catalog.find(epoch, lineage)
    except (NotFound, FormatError, IntegrityError, StorageError):
        # A damaged record is no committed epoch; say what is wrong with it.
        keys = [bad.key for bad in catalog.unreadable if bad.key is not None]
        only = max((k for k in keys if str(k.epoch) == epoch), default=None)
        if only is None:
            raise
        return only


def _inspect(inspector: Inspector, read_data: bool) -> Inspection:
    with _progress(read_data) as bars:
        task = bars.add_task("reading", total=inspector.data_bytes) if read_data else None

        def advance(count: int) -> None:
            if task is not None:
                bars.advance(task, count)

        found = inspector.inspect(read_data=read_data, progress=advance)
        if task is not None:
            bars.update(task, completed=inspector.data_bytes)
    return found


def _together(found: list[Inspection]) -> Inspection:
    """What was found in all parts; paths say in which."""
    return Inspection(
        store=found[0].store,
        damage=[damage for one in found for damage in one.damage],
        leftovers=[leftover for one in found for leftover in one.leftovers],
        epochs_checked=tuple(sorted({epoch for one in found for epoch in one.epochs_checked})),
        segments_checked=sum(one.segments_checked for one in found),
        chunks_checked=sum(one.chunks_checked for one in found),
        doors_checked=sum(one.doors_checked for one in found),
        bytes_read=sum(one.bytes_read for one in found),
    )


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
