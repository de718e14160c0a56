"""``groupio export``: one epoch as plain files and safetensors, or through a door for torch."""

from __future__ import annotations

import json
import mmap
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from blake3 import blake3

from groupio.cli.catalog import read_catalog
from groupio.cli.output import (
    OK,
    CommandError,
    JsonFlag,
    StoreArgument,
    console,
    emit_json,
    error_console,
    size,
    text,
)
from groupio.cli.plainjson import to_json
from groupio.cli.show import LineageOption, PartOption, epoch_json, item_json
from groupio.client.chunk_reader import default_threads
from groupio.client.store_parts import part_store
from groupio.client.store_reader import StoreReader
from groupio.door.publish import has_door, make_door
from groupio.errors import StorageFull
from groupio.format.dtypes import dtype_from_name
from groupio.format.manifest import ManifestReader
from groupio.model import ItemKind, ItemSpec
from groupio.settings import Settings

INDEX = "index.json"
TENSORS = "tensors.safetensors"

_SAFETENSORS = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
}
"""Names of dtypes in the model, and in safetensors. Other tensors become .bin files."""

_RESERVED = "__metadata__"


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written: files and bytes, the index not counted."""

    files: int
    bytes: int


@dataclass(slots=True)
class _Member:
    """The files of one member while they are filled; ``views`` are the items' places in them."""

    folder: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    views: dict[str, memoryview] = field(default_factory=dict)
    files: int = 0
    bytes: int = 0


def export(
    store: StoreArgument,
    epoch: Annotated[
        str | None,
        typer.Argument(metavar="[EPOCH]", help="A committed epoch; default 'latest' with --dcp."),
    ] = None,
    to: Annotated[
        Path | None, typer.Option("--to", metavar="DIR", help="A new or empty directory.")
    ] = None,
    dcp: Annotated[
        bool,
        typer.Option("--dcp", help="Make STORE/dcp/EPOCH, which torch reads without groupio."),
    ] = False,
    epoch_option: Annotated[
        str | None, typer.Option("--epoch", metavar="N", help="The same as EPOCH.")
    ] = None,
    member: Annotated[
        int | None, typer.Option("--member", min=0, help="Only this rank's items.")
    ] = None,
    lineage: LineageOption = None,
    part: PartOption = None,
    deadline_s: Annotated[
        float, typer.Option("--deadline", min=1, help="Seconds that one member may take.")
    ] = 3600.0,
    as_json: JsonFlag = False,
) -> int:
    """Write an epoch as safetensors and plain files (--to), or make its door for torch (--dcp).

    Every chunk that is written is verified. DIR/index.json, written last, names every item; item
    names never become file names.
    """
    if None not in (epoch, epoch_option):
        raise CommandError("give the epoch once: as EPOCH or with --epoch")
    wanted, store = epoch or epoch_option, os.fspath(part_store(store, part))
    if dcp:
        if to is not None or member is not None:
            raise CommandError(
                "--dcp makes a door inside of the store: leave out --to and --member"
            )
        return _export_door(store, wanted or "latest", lineage, as_json)
    if wanted is None or to is None:
        raise CommandError("give EPOCH and --to DIR, or --dcp")
    return _export_files(store, wanted, to, member, lineage, deadline_s, as_json)


def _export_door(store: str, epoch: str, lineage: int | None, as_json: bool) -> int:
    with StoreReader.open(store, file_mode=Settings.from_env().file_mode) as reader:
        catalog = read_catalog(reader.backend)
        key = catalog.find(epoch, lineage)
        shown = catalog.visible.get(key.epoch, key)
        if shown != key:
            raise CommandError(
                f"the door of epoch {key.epoch} belongs to lineage {shown.lineage}, the newest one "
                "that has this epoch; export the other with --to"
            )
        manifest = reader.manifest(key)
        assert manifest is not None
        with error_console().status("making the door"):
            door = make_door(reader, manifest, threads=default_threads())
    if as_json:
        body = {"door": door.path, "epoch": door.epoch, "files": len(door.files)}
        body |= {"bytes": door.bytes, "bytes_copied": door.copied, "tensors": door.tensors}
        body |= {"values": door.values, "pieces": door.pieces, "unseen": list(door.unseen)}
        emit_json("export", body)
        return OK
    console().print(
        f"epoch {door.epoch}: {door.tensors} tensors in {door.pieces} pieces and {door.values} "
        f"values, {size(door.bytes)} in {text(door.path)}"
    )
    for name in door.unseen:
        error_console().print(f"not in it, torch knows no such dtype in files: {text(name)}")
    return OK


def _export_files(
    store: str,
    epoch: str,
    to: Path,
    member: int | None,
    lineage: int | None,
    deadline_s: float,
    as_json: bool,
) -> int:
    with StoreReader.open(store) as reader:
        catalog = read_catalog(reader.backend)
        key = catalog.find(epoch, lineage)
        manifest = reader.manifest(key)
        assert manifest is not None
        ranks = manifest.ranks if member is None else (manifest.member(member).rank,)
        _make_empty(to)
        with reader.backend.doors() as doors:
            door = has_door(doors, manifest.header)
        index: dict[str, Any] = {
            "schema": "groupio/export-index/1",
            "epoch": epoch_json(
                manifest.header, abandoned=key not in catalog.visible.values(), door=door
            ),
            "store_id": manifest.header.store_id,
            "job": manifest.header.job,
            "members": [],
        }
        total = Exported(0, 0)
        with error_console().status("exporting"):
            for rank in ranks:
                done = _export_member(reader, manifest, rank, to, deadline_s)
                index["members"].append(
                    {"rank": rank, "folder": done.folder.name, "items": done.rows}
                )
                total = Exported(total.files + done.files, total.bytes + done.bytes)
    _create(to / INDEX, json.dumps(index, indent=1).encode())
    if as_json:
        body = {"to": str(to), "epoch": key.epoch, "members": list(ranks)}
        emit_json("export", body | {"files": total.files, "bytes": total.bytes})
    else:
        console().print(
            f"epoch {key.epoch}: {len(ranks)} members, {total.files} files, {size(total.bytes)} in "
            f"{text(to)}; {INDEX} names every item"
        )
    return OK


def _make_empty(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        occupied = any(folder.iterdir())
    except (FileExistsError, NotADirectoryError):
        raise CommandError(f"{folder} is not a directory; give a new or an empty one") from None
    if occupied:
        raise CommandError(f"{folder} is not empty; give a new or an empty directory")


def _export_member(
    reader: StoreReader, manifest: ManifestReader, rank: int, to: Path, deadline_s: float
) -> _Member:
    items = manifest.member(rank).items
    member = _Member(to / f"rank-{rank:05d}")
    member.folder.mkdir()
    tensors = [item for item in items if _fits_safetensors(item)]
    places = _safetensors_file(member, tensors, manifest) if tensors else {}
    for number, item in enumerate(items):
        row = item_json(item)
        if item.name in places:
            row["file"] = TENSORS
        elif item.kind is ItemKind.PLAIN:
            row["file"] = f"item-{number:06d}.json"
        else:
            row["file"] = f"item-{number:06d}.bin"
            member.views[item.name] = _mapped(member, member.folder / row["file"], item.nbytes)
        member.rows.append(row)
    values = reader.read_items(
        manifest, rank, into=member.views, deadline=time.monotonic() + deadline_s
    )
    for row in member.rows:
        if row["kind"] == ItemKind.PLAIN:
            data = json.dumps(to_json(values[row["name"]]), ensure_ascii=True).encode()
            _create(member.folder / row["file"], data)
            member.files += 1
            member.bytes += len(data)
        else:
            row["blake3"] = blake3(member.views[row["name"]]).hexdigest()
    return member


def _fits_safetensors(item: ItemSpec) -> bool:
    return item.kind is ItemKind.TENSOR and item.dtype in _SAFETENSORS and item.name != _RESERVED


def _safetensors_file(
    member: _Member, items: list[ItemSpec], manifest: ManifestReader
) -> dict[str, int]:
    """Create the member's safetensors file; its data is filled through ``member.views``."""
    # Wide elements first: every tensor then starts at a multiple of its element size.
    ordered = sorted(items, key=lambda item: -dtype_from_name(item.dtype).itemsize)
    header: dict[str, Any] = {
        _RESERVED: {"format": "pt", "groupio_epoch": str(manifest.header.epoch)}
    }
    places, end = {}, 0
    for item in ordered:
        places[item.name] = end
        header[item.name] = {
            "dtype": _SAFETENSORS[item.dtype],
            "shape": list(item.shape),
            "data_offsets": [end, end + item.nbytes],
        }
        end += item.nbytes
    encoded = json.dumps(header, ensure_ascii=True, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    start = 8 + len(encoded)
    view = _mapped(member, member.folder / TENSORS, start + end)
    view[:start] = len(encoded).to_bytes(8, "little") + encoded
    for item in ordered:
        at = start + places[item.name]
        member.views[item.name] = view[at : at + item.nbytes]
    return places


def _mapped(member: _Member, path: Path, count: int) -> memoryview:
    """A new file of ``count`` bytes as writable memory; its room on the disk is reserved."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        member.files += 1
        member.bytes += count
        if not count:
            return memoryview(bytearray())
        try:
            # Without room, a write to mapped memory would end the process with SIGBUS.
            os.posix_fallocate(fd, 0, count)
        except OSError as error:
            raise StorageFull(
                f"{path} needs {count} bytes: {error.strerror}", path=str(path), needed=count
            ) from error
        return memoryview(mmap.mmap(fd, count))
    finally:
        os.close(fd)


def _create(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
