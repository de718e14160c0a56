"""Medians of a run, and the ratios that groupio is held to."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from groupio.bench.options import SYSTEMS, TINY_TENSORS
from groupio.bench.records import Record

MEDIANS = (
    *("stall_s", "staged_s", "remote_s", "durable_s", "door_s", "limit_stall_s"),
    *("limit_stall_tensors_s", "limit_hash_s"),
    *("limit_durable_s", "bytes_logical", "bytes_unique", "bytes_stored", "bytes_hottest_rank"),
    *("load_s", "limit_load_s", "bytes_read", "step_s"),
)


class Gate(NamedTuple):
    """One ratio and what it has to reach; ``value`` is None when the run has no such figure."""

    shape: str
    what: str
    value: float | None
    target: float
    why: str = ""

    @property
    def passed(self) -> bool:
        """Whether the ratio is reached; one without a figure is not."""
        return self.value is not None and self.value <= self.target


class Summary:
    """Medians by system of the records of one shape (of the epochs after the first)."""

    def __init__(self, shape: str, records: Sequence[Record], *, cold: bool | None = None) -> None:
        self.shape = shape
        own = [r for r in records if r["shape"] == shape and r.get("cold") == cold]
        self.first = {r["system"]: r for r in reversed(own)}
        """The first record of each system."""
        later = {r["epoch"] for r in own} - {min((r["epoch"] for r in own), default=0)}
        self.counted = [r for r in own if r["epoch"] in later] if later else own
        names = [name for name in (*SYSTEMS, "none") if name in self.first]
        self.medians = {name: self._medians(name) for name in names}

    def _medians(self, name: str) -> dict[str, float | None]:
        rows = [r for r in self.counted if r["system"] == name] or [self.first[name]]
        return {key: _median(row.get(key) for row in rows) for key in MEDIANS}

    def ratio(self, system: str, key: str, to: str, limit: str | None = None) -> float | None:
        """``key`` of ``system`` over ``limit`` of the same records, or over ``key`` of ``to``.

        The former is the median of the records' own ratios, because a machine drifts.
        """
        if limit is not None:
            rows = [r for r in self.counted if r["system"] == system]
            return _median(divided(r.get(key), r.get(limit)) for r in rows)
        mine, other = self.medians.get(system, {}), self.medians.get(to, {})
        return divided(mine.get(key), other.get(key))

    def ratio_of_first(self, key: str, system: str, to: str) -> float | None:
        """The same of the first epochs, of two systems."""
        mine, other = self.first.get(system, {}), self.first.get(to, {})
        return divided(mine.get(key), other.get(key))


def gates(records: Sequence[Record], command: str) -> list[Gate]:
    """The ratios that docs/benchmark.md promises, for the shapes that were measured."""
    shapes = list(dict.fromkeys(r["shape"] for r in records))
    found: list[Gate] = []
    for shape in shapes:
        if command == "save":
            found += _SAVE_GATES[shape](Summary(shape, records))
        elif command == "load":
            for cold in (True, False):
                found += _load_gates(Summary(shape, records, cold=cold), cold)
        else:
            summary = Summary(shape, records)
            ratio = summary.ratio("groupio", "step_s", "none")
            found.append(Gate(shape, "step that saves / step that does not", ratio, 1.05))
    return found


def _fsdp(s: Summary) -> list[Gate]:
    return [
        Gate(s.shape, "stall / limit", s.ratio("groupio", "stall_s", "", "limit_stall_s"), 1.3),
        Gate(s.shape, "stall / dcp_async", s.ratio("groupio", "stall_s", "dcp_async"), 0.6),
        Gate(
            s.shape,
            "first stall / dcp_async's first",
            s.ratio_of_first("stall_s", "groupio", "dcp_async"),
            1 / 5,
        ),
        Gate(
            s.shape, "durable / limit", s.ratio("groupio", "durable_s", "", "limit_durable_s"), 1.25
        ),
        Gate(s.shape, "durable / dcp", s.ratio("groupio", "durable_s", "dcp"), 1 / 1.5),
    ]


def _ddp(s: Summary) -> list[Gate]:
    rows = [r for r in s.counted if r["system"] == "groupio"]
    hottest = _median(
        divided(r["bytes_hottest_rank"], (r["bytes_stored"] or 0) / r["ranks"]) for r in rows
    )
    return [
        Gate(s.shape, "stored / one copy", _stored(s, "groupio"), 1.01),
        Gate(
            s.shape,
            "hottest rank / mean bytes",
            hottest,
            1.05,
            "the node's one agent writes for all its ranks" if hottest is None else "",
        ),
    ]


def _lora(s: Summary) -> list[Gate]:
    rows = [r for r in s.counted if r["system"] == "groupio"]
    floor = _median(
        divided(r["durable_s"], _sum(r["limit_stall_s"], r["limit_hash_s"])) for r in rows
    )
    return [
        Gate(s.shape, "stored / changed bytes", _stored(s, "groupio"), 1.05),
        Gate(s.shape, "durable / dcp", s.ratio("groupio", "durable_s", "dcp"), 1 / 4),
        Gate(s.shape, "durable / (copy + hash)", floor, 1.3),
    ]


def _tiny(s: Summary) -> list[Gate]:
    def over(system: str, allowed: float) -> float | None:
        return divided(s.medians.get(system, {}).get("bytes_stored"), allowed)

    payload = s.medians["groupio"]["bytes_unique"] or 0.0
    return [
        Gate(
            s.shape,
            "stored / (payload + 1 KB per tensor)",
            over("groupio", payload + 1000 * TINY_TENSORS),
            1.0,
        ),
        Gate(
            s.shape,
            "no door: stored / (2x payload + 1 MB)",
            over("groupio_nodoor", 2 * payload + 1_000_000),
            1.0,
        ),
        Gate(s.shape, "durable / dcp", s.ratio("groupio", "durable_s", "dcp"), 1 / 10),
    ]


_SAVE_GATES = {"fsdp": _fsdp, "ddp": _ddp, "lora": _lora, "tiny": _tiny}


def _load_gates(s: Summary, cold: bool) -> list[Gate]:
    word = "cold" if cold else "warm"
    return [
        Gate(
            s.shape,
            f"{word}: bytes read / unique",
            s.ratio("groupio", "bytes_read", "", "bytes_unique"),
            1.001,
        ),
        Gate(s.shape, f"{word}: load / dcp", s.ratio("groupio", "load_s", "dcp"), 1 / 2),
        Gate(
            s.shape,
            f"{word}: load / (raw read + copy)",
            s.ratio("groupio", "load_s", "", "limit_load_s"),
            1.3,
        ),
    ]


def _stored(s: Summary, system: str) -> float | None:
    return s.ratio(system, "bytes_stored", "", "bytes_unique")


def divided(one: float | None, other: float | None) -> float | None:
    """``one / other``; None where either is missing or the latter is zero."""
    return None if one is None or not other else one / other


def _sum(*parts: float | None) -> float | None:
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
