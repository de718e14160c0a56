"""Metrics are what was counted, as a Prometheus parser reads it."""

from __future__ import annotations

import threading

import pytest
from prometheus_client.parser import text_string_to_metric_families

from groupio.agent.metrics import KINDS, Metrics


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.render())
        for sample in family.samples
    }


def test_counters_gauges_and_histograms_are_rendered() -> None:
    metrics = Metrics()
    metrics.add("groupio_groups", 1, "committed")
    metrics.add("groupio_groups", 2, "committed")
    metrics.add("groupio_written_bytes", 4096)
    metrics.set("groupio_clients", 4)
    metrics.set("groupio_clients", 3)
    for seconds in (0.005, 0.2, 5000.0):
        metrics.observe("groupio_level_seconds", seconds, "durable")
    found = samples(metrics)
    assert found["groupio_groups_total", (("outcome", "committed"),)] == 3
    assert found["groupio_written_bytes_total", ()] == 4096
    assert found["groupio_clients", ()] == 3
    name, level = "groupio_level_seconds", ("level", "durable")
    assert found[name + "_bucket", (("le", "0.01"), level)] == 1
    assert found[name + "_bucket", (("le", "0.3"), level)] == 2
    assert found[name + "_bucket", (("le", "1000.0"), level)] == 2
    assert found[name + "_bucket", (("le", "+Inf"), level)] == 3
    assert found[name + "_count", (level,)] == 3
    assert found[name + "_sum", (level,)] == pytest.approx(5000.205)


def test_everything_is_described_before_it_is_counted() -> None:
    text = Metrics().render()
    for name, kind in KINDS.items():
        assert f"# HELP {name}" in text
        assert kind.help in text


def test_a_metric_that_does_not_exist_in_this_form_is_refused() -> None:
    metrics = Metrics()
    with pytest.raises(KeyError):
        metrics.add("groupio_misspelt", 1)
    with pytest.raises(ValueError, match="is a gauge"):
        metrics.add("groupio_clients", 1)
    with pytest.raises(ValueError, match="labels"):
        metrics.add("groupio_groups", 1)


def test_threads_lose_no_counts() -> None:
    metrics = Metrics()

    def count() -> None:
        for _ in range(2000):
            metrics.add("groupio_hashed_chunks", 1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metrics.value("groupio_hashed_chunks") == 8000
