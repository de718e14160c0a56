"""Counters of the agent, and their Prometheus text.

Counting costs a dictionary update under a lock; prometheus-client is imported when somebody asks.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from prometheus_client import Metric

SECONDS_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Upper bounds of the histograms of durations."""


class Kind(NamedTuple):
    """A metric: its Prometheus type, help text and label names."""

    type: str
    help: str
    labels: tuple[str, ...] = ()


KINDS: dict[str, Kind] = {
    "groupio_groups": Kind("counter", "Groups decided, by outcome.", ("outcome",)),
    "groupio_logical_bytes": Kind("counter", "Bytes that members saved."),
    "groupio_hashed_bytes": Kind("counter", "Bytes hashed."),
    "groupio_hashed_chunks": Kind("counter", "Chunks hashed."),
    "groupio_duplicate_bytes": Kind(
        "counter", "Bytes not written again, by where the first copy is.", ("found_in",)
    ),
    "groupio_written_bytes": Kind("counter", "Bytes written to segments."),
    "groupio_read_bytes": Kind(
        "counter", "Bytes that came for readers through this agent, by source.", ("source",)
    ),
    "groupio_level_seconds": Kind(
        "histogram", "Seconds from a member's call to a level.", ("level",)
    ),
    "groupio_memory_bytes": Kind("gauge", "Arena memory, by state.", ("state",)),
    "groupio_memory_budget_bytes": Kind("gauge", "The memory budget."),
    "groupio_index_bytes": Kind(
        "gauge", "Memory of the index of stored chunks, outside the memory budget."
    ),
    "groupio_clients": Kind("gauge", "Connected clients."),
    "groupio_groups_in_flight": Kind("gauge", "Groups that are not decided yet."),
}
"""Everything that the agent counts; counters get the suffix ``_total`` in the text."""


class Metrics:
    """The values of :data:`KINDS`; any thread may count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[tuple[str, tuple[str, ...]], float] = {}
        self._buckets: dict[tuple[str, tuple[str, ...]], list[int]] = {}

    def add(self, name: str, amount: float, *labels: str) -> None:
        """Raise a counter."""
        key = _key("counter", name, labels)
        with self._lock:
            self._values[key] = self._values.get(key, 0.0) + amount

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge."""
        key = _key("gauge", name, labels)
        with self._lock:
            self._values[key] = value

    def observe(self, name: str, seconds: float, *labels: str) -> None:
        """Count a duration in a histogram."""
        key = _key("histogram", name, labels)
        with self._lock:
            self._values[key] = self._values.get(key, 0.0) + seconds
            counts = self._buckets.setdefault(key, [0] * (len(SECONDS_BUCKETS) + 1))
            counts[bisect_left(SECONDS_BUCKETS, seconds)] += 1

    def value(self, name: str, *labels: str) -> float:
        """The present value of a counter or gauge, the sum of a histogram; 0 when never set."""
        with self._lock:
            return self._values.get((name, labels), 0.0)

    def render(self) -> str:
        """All values as Prometheus text (version 0.0.4)."""
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry).decode()

    def collect(self) -> Iterator[Metric]:
        """The metric families, as prometheus-client asks for them."""
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        with self._lock:
            values = dict(self._values)
            buckets = {key: list(counts) for key, counts in self._buckets.items()}
        for name, kind in KINDS.items():
            rows = sorted((key, value) for key, value in values.items() if key[0] == name)
            if kind.type == "histogram":
                histogram = HistogramMetricFamily(name, kind.help, labels=kind.labels)
                for key, total in rows:
                    histogram.add_metric(key[1], _cumulative(buckets[key]), total)
                yield histogram
                continue
            family = CounterMetricFamily if kind.type == "counter" else GaugeMetricFamily
            plain = family(name, kind.help, labels=kind.labels)
            for key, value in rows:
                plain.add_metric(key[1], value)
            yield plain


def _key(type_: str, name: str, labels: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    kind = KINDS[name]
    if kind.type != type_ or len(kind.labels) != len(labels):
        raise ValueError(f"{name} is a {kind.type} with the labels {kind.labels}, not {labels}")
    return name, labels


def _cumulative(counts: list[int]) -> list[tuple[str, float]]:
    bounds = [*(str(bound) for bound in SECONDS_BUCKETS), "+Inf"]
    total = 0
    rows: list[tuple[str, float]] = []
    for bound, count in zip(bounds, counts, strict=True):
        total += count
        rows.append((bound, float(total)))
    return rows
