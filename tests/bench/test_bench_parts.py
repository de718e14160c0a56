"""The parts of the benchmark without processes: content, options, ratios, failures."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_help import options

from groupio.bench import machine
from groupio.bench.charts import Bar, Mark, Row, bar_chart
from groupio.bench.launch import run_ranks
from groupio.bench.options import (
    OURS,
    SHAPES,
    check_room,
    choose_shapes,
    choose_systems,
    missing_module,
)
from groupio.bench.ratios import gates
from groupio.bench.records import save_records, wrong_systems
from groupio.bench.save import rotated
from groupio.bench.state import Content, State, slots_of
from groupio.bench.system import added
from groupio.cli import main
from groupio.errors import GroupAborted, GroupTimeout, InvalidInput

MIB = 1 << 20


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mb", [1, 8, 100, 512])
def test_the_tensors_of_a_shape_fill_it_without_gaps(shape: str, mb: int) -> None:
    slots = slots_of(shape, mb * MIB)
    end = 0
    for slot in slots:
        assert slot.offset == end
        assert slot.nbytes % 64 == 0
        assert slot.nbytes > 0
        end += slot.nbytes
    assert len({slot.name for slot in slots}) == len(slots)
    if shape == "tiny":
        assert (len(slots), end) == (20_000, 20_000 * 64)
        return
    assert end == mb * MIB
    changing = sum(slot.nbytes for slot in slots if not slot.fixed)
    assert changing == pytest.approx(end / 50 if shape == "lora" else end, rel=0.005)
    assert max(slot.nbytes for slot in slots) <= 64 * MIB
    if mb == 512:
        assert min(slot.nbytes for slot in slots) <= 8192
        assert max(slot.nbytes for slot in slots) > 60 * MIB


def content(shape: str, rank: int, epoch: int) -> np.ndarray[Any, Any]:
    made = Content(options(shape=shape, ranks=2))
    found = np.empty(made.nbytes, np.uint8)
    made.fill(found, rank, epoch)
    return found


def test_content_follows_from_rank_and_epoch() -> None:
    for shape in SHAPES:
        assert np.array_equal(content(shape, 1, 3), content(shape, 1, 3))
        same_ranks = np.array_equal(content(shape, 0, 1), content(shape, 1, 1))
        assert same_ranks == (shape in ("ddp", "tiny"))
        equal = np.mean(content(shape, 1, 1) == content(shape, 1, 2))
        assert equal == pytest.approx(0.98 if shape == "lora" else 1 / 256, abs=0.002)


def test_a_single_wrong_byte_is_noticed() -> None:
    state = State(Content(options(shape="ddp")), 0)
    state.fill(2)
    assert state.differences(2) == []
    assert state.differences(1)
    last = state.content.slots[-1]
    state.region[last.offset] ^= 1
    assert state.differences(2) == [last.name]


def test_whole_tensors_hold_the_shards_of_all_ranks_in_order() -> None:
    made = Content(options(shape="fsdp", ranks=3))
    state = State(made, 0, whole=True)
    for slot in made.slots:
        for rank in range(3):
            shard = np.empty(made.nbytes, np.uint8)
            made.fill(shard, rank, 1)
            start = 3 * slot.offset + rank * slot.nbytes
            part = shard[slot.offset : slot.offset + slot.nbytes]
            state.region[start : start + slot.nbytes] = part
    assert state.differences(1) == []
    name = made.slots[0].name
    assert state.tensors[name].nbytes == 3 * made.slots[0].nbytes


def test_systems_and_shapes_are_checked() -> None:
    assert choose_systems("none") == (OURS, ())
    assert choose_systems("dcp, torch_save")[0] == (*OURS, "dcp", "torch_save")
    assert set(choose_systems(None)[0]) >= {*OURS, "torch_save", "dcp", "dcp_async"}
    with pytest.raises(InvalidInput, match="there is no peer 'tar'; the peers are torch_save"):
        choose_systems("tar")
    assert choose_shapes("all") == SHAPES
    assert choose_shapes("ddp,tiny") == ("ddp", "tiny")
    with pytest.raises(InvalidInput, match="there is no shape 'zero'"):
        choose_shapes("zero")


def test_a_named_peer_that_is_not_installed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert missing_module("orbax") == "orbax.checkpoint"
    with pytest.raises(InvalidInput, match="peer not installed: orbax needs orbax"):
        choose_systems("orbax")
    assert choose_systems(None)[1] == ("orbax", "nvrx_local", "torchsnapshot")


def test_usage_errors_are_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def error(*arguments: str) -> str:
        capsys.readouterr()
        assert main.run(["bench", *arguments]) == 2
        told = capsys.readouterr()
        assert told.out == ""
        assert told.err.count("\n") == 1
        return told.err

    assert "--ranks is 0; it must be from 1 to 64" in error("save", "--ranks", "0")
    assert "is not a directory" in error("save", "--store", str(tmp_path / "no"))
    assert "there is no folder for" in error("save", "--json", str(tmp_path / "no" / "x"))
    assert "no shape 'x'" in error("load", "--shape", "x")
    huge = error("save", "--mb-per-rank", "1000000", "--store", str(tmp_path), "--peers", "none")
    assert "GB of disk" in huge
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "groupio bench needs torch: pip install" in error("save")


def test_too_little_room_is_told_before_the_start() -> None:
    small = options()
    check_room(small, 1 << 40, 1 << 40)
    with pytest.raises(InvalidInput, match=r"GB of disk and 0\.0 GB are free"):
        check_room(small, 0, 1 << 40)
    with pytest.raises(InvalidInput, match="GB of memory"):
        check_room(small, 1 << 40, 0)


def test_a_rank_that_fails_is_named_with_its_error(tmp_path: Path) -> None:
    broken = options(systems=("no such system",), folder=str(tmp_path))
    with pytest.raises(GroupAborted, match=r"rank 0 failed at the start: KeyError"):
        run_ranks(broken, "save", tmp_path / "runtime", lambda system, epoch: None)


def test_ranks_that_take_too_long_are_ended_and_named(tmp_path: Path) -> None:
    late = options(folder=str(tmp_path), timeout_s=0.01)
    with pytest.raises(GroupTimeout, match=r"ranks \[0\] were not done after 0 s, at the start"):
        run_ranks(late, "save", tmp_path / "runtime", lambda system, epoch: None)


def test_wrong_bytes_stand_in_the_note() -> None:
    row = {"kind": "saved", "epoch": 1, "note": "", "bytes_unique": 1, "stall_s": 0.1}
    told = [
        [{**row, "system": name, "durable_s": seconds} for name in ("dcp", "torch_save")]
        + [
            {"kind": "verified", "system": "dcp", "wrong": ["a.b"] if rank else []},
            {"kind": "verified", "system": "torch_save", "wrong": []},
        ]
        for rank, seconds in enumerate((0.5, 0.7))
    ]
    records = save_records(options(ranks=2), told, {})
    assert wrong_systems(records) == ["dcp"]
    assert records[0]["note"].startswith("WRONG BYTES on rank 1: a.b; durable: ")
    assert [r["durable_s"] for r in records] == [0.7, 0.7]  # of the slowest rank
    assert records[0]["staged_s"] is None


def record(system: str, epoch: int, shape: str = "fsdp", **fields: Any) -> dict[str, Any]:
    base = {
        **dict.fromkeys(("staged_s", "remote_s", "door_s", "bytes_hottest_rank")),
        "system": system,
        "epoch": epoch,
        "shape": shape,
        "ranks": 4,
        "note": "",
        "stall_s": 0.1,
        "durable_s": 1.0,
        "limit_stall_s": 0.1,
        "limit_durable_s": 1.0,
        "limit_hash_s": 0.5,
        "bytes_unique": 1000,
        "bytes_stored": 1000,
    }
    return {**base, **fields}


def test_ratios_are_medians_without_the_first_epoch() -> None:
    records = [
        record("groupio", 1, stall_s=9.0, durable_s=9.0),
        record("dcp_async", 1, stall_s=10.0),
        *(record("groupio", e, stall_s=s) for e, s in ((2, 0.11), (3, 0.12), (4, 5.0))),
        *(record("dcp_async", e, stall_s=0.24) for e in (2, 3, 4)),
        *(record("dcp", e, durable_s=3.0) for e in (1, 2, 3, 4)),
    ]
    found = {gate.what: gate for gate in gates(records, "save")}
    assert found["stall / limit"].value == pytest.approx(1.2)
    assert found["stall / limit"].passed
    assert found["stall / dcp_async"].value == pytest.approx(0.5)
    assert found["first stall / dcp_async's first"].value == pytest.approx(0.9)
    assert not found["first stall / dcp_async's first"].passed
    assert found["durable / dcp"].value == pytest.approx(1 / 3)


def test_a_ratio_without_figures_is_not_reached() -> None:
    found = {g.what: g for g in gates([record("groupio", e) for e in (1, 2)], "save")}
    assert found["durable / dcp"].value is None
    assert not found["durable / dcp"].passed
    assert found["durable / limit"].passed


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_has_targets(shape: str) -> None:
    names = ("groupio", "groupio_nodoor", "dcp", "dcp_async")
    records = [record(name, epoch, shape) for name in names for epoch in (1, 2)]
    found = gates(records, "save")
    assert len(found) >= 2
    assert all(gate.value is not None or gate.why for gate in found)


def test_turns_rotate() -> None:
    assert [rotated("abc", turn) for turn in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]


def test_bytes_added_count_growth_and_not_removal() -> None:
    assert added({"a": 10, "b": 5}, {"b": 7, "c": 3}) == 5


def test_a_chart_of_far_apart_values_is_logarithmic() -> None:
    rows = [Row("<one>", [Bar("stall", "stall", 0.001), Bar("durable", "durable", 5.0)])]
    chart = bar_chart("t", rows, [Mark("stall", "memcpy", 0.002)])
    assert "logarithmic" in chart
    assert "&lt;one&gt;" in chart
    near = [Row("a", [Bar("durable", "durable", 1.0), Bar("stall", "stall", None)])]
    chart = bar_chart("t", near, [])
    assert "logarithmic" not in chart
    assert "no stall" in chart


def test_conditions_say_where_and_with_what(tmp_path: Path) -> None:
    found = machine.conditions(tmp_path, "groupio bench save")
    assert found["cpus"] >= 1
    assert found["memory_bytes"] > 1 << 20
    assert found["packages"]["groupio"]
    assert found["file_system"]
