"""``groupio bench save`` with real processes: records, byte figures, report, nothing left."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from bench_help import Bench, run_bench

from groupio.bench.options import PEERS, missing_module
from groupio.bench.records import KEYS

RANKS, MIB = 4, 1 << 20
ALL_BYTES = RANKS * 8 * MIB
SYSTEMS = ("groupio", "groupio_nodoor", "torch_save", "dcp", "dcp_async")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("save")
    return run_bench(
        folder,
        "save",
        *("--ranks", str(RANKS), "--mb-per-rank", "8", "--shape", "lora", "--epochs", "2"),
        *("--peers", "torch_save,dcp,dcp_async", "--settle", "0"),
        *("--html", str(folder / "report.html")),
    )


def test_every_system_has_a_record_of_every_epoch(saved: Bench) -> None:
    assert saved.code == 0, saved.err
    assert {(r["system"], r["epoch"]) for r in saved.records} == {
        (system, epoch) for system in SYSTEMS for epoch in (1, 2)
    }
    for record in saved.records:
        assert set(KEYS) <= record.keys()
        assert record["ranks"] == RANKS
        assert record["conditions"]["packages"]["torch"]


def test_systems_take_turns_at_being_the_first(saved: Bench) -> None:
    first = {r["epoch"]: r["system"] for r in reversed(saved.records)}
    assert first == {1: "groupio", 2: "groupio_nodoor"}


def test_bytes_are_those_of_the_shape(saved: Bench) -> None:
    changed = ALL_BYTES // 50
    for record in saved.records:
        assert record["bytes_logical"] == ALL_BYTES
        new = ALL_BYTES if record["epoch"] == 1 else changed
        assert record["bytes_unique"] == pytest.approx(new, rel=0.001)
        if record["system"] in ("torch_save", "dcp", "dcp_async"):
            # Their epochs are whole copies.
            assert ALL_BYTES < record["bytes_stored"] < 1.1 * ALL_BYTES
            assert record["bytes_hottest_rank"] >= ALL_BYTES / RANKS
    for system in ("groupio", "groupio_nodoor"):
        one, two = saved.of(system)
        assert one["bytes_stored"] >= ALL_BYTES
        assert changed <= two["bytes_stored"] < ALL_BYTES / 4


def test_levels_come_in_order_and_limits_stand_on_every_record(saved: Bench) -> None:
    for record in saved.records:
        # Each is of the slowest rank: one may get its call back after all was durable.
        assert record["stall_s"] > 0
        assert record["durable_s"] > 0
        for limit in (
            *("limit_stall_s", "limit_stall_tensors_s", "limit_durable_s", "limit_hash_s"),
        ):
            assert record[limit] > 0
        if record["system"].startswith("groupio"):
            assert record["staged_s"] <= record["remote_s"] <= record["durable_s"]
        else:
            assert record["staged_s"] is None
            assert record["remote_s"] is None
        if record["system"] in ("torch_save", "dcp"):
            assert record["stall_s"] == record["durable_s"]
        assert (record["door_s"] is not None) == (record["system"] == "groupio")


def test_each_note_says_what_durable_means(saved: Bench) -> None:
    for record in saved.records:
        assert "durable: " in record["note"]
        assert "WRONG" not in record["note"]


def test_the_report_needs_nothing_from_outside(saved: Bench) -> None:
    assert saved.html.count("<svg") == 1
    assert not re.search(r"<script|<link|src=|href=|url\(|@import", saved.html)
    assert "prefers-color-scheme:dark" in saved.html
    for words in (*SYSTEMS, "memcpy", "raw write", "stored / changed bytes", "file system"):
        assert words in saved.html
    for level in ("stall", "staged", "durable", "door"):
        assert f'<rect class="{level}"' in saved.html


def test_the_console_shows_medians_and_targets(saved: Bench) -> None:
    for words in (*SYSTEMS, "limit", "durable / (copy + hash)", "target"):
        assert words in saved.out


def test_nothing_is_left(saved: Bench) -> None:
    assert saved.left == []


@pytest.mark.parametrize("peer", [name for name in PEERS if name not in SYSTEMS])
def test_an_optional_peer_gives_back_what_was_saved(peer: str, tmp_path: Path) -> None:
    module = missing_module(peer)
    if module:
        pytest.skip(f"peer not installed: {peer} ({module})")
    done = run_bench(
        tmp_path,
        "save",
        *("--ranks", "2", "--mb-per-rank", "1", "--epochs", "1", "--settle", "0"),
        *("--peers", peer),
    )
    assert done.code == 0, done.err
    (record,) = done.of(peer)
    assert record["durable_s"] >= record["stall_s"] > 0
    assert record["bytes_stored"] >= 2 * MIB
