"""``groupio ls`` and ``groupio show``: which epochs a store has, and what is in one."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer
from rich.table import Table

from groupio.backend.base import EPOCHS
from groupio.backend.posix import PosixBackend
from groupio.cli.catalog import Catalog, open_manifest, open_store, read_catalog, with_parts
from groupio.cli.output import (
    ANSWER_IS_NO,
    OK,
    JsonFlag,
    LazyArray,
    StoreArgument,
    console,
    emit_json,
    iso,
    moment,
    print_rows,
    size,
    table,
    text,
)
from groupio.cli.status import ranks as rank_list
from groupio.client.store_parts import part_store
from groupio.door.publish import has_door
from groupio.errors import StorageError
from groupio.model import DecisionKey, EpochHeader, ItemSpec, Manifest

ITEMS_SHOWN = 40
"""Rows of items that ``show`` prints unless asked for all."""

EpochArgument = Annotated[
    str, typer.Argument(metavar="EPOCH", help="The number of a committed epoch, or 'latest'.")
]

PartOption = Annotated[
    str | None, typer.Option("--part", metavar="PART", help="That part of the step.")
]

LineageOption = Annotated[
    int | None, typer.Option("--lineage", min=1, help="Look in this lineage (default: the newest).")
]


def list_epochs(store: StoreArgument, as_json: JsonFlag = False) -> int:
    """List the committed epochs of a store.

    Exit code 1 when the record of an epoch is damaged; the others are listed all the same.
    """
    body: dict[str, Any] = {}
    listed: list[tuple[str | None, Catalog]] = []
    for part, where in with_parts(store):
        with open_store(where) as backend:
            catalog = read_catalog(backend)
            path = backend.path
            with_door = _with_door(backend, catalog) if as_json else set()
        listed.append((part, catalog))
        visible = set(catalog.visible.values())
        one = _store_json(catalog, path)
        body.setdefault("store", one["store"])
        body.setdefault("latest", one["latest"])
        body.setdefault("epochs", []).extend(
            epoch_json(header, abandoned=key not in visible, door=key in with_door) | {"part": part}
            for key, header in sorted(catalog.committed.items())
        )
        body.setdefault("damaged", []).extend(
            {"path": bad.path, "detail": bad.error.message} for bad in catalog.unreadable
        )
    if as_json:
        emit_json("ls", body)
    else:
        _print_epochs(listed)
    return ANSWER_IS_NO if any(catalog.unreadable for _, catalog in listed) else OK


def _with_door(backend: PosixBackend, catalog: Catalog) -> set[DecisionKey]:
    with backend.doors() as doors:
        try:
            names = set(doors.list())
        except StorageError:
            return set()  # `verify` says what is in the place of the doors
        return {
            key
            for key, header in catalog.committed.items()
            if str(key.epoch) in names and has_door(doors, header)
        }


def _store_json(catalog: Catalog, path: str) -> dict[str, Any]:
    record = catalog.record
    return {
        "store": {
            "path": path,
            "store_id": record.store_id,
            "job": record.job,
            "created_at": iso(record.created_at),
        },
        "latest": max(catalog.visible, default=None),
    }


def epoch_json(header: EpochHeader, *, abandoned: bool, door: bool) -> dict[str, Any]:
    """The JSON of one committed epoch, as docs/cli.md describes it."""
    return {
        "epoch": header.epoch,
        "lineage": header.lineage,
        "attempt": header.attempt,
        "incarnation": header.incarnation,
        "abandoned": abandoned,
        "members": header.world_size,
        "bytes_logical": header.bytes_logical,
        "bytes_unique": header.bytes_unique,
        "bytes_stored": header.bytes_stored,
        "committed_at": iso(header.created_at),
        "content_id": header.content_id.hex(),
        "write_id": header.write_id,
        "door": "dcp" if door else None,
        "metadata": header.metadata,
    }


def _print_epochs(listed: list[tuple[str | None, Catalog]]) -> None:
    out = console()
    several = any(len({key.lineage for key in catalog.committed}) > 1 for _, catalog in listed)
    numbers = ["epoch", *(["lineage"] if several else []), "members", "logical", "unique", "stored"]
    has_parts = any(part is not None for part, _ in listed)
    columns = [*numbers, "committed", *(["part"] if has_parts else []), ""]
    rows = []
    for part, catalog in listed:
        visible = set(catalog.visible.values())
        for key, header in sorted(catalog.committed.items()):
            cells = [str(header.epoch), str(header.world_size), size(header.bytes_logical)]
            if several:
                cells.insert(1, str(header.lineage))
            cells += [size(header.bytes_unique), size(header.bytes_stored)]
            cells += [moment(header.created_at), *([part or ""] if has_parts else [])]
            note = "" if key in visible else "abandoned by a rewind"
            rows.append([*cells, f"{note} {header.metadata or ''}".strip()])
    if rows:
        print_rows(columns, rows)
    else:
        out.print("no epoch is committed yet")
    for _, catalog in listed:
        for bad in catalog.unreadable:
            out.print(f"[red]damaged[/] {text(bad.error.message)}")


def show_epoch(
    store: StoreArgument,
    epoch: EpochArgument,
    member: Annotated[
        int | None, typer.Option("--member", min=0, help="Only this rank's items.")
    ] = None,
    lineage: LineageOption = None,
    part: PartOption = None,
    everything: Annotated[bool, typer.Option("--all", help="Print every item.")] = False,
    as_json: JsonFlag = False,
) -> int:
    """Show one epoch: who saved it, its items and its segments."""
    with open_store(part_store(store, part)) as backend:
        catalog = read_catalog(backend)
        key = catalog.find(epoch, lineage)
        with backend.reader(EPOCHS, str(key)) as reader:
            opened = open_manifest(reader)
            if member is not None:
                opened.member(member)
            manifest = opened.manifest()
        path = backend.path
        with backend.doors() as doors:
            door = has_door(doors, manifest.header)
    abandoned = key not in catalog.visible.values()
    tables = item_tables(manifest, member)
    if as_json:
        body = _store_json(catalog, path)
        del body["latest"]
        body["epoch"] = epoch_json(manifest.header, abandoned=abandoned, door=door)
        body["epoch"]["part"] = part
        body["segments"] = _segments_json(manifest)
        body["members"] = [
            {"rank": m.rank, "items": len(m.items), "bytes_logical": m.bytes_logical}
            for m in manifest.members
            if member in (None, m.rank)
        ]
        body["tables"] = [
            {"ranks": ranks, "items": LazyArray(len(items), partial(map, item_json, items))}
            for ranks, items in tables
        ]
        emit_json("show", body)
        return OK
    _print_epoch(manifest, abandoned, f"{path}/dcp/{key.epoch}" if door else "")
    _print_items(tables, everything)
    return OK


def item_tables(
    manifest: Manifest, member: int | None
) -> list[tuple[list[int], tuple[ItemSpec, ...]]]:
    """The different item tables of an epoch, each with the ranks that saved it."""
    found: dict[bytes, tuple[list[int], tuple[ItemSpec, ...]]] = {}
    for one in manifest.members:
        if member in (None, one.rank):
            found.setdefault(one.items_id, ([], one.items))[0].append(one.rank)
    return list(found.values())


def item_json(item: ItemSpec) -> dict[str, Any]:
    """The JSON of one item, as docs/cli.md describes it."""
    return {
        "name": item.name,
        "kind": str(item.kind),
        "dtype": item.dtype,
        "shape": list(item.shape),
        "global_shape": list(item.global_shape),
        "offsets": list(item.offsets),
        "nbytes": item.nbytes,
        "replicated": item.replicated,
        "origin": item.origin,
        "alias": item.alias,
    }


def _segments_json(manifest: Manifest) -> list[dict[str, Any]]:
    return [
        {"name": s.name, "bytes": s.bytes, "own": s.own, "age": s.age} for s in manifest.segments
    ]


def _print_epoch(manifest: Manifest, abandoned: bool, door: str) -> None:
    header, out = manifest.header, console()
    facts = table("", "")
    facts.show_header = False
    line = f"{header.lineage}{', abandoned by a rewind' if abandoned else ''}"
    facts.add_row("epoch", str(header.epoch))
    facts.add_row("committed", moment(header.created_at))
    facts.add_row("job", text(header.job))
    facts.add_row("lineage", line)
    facts.add_row("incarnation", f"{header.incarnation}, attempt {header.attempt}")
    facts.add_row("members", str(header.world_size))
    facts.add_row("logical", size(header.bytes_logical))
    facts.add_row("unique", f"{size(header.bytes_unique)} in {len(manifest.chunks)} chunks")
    facts.add_row("stored", f"{size(header.bytes_stored)} in segments of its own")
    facts.add_row("door", text(door) if door else "none; `groupio export --dcp` makes one")
    if header.metadata:
        facts.add_row("metadata", text(header.metadata))
    out.print(facts)
    out.print()
    rows = table("segment", "size", "", right=("size",))
    for segment in manifest.segments:
        origin = "written by this epoch" if segment.own else f"of an older one, age {segment.age}"
        rows.add_row(segment.name, size(segment.bytes), origin)
    if manifest.segments:
        out.print(rows)


def _print_items(tables: list[tuple[list[int], tuple[ItemSpec, ...]]], everything: bool) -> None:
    out = console()
    for ranks, items in tables:
        out.print()
        rows: Table = table("item", "kind", "dtype", "shape", "of", "size", right=("size",))
        shown = items if everything else items[:ITEMS_SHOWN]
        for item in shown:
            whole = "" if item.global_shape == item.shape else _shape(item.global_shape)
            kind = f"{item.kind}{' (shares bytes)' if item.alias >= 0 else ''}"
            shape = _shape(item.shape) if item.dtype else ""
            rows.add_row(text(item.name), kind, item.dtype, shape, whole, size(item.nbytes))
        out.print(f"rank {rank_list(ranks)}: {len(items)} items")
        out.print(rows)
        if len(shown) < len(items):
            out.print(f"... and {len(items) - len(shown)} more (--all)")


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) if shape else "scalar"
