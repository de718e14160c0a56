"""The DCP door: unmodified torch reads every epoch, and the bytes stay in the segments."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import door_help
import pytest
import torch
import torch.distributed.checkpoint as dcp
from blake3 import blake3
from door_help import differences, door_files, nested, save, stock_load
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import groupio.torch as gt
from groupio.torch.tensors import STORED_DTYPES

MIB = 1 << 20


def test_nested_state_with_optimizer(store: str) -> None:
    state = nested()
    save(state, store, 1)
    assert differences(state, stock_load(store, 1, state)) == []
    # A first save: what lies in a run is one piece, and nothing was copied.
    found = door_help.pieces(store, 1)
    tensors = [p for places in found.values() for p in places if p[0].startswith("../../")]
    assert len(tensors) == len(set(tensors)) == door_help.runs(store)
    assert set(door_files(store, 1)) == {".metadata", "__values.bin", "groupio.json"}


def test_all_dtypes_and_shapes(store: str) -> None:
    state: dict[str, Any] = {}
    raw = torch.randint(0, 256, (16 * 24,), dtype=torch.uint8)
    for dtype in sorted(STORED_DTYPES, key=str):
        bytes_of = raw % 2 if dtype == torch.bool else raw
        values = bytes_of.view(dtype)[:24]
        short = str(dtype).removeprefix("torch.")
        state[short] = {
            "flat": values,
            "grid": values.reshape(2, 3, 4).clone(),
            "transposed": values.reshape(4, 6).t(),
            "0-d": values[5].clone(),
            "empty": values[:0],
            "empty grid": values[:0].reshape(3, 0, 2),
        }
    save(state, store, 1)
    assert differences(state, stock_load(store, 1, state)) == []


def test_names_that_are_awkward(store: str) -> None:
    names = [
        "",
        "a/b",
        "../x",
        "a b\n",
        "päth",
        "dots.and.dots",
        "\0",
        "groupio:x",
        "-",
        "x" * 1900,
    ]
    state = {name: {name: torch.full((2,), float(i))} for i, name in enumerate(names)}
    state |= {f"v{name}": i for i, name in enumerate(names)}
    save(state, store, 1)
    assert differences(state, stock_load(store, 1, state)) == []


def test_tied_tensors_and_equal_bytes_of_other_shapes(store: str) -> None:
    weight = torch.randn(1100, 1000)
    state = {
        "w": weight,
        "tied": weight,
        "view": weight.view(1000, 1100),
        "zeros": torch.zeros(4096, 1024),
        "wide": torch.zeros(1024, 4096),
        "long": torch.zeros(1024, 1024, dtype=torch.int32),
        "flat": torch.zeros(MIB),
        "many": torch.zeros(64, 1024, 1024),
        "cube": torch.zeros(2, 3, 1100, 1000),
    }
    save(state, store, 1)
    assert differences(state, stock_load(store, 1, state)) == []
    # 4 MiB and smaller rests of zeros under a few shapes, not all of the tensors.
    assert sum(door_files(store, 1).values()) < 32 * MIB


def test_later_epochs_refer_to_older_segments(store: str) -> None:
    torch.manual_seed(2)
    state = {f"layer.{i}": torch.randn(300, 1024) for i in range(50)}
    state["big"] = torch.randn(16, 1024, 1024)
    for step in range(1, 6):
        if step > 1:
            state[f"layer.{step}"] += 1
            state["big"][step] += 1
        save(state, store, step)
    for step in (2, 3, 4, 5):
        files = door_files(store, step)
        assert set(files) == {".metadata", "groupio.json"}
        assert sum(files.values()) < 64 << 10
    assert differences(state, stock_load(store, 5, state)) == []
    # A run of four chunks of which one was replaced is three pieces at most.
    assert len(door_help.pieces(store, 5)["big"]) <= 4 + 2 * 4


@pytest.mark.parametrize("shape", [(7, 3, 700, 1000), (3, 5_000_000), (2, 2, 2, 1 << 20), (13, 9)])
def test_grids_of_chunks_in_any_state_of_reuse(store: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(3)
    state = {"x": torch.randn(shape), "f": torch.randn(shape[::-1])}
    save(state, store, 1)
    flat = state["x"].view(-1)
    flat[:: max(len(flat) // 3, 1)] += 1
    save(state, store, 2)
    save(state | {"x": state["x"].double()}, store, 3)
    assert differences(state, stock_load(store, 2, state)) == []
    assert "__extra.bin" not in door_files(store, 2)


def test_store_that_moved_and_conversion(store: str, tmp_path: Path) -> None:
    state = nested()
    save(state, store, 4)
    gt.close()
    moved = os.fspath(tmp_path / "elsewhere" / "renamed")
    os.makedirs(tmp_path / "elsewhere")
    os.rename(store, moved)
    assert differences(state, stock_load(moved, 4, state)) == []
    # It keeps its job, and takes further epochs, through a link too.
    linked = os.fspath(tmp_path / "link")
    os.symlink(moved, linked)
    for step, path in ((5, moved), (6, linked)):
        state["list"][0] += 1
        save(state, path, step)
        assert differences(state, stock_load(path, step, state)) == []
        gt.close()
    state["list"][0] -= 2
    dcp_to_torch_save(f"{moved}/dcp/4", tmp_path / "all.pt")
    whole = torch.load(tmp_path / "all.pt", weights_only=False)
    assert differences(state["model"], whole["model"]) == []
    assert differences(state["optim"], whole["optim"]) == []
    assert differences(state["list"], whole["list"]) == []
    assert set(whole) == set(state)


def test_every_file_of_a_door_has_a_digest_on_record(store: str) -> None:
    save(nested(), store, 1)
    record = door_help.record(store, 1)
    files = door_files(store, 1)
    assert set(record["files"]) == set(files) - {"groupio.json"}
    for name, row in record["files"].items():
        data = Path(store, "dcp", "1", name).read_bytes()
        assert (row["bytes"], row["blake3"]) == (len(data), blake3(data).hexdigest())


def test_the_metadata_is_what_torch_itself_makes_of_the_state(store: str, tmp_path: Path) -> None:
    state = nested()
    del state["tuple of lists"], state["plain"], state["array"], state["scalar"]
    save(state, store, 1)
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(state, checkpoint_id=tmp_path / "stock", no_dist=True)
    ours = dcp.FileSystemReader(f"{store}/dcp/1").read_metadata()
    theirs = dcp.FileSystemReader(tmp_path / "stock").read_metadata()
    assert set(ours.state_dict_metadata) == set(theirs.state_dict_metadata)
    assert ours.planner_data == theirs.planner_data
    for name, entry in theirs.state_dict_metadata.items():
        mine = ours.state_dict_metadata[name]
        assert type(mine) is type(entry)
        if hasattr(entry, "size"):
            assert (mine.size, mine.properties.dtype) == (entry.size, entry.properties.dtype)
