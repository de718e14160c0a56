"""``groupio bench coordination`` with real members and agents, and what it makes of readings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_help import SOURCE

from groupio.bench import coordination
from groupio.bench.board import GROUP, Board, Plan, items
from groupio.bench.coordination import STAGES, summary
from groupio.cli import bench
from groupio.errors import GroupTimeout


def plan(folder: Path, **fields: float) -> Plan:
    base = {"members": 2, "agents": 2, "chunks": 3, "chunk_bytes": 64, "epochs": 3}
    chosen: dict[str, Any] = {**base, "timeout_s": 0.05, **fields}
    made = Plan(folder=str(folder), store="", **chosen)
    made.save()
    return made


def test_the_current_directory_is_left_alone_unasked(tmp_path: Path) -> None:
    here, temporary = tmp_path / "here", tmp_path / "temporary"
    here.mkdir()
    temporary.mkdir()
    before = here.stat().st_mtime_ns, temporary.stat().st_mtime_ns
    found = subprocess.run(
        [
            *(sys.executable, "-m", "groupio.cli", "bench", "coordination"),
            *("--members", "2", "--agents", "2", "--chunks", "2", "--epochs", "1"),
        ],
        cwd=here,
        env={**os.environ, "PYTHONPATH": str(SOURCE), "COLUMNS": "900", "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert f"measuring in {temporary} (" in found.stderr
    assert "--store names another folder" in found.stderr
    # Each file that is made in a folder, or removed from it, changes its time.
    assert here.stat().st_mtime_ns == before[0]
    assert temporary.stat().st_mtime_ns != before[1]
    assert os.listdir(temporary) == []


def test_memory_is_not_taken_for_a_disk(capfd: pytest.CaptureFixture[str]) -> None:
    for chosen in (False, True):
        bench._say_where(Path("/some"), {"file_system": "tmpfs"}, chosen=chosen)
        assert "/some is tmpfs: memory, not a disk" in capfd.readouterr().err
    bench._say_where(Path("/some"), {"file_system": "ext4"}, chosen=True)
    assert capfd.readouterr().err == ""


def test_real_processes_agree(tmp_path: Path) -> None:
    store, result = tmp_path / "measured", tmp_path / "result.json"
    store.mkdir()
    found = subprocess.run(
        [
            *(sys.executable, "-m", "groupio.cli", "bench", "coordination"),
            *("--members", "4", "--agents", "2", "--chunks", "300", "--epochs", "2"),
            *("--store", str(store), "--json", str(result)),
        ],
        env={**os.environ, "PYTHONPATH": str(SOURCE), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert "last order taken" in found.stdout
    told = json.loads(result.read_text())
    assert (told["members"], told["agents"], told["chunks"]) == (4, 2, 300)
    assert [one["epoch"] for one in told["runs"]] == [3, 4]
    assert told["conditions"]["cpus"] >= 1
    for one in told["runs"]:
        assert 0 < one["plan_leg_ms"] < 60_000
        assert 0 < one["gather_leg_ms"] < 60_000
        assert one["agents_cpu_ms"] > 0
        assert all(one[f"{stage}_ms"] >= 0 for stage in STAGES if stage not in ("arrive", "take"))
    assert os.listdir(store) == []


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    found = subprocess.run(
        [
            *(sys.executable, "-m", "groupio.cli", "bench", "coordination"),
            *("--members", "2", "--agents", "3", "--store", str(tmp_path)),
        ],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert found.returncode == 2
    assert "--agents is 3; it must be from 2 to 2" in found.stderr


def test_late_starters_do_not_shorten_a_leg(tmp_path: Path) -> None:
    board = Board(made := plan(tmp_path))
    for epoch, late_s in ((1, 9.0), (2, 0.002), (3, 0.050)):
        start = 100.0 * epoch
        for number, column in enumerate(GROUP):
            board.say(epoch, column, start + 0.06 + number / 1000)
        board.say(epoch, "open", start)
        board.say(epoch, "plan", start)
        board.members(epoch, "opened")[:] = start, start + late_s
        board.members(epoch, "granted")[:] = start + 0.2
        for column, at in (("start_copy", 0.1), ("held", 0.15), ("hashed", 0.06), ("ordered", 0.2)):
            board.nodes(epoch, column)[:] = start + at
        board.nodes(epoch, "complete")[:] = start, start + late_s
        board.nodes(epoch, "cpu_end")[:] = 0.010, 0.030
    told = summary(made, board, warm_up=1)
    assert [one["plan_leg_ms"] for one in told["runs"]] == pytest.approx([198, 195])
    assert [one["gather_leg_ms"] for one in told["runs"]] == pytest.approx([98, 95])
    assert told["median_ms"] == pytest.approx(196.5)
    assert told["spread_ms"] == pytest.approx(26)
    assert told["agents_cpu_ms"] == pytest.approx(40)


def test_an_epoch_begins_when_all_agents_know_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordination, "SETTLE_S", 0.0)
    monkeypatch.setattr(coordination, "REST_S", 0.0)
    board = Board(made := plan(tmp_path, timeout_s=30.0))
    board.members(2, "ready")[:] = 1.0
    for column in ("held", "ordered"):
        board.nodes(2, column)[:] = 1.0
    board.say_node(1, 0, "learnt")
    timer = threading.Timer(0.3, board.say_node, [1, 1, "learnt"])
    timer.start()
    coordination._Run(made).epoch(2)
    timer.join()
    assert board.group(2, "open") > board.nodes(1, "learnt").max() > 0


def test_nobody_waits_for_ever(tmp_path: Path) -> None:
    board = Board(plan(tmp_path))
    with pytest.raises(GroupTimeout, match="the start of 'plan' in epoch 1 did not come"):
        board.await_start(1, "plan")


def test_no_two_chunks_are_alike(tmp_path: Path) -> None:
    made = plan(tmp_path)
    states = [items(made, rank, epoch) for rank in (0, 1) for epoch in (1, 2)]
    assert len({name for state in states for name in state}) == made.chunks
    assert len({np.asarray(v).tobytes() for state in states for v in state.values()}) == 12
