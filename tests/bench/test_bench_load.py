"""``groupio bench load`` and ``bench step`` with real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bench_help import SOURCE, Bench, run_bench

MIB = 1 << 20
UNIQUE = 2 * MIB


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """One rank saved; two load, every tensor whole."""
    folder = tmp_path_factory.mktemp("load")
    return run_bench(
        folder,
        "load",
        *("--ranks", "1", "--load-ranks", "2", "--mb-per-rank", "2", "--epochs", "1"),
        *("--peers", "torch_save,dcp", "--settle", "0"),
        *("--html", str(folder / "report.html")),
    )


def test_every_system_loads_cold_and_warm(loaded: Bench) -> None:
    assert loaded.code == 0, loaded.err
    for system in ("groupio", "groupio_nodoor", "dcp"):
        for cold in (True, False):
            (record,) = loaded.of(system, cold=cold)
            assert record["load_s"] > 0
            assert record["limit_load_s"] > 0
            assert record["bytes_unique"] == UNIQUE
            assert record["load_ranks"] == 2
            assert "WRONG" not in record["note"]


def test_groupio_reads_each_byte_once(loaded: Bench) -> None:
    for record in loaded.of("groupio"):
        assert record["bytes_read"] == pytest.approx(UNIQUE, rel=0.01)
    for record in loaded.of("dcp"):
        assert record["bytes_read"] > 2 * UNIQUE  # every rank reads everything


def test_a_peer_that_cannot_load_so_has_a_record_that_says_it(loaded: Bench) -> None:
    (record,) = loaded.of("torch_save")
    assert record["load_s"] is None
    assert record["note"] == "cannot load with 2 ranks what 1 ranks saved"


def test_the_load_report_shows_both(loaded: Bench) -> None:
    assert "fsdp, cold" in loaded.html
    assert "fsdp, warm" in loaded.html
    assert "raw read + copy" in loaded.html
    assert loaded.left == []


def test_a_loop_is_timed_with_and_without_saving(tmp_path: Path) -> None:
    done = run_bench(
        tmp_path,
        "step",
        *("--ranks", "1", "--mb-per-rank", "1", "--epochs", "1", "--step-s", "0.05"),
    )
    assert done.code == 0, done.err
    assert {r["system"] for r in done.records} == {"none", "groupio", "dcp_async"}
    assert all(r["step_s"] > 0 for r in done.records)
    assert "step that saves / step that does not" in done.out
    assert done.left == []


def test_an_interrupt_ends_the_ranks_and_removes_the_directories(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "groupio.cli", "bench", "save", "--store", str(tmp_path)]
    command += ["--ranks", "1", "--mb-per-rank", "1", "--epochs", "1000", "--peers", "none"]
    running = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + 60
    while not (news := list(tmp_path.glob("*/ranks-save/rank-0.jsonl"))):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert news
    running.terminate()
    _, err = running.communicate(timeout=60)
    assert running.returncode != 0
    assert "Traceback" not in err
    assert os.listdir(tmp_path) == []
