"""One record for each system and epoch, made of what the ranks told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from groupio.bench.launch import Told
from groupio.bench.options import SYSTEMS, Options

Record = dict[str, Any]

KEYS = (
    *("system", "shape", "epoch", "stall_s", "staged_s", "remote_s", "durable_s"),
    *("bytes_logical", "bytes_unique", "bytes_stored", "limit_stall_s", "limit_durable_s"),
)
"""The keys that every record has; null where a figure does not exist."""

MORE_KEYS = (
    *("note", "ranks", "mb_per_rank", "conditions"),
    *("door_s", "limit_stall_tensors_s", "limit_hash_s", "limit_durable_how", "bytes_hottest_rank"),
)
LOAD_KEYS = ("load_s", "limit_load_s", "bytes_read", "cold", "load_ranks")
STEP_KEYS = ("step_s",)

_SLOWEST = (
    *("stall_s", "staged_s", "remote_s", "durable_s", "door_s", "limit_stall_s"),
    *("limit_stall_tensors_s", "limit_hash_s"),
    *("load_s", "limit_load_s", "step_s"),
)
"""The maximum over the ranks."""


def save_records(options: Options, told: Told, conditions: Mapping[str, Any]) -> list[Record]:
    """The records of ``bench save``, by epoch, in the order in which the systems ran."""
    wrong = _wrong(told, "verified")
    made = []
    for rows in _by_moment(told, "saved"):
        record = _record(options, rows, conditions)
        record["bytes_logical"] = options.ranks * options.bytes_per_rank
        record["note"] = _note(rows, wrong)
        made.append(record)
    return made


def load_records(options: Options, told: Told, conditions: Mapping[str, Any]) -> list[Record]:
    """The records of ``bench load``; one without figures for a system that cannot load so."""
    wrong = _wrong(told, "loaded")
    made = []
    for rows in _by_moment(told, "loaded"):
        record = _record(options, rows, conditions)
        record |= {key: rows[0].get(key) for key in LOAD_KEYS}
        record |= _slowest(rows, LOAD_KEYS)
        record["bytes_logical"] = options.ranks * options.bytes_per_rank
        record["bytes_read"] = sum(row["bytes_read"] for row in rows)
        record["load_ranks"] = options.load_ranks
        counted = "counted by groupio" if rows[0]["counted"] else "rchar of the processes"
        record["note"] = _note(rows, wrong, f"bytes_read: {counted}")
        made.append(record)
    for name in options.systems:
        if options.load_ranks != options.ranks and not SYSTEMS[name].reshards:
            row = {"system": name, "epoch": 1}
            record = _record(options, [row], conditions) | dict.fromkeys(LOAD_KEYS)
            record["load_ranks"] = options.load_ranks
            record["note"] = (
                f"cannot load with {options.load_ranks} ranks what {options.ranks} ranks saved"
            )
            made.append(record)
    return made


def step_records(options: Options, told: Told, conditions: Mapping[str, Any]) -> list[Record]:
    """The records of ``bench step``: one for each counted step."""
    made = []
    for rows in _by_moment(told, "stepped"):
        record = _record(options, rows, conditions) | _slowest(rows, STEP_KEYS)
        record["bytes_logical"] = options.ranks * options.bytes_per_rank
        made.append(record)
    return made


def wrong_systems(records: Iterable[Record]) -> list[str]:
    """The systems that did not give back what was saved."""
    return sorted({r["system"] for r in records if (r["note"] or "").startswith(_WRONG)})


_WRONG = "WRONG BYTES"


def _by_moment(told: Told, kind: str) -> list[list[dict[str, Any]]]:
    """The rows of all ranks, rank 0 first, for each measurement of ``kind``."""
    mine = [[line for line in lines if line["kind"] == kind] for lines in told]
    return [list(rows) for rows in zip(*mine, strict=True)]


def _record(options: Options, rows: list[dict[str, Any]], conditions: Mapping[str, Any]) -> Record:
    first = rows[0]  # rank 0 tells what is the same for all
    record: Record = {key: first.get(key) for key in KEYS + MORE_KEYS}
    record |= _slowest(rows, _SLOWEST, only=record)
    record |= {
        "shape": options.shape,
        "ranks": options.ranks,
        "mb_per_rank": options.bytes_per_rank / (1 << 20),
        "conditions": dict(conditions),
    }
    return record


def _slowest(
    rows: list[dict[str, Any]], keys: Iterable[str], only: Mapping[str, Any] | None = None
) -> Record:
    """The maximum over the ranks of those ``keys`` that are times; None if a rank has none."""
    found: Record = {}
    for key in keys:
        if key in _SLOWEST and (only is None or key in only):
            values = [row.get(key) for row in rows]
            found[key] = None if None in values else max(values)  # type: ignore[type-var]
    return found


def _wrong(told: Told, kind: str) -> dict[str, str]:
    """What a system got wrong when it was loaded: by its name."""
    found: dict[str, str] = {}
    for rank, lines in enumerate(told):
        for line in lines:
            if line["kind"] == kind and line["wrong"]:
                names = ", ".join(line["wrong"])
                found.setdefault(line["system"], f"{_WRONG} on rank {rank}: {names}")
    return found


def _note(rows: list[dict[str, Any]], wrong: Mapping[str, str], *more: str) -> str:
    name = rows[0]["system"]
    own = dict.fromkeys(row["note"] for row in rows if row.get("note"))
    parts = [wrong.get(name, ""), NOTES.get(name, ""), *more, *own]
    return "; ".join(part for part in parts if part)


NOTES = {
    "groupio": "durable: files, folders and manifest fsynced",
    "groupio_nodoor": "durable: files, folders and manifest fsynced",
    "torch_save": "durable: each file fsynced, its folder not; the set of files is not atomic",
    "dcp": "durable: data files and .metadata fsynced, their folder not",
    "dcp_async": "durable: data files and .metadata fsynced, their folder not",
    "orbax": (
        "one single-process jax per rank, each with a checkpoint of its own; durable: "
        "wait_until_finished, data files fsynced"
    ),
    "nvrx_local": (
        "synchronous, because its asynchronous save needs CUDA, and without replication; durable: "
        "renamed, no fsync"
    ),
    "torchsnapshot": "async_take of each rank's plain tensors; durable: wait() returned, no fsync",
}
"""What "durable" means for a system, and how it was run."""
