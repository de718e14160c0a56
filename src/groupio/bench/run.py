"""One benchmark from options to records: its directory, its ranks, and cleaning up."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from groupio.bench.launch import run_ranks
from groupio.bench.machine import room
from groupio.bench.options import Options, check_room
from groupio.bench.records import Record, load_records, save_records, step_records

OnBegin = Callable[[str, int], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The records of one run, and where its directory stayed ("" when it was removed)."""

    records: list[Record]
    kept: str = ""


def measure(
    options: Options, parent: Path, conditions: dict[str, Any], *, keep: bool, on_begin: OnBegin
) -> Outcome:
    """Run the benchmark in a new directory below ``parent``, which is on the measured file system.

    The directory is removed at the end, also after an error, unless ``keep``. Raises InvalidInput
    when there is too little room, and what :func:`groupio.bench.launch.run_ranks` raises.
    """
    check_room(options, *room(parent))
    folder = Path(tempfile.mkdtemp(prefix=f"groupio-bench-{options.shape}-", dir=parent))
    runtime = Path(tempfile.mkdtemp(prefix="groupio-bench-"))
    try:
        records = _run(
            msgspec.structs.replace(options, folder=str(folder)), conditions, runtime, on_begin
        )
    finally:
        shutil.rmtree(runtime, ignore_errors=True)
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    return Outcome(records, str(folder) if keep else "")


def _run(
    options: Options, conditions: dict[str, Any], runtime: Path, on_begin: OnBegin
) -> list[Record]:
    if options.command == "save":
        return save_records(options, run_ranks(options, "save", runtime, on_begin), conditions)
    if options.command == "step":
        return step_records(options, run_ranks(options, "step", runtime, on_begin), conditions)
    run_ranks(options, "save_once", runtime, on_begin)
    return load_records(options, run_ranks(options, "load", runtime, on_begin), conditions)
