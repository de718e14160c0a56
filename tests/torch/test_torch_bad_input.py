"""What bad input gets: one typed error with the path, or a correct result; never half of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from blake3 import blake3
from torch.distributed.checkpoint.api import CheckpointException
from torchrun_worker import clone, equal

import groupio
import groupio.torch as gt
from groupio.errors import FormatError, GroupIOError, InvalidInput, NotFound, StateMismatch
from groupio.format.structure import STRUCTURE

WORKER = Path(__file__).with_name("bad_input_worker.py")
WAIT_S = 60.0


def save(state: Any, store: str, step: int = 1, **options: Any) -> groupio.SaveHandle:
    options.setdefault("dcp_door", False)
    handle = gt.save(state, store, step=step, deadline_s=WAIT_S, **options)
    handle.wait("durable", WAIT_S)
    return handle


def committed(store: str) -> list[int]:
    with groupio.connect(store) as client:
        return [info.epoch for info in client.epochs()]


class Odd(torch.Tensor):
    """A tensor subclass that nobody knows."""


class Thing:
    """An object that no rule covers."""


def quantised() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "object": (Thing, "Thing"),
    "module": (lambda: torch.nn.Linear(2, 2), "state_dict()"),
    "function": (lambda: print, "functions are code"),
    "subclass": (lambda: torch.ones(2).as_subclass(Odd), "subclass"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "sparse"),
    "sparse rows": (lambda: torch.eye(3).to_sparse_csr(), "sparse"),
    "meta": (lambda: torch.empty(3, device="meta"), "meta"),
    "quantised": (quantised, "quantised"),
    "nested": (nested, "nested"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, about its prototypes
@pytest.mark.parametrize("kind", BAD)
def test_a_value_that_cannot_be_stored_is_named_and_nothing_is_saved(store: str, kind: str) -> None:
    make, words = BAD[kind]
    with pytest.raises(InvalidInput) as caught:
        gt.save({"model": {"layers": [{"w": torch.ones(2)}, {"x": make()}]}}, store, step=1)
    assert "['model']['layers'][1]['x']" in caught.value.message
    assert words in caught.value.message
    assert committed(store) == []
    save({"w": torch.ones(2)}, store, step=1)
    assert committed(store) == [1]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["subclass", "sparse", "meta", "quantised", "object"])
def test_a_template_that_cannot_be_filled_is_named_and_left_alone(store: str, kind: str) -> None:
    save({"a": torch.ones(3), "b": torch.ones(3, 3), "n": 4}, store)
    into: dict[str, Any] = {"a": torch.zeros(3), "n": 0, "b": BAD[kind][0]()}
    if kind == "object":
        # As a plain leaf it would be replaced: only as a part of the dict is it in the way.
        into["b"] = {"inner": BAD[kind][0]()}
    with pytest.raises((InvalidInput, StateMismatch)) as caught:
        gt.load(into, store)
    assert "b" in caught.value.message
    assert not into["a"].any()
    assert into["n"] == 0


# -- names ---------------------------------------------------------

NAMES = [
    "/etc/passwd",
    "../../../outside",
    "a/b//c",
    ".",
    "..",
    "...",
    "a.b.c",
    "a..b",
    ".hidden",
    "trailing.",
    " ",
    "new\nline",
    "tab\tand\rreturn",
    "nul\0byte",
    "ünïcödé.重み.🧪",
    "e\u0301",
    "\u00e9",
    "\ud800",
    "groupio:structure",
    "groupio:part:1:a.b.c",
    "groupio:sample:a.b.c",
    "file:///x?y=1#z",
    "*",
    "[a-z]?",
    "x" * 4000,
    "",
]


def test_any_name_comes_back_and_none_becomes_a_path(tmp_path: Path) -> None:
    store = tmp_path / "inner" / "store"
    store.parent.mkdir()
    state = {
        "tensors": {name: torch.full((3,), float(i)) for i, name in enumerate(NAMES)},
        "values": dict(zip(NAMES, range(len(NAMES)), strict=True)),
        **{name: torch.full((2,), -float(i)) for i, name in enumerate(NAMES)},
    }
    save(state, str(store))
    into = clone(state)
    for tensor in (*into["tensors"].values(), *(into[name] for name in NAMES)):
        tensor.fill_(99)
    into["values"] = dict.fromkeys(NAMES)
    gt.load(into, str(store))
    assert equal(into, state)
    gt.close()
    assert [path.name for path in tmp_path.iterdir()] == ["inner"]
    assert [path.name for path in store.parent.iterdir()] == ["store"]
    folders = {path.name for path in store.iterdir() if path.is_dir()}
    assert folders <= {"controllers", "decisions", "epochs", "inflight", "lineages", "prepared",
                       "segments", "candidates", "pins", "dcp", "tmp"}  # fmt: skip
    assert not any("passwd" in path.name or "outside" in path.name for path in store.rglob("*"))


@pytest.mark.parametrize("name", ["x" * 5000, "ü" * 3000, "\0" * 2000])
def test_names_beyond_the_limit_are_refused(store: str, name: str) -> None:
    with pytest.raises(InvalidInput, match="limit is 4096"):
        gt.save({name: torch.ones(1)}, store, step=1)
    assert committed(store) == []


@pytest.mark.timeout(180)
def test_a_hundred_thousand_items(store: str) -> None:
    """In a time that grows with their number, not with its square."""
    state: dict[str, Any] = {
        f"layer.{i}": {"w": torch.full((2,), float(i)), "n": i} for i in range(50_000)
    }
    worked = time.process_time()
    handle = save(state, store)
    into: dict[str, Any] = {name: {"w": torch.zeros(2), "n": -1} for name in state}
    begin = time.monotonic()
    gt.load(into, store)
    loaded = time.monotonic() - begin
    worked = time.process_time() - worked
    times = handle.times
    print(
        f"100,000 items: released {times.released:.2f} s, durable {times.durable:.2f} s, load "
        f"{loaded:.2f} s, work of the rank {worked:.2f} s"
    )
    assert all(values["n"] == i and values["w"][0] == i for i, values in enumerate(into.values()))
    # By the processor's clock, which busy neighbours do not move; about 10 s.
    assert worked < 60


@pytest.mark.proof
@pytest.mark.timeout(900)
def test_one_tensor_of_five_gigabytes(store: str) -> None:
    """More than 32 bits of bytes and of elements in one item, and more than one segment."""
    rows = 5 * 1024 + 1
    state = {"w": torch.empty(rows, 1 << 20, dtype=torch.uint8)}
    for row in range(rows):
        state["w"][row].fill_(row % 251)
        state["w"][row, :4] = torch.tensor([row >> 8 & 255, row & 255, 7, 9])
    begin = time.monotonic()
    save(state, store)
    durable = time.monotonic() - begin
    into = {"w": torch.zeros_like(state["w"])}
    begin = time.monotonic()
    gt.load(into, store)
    print(f"5 GB: durable {durable:.1f} s, load {time.monotonic() - begin:.1f} s")
    assert torch.equal(into["w"], state["w"])


# -- stores that are none ---------------------------------------------------------


def of_next_version(path: Path) -> None:
    """Give a record the version after its own, with a right check of its header."""
    data = bytearray(path.read_bytes())
    data[8:10] = (int.from_bytes(data[8:10], "little") + 1).to_bytes(2, "little")
    data[56:64] = blake3(data[:56]).digest()[:8]
    path.write_bytes(data)


def test_an_epoch_of_a_newer_format(store: str) -> None:
    save({"w": torch.ones(4), "n": 1}, store, step=1)
    save({"w": torch.full((4,), 2.0), "n": 2}, store, step=2)
    gt.close()
    of_next_version(max(Path(store, "epochs").iterdir(), key=lambda path: path.name))
    into = {"w": torch.zeros(4), "n": 0}
    with pytest.raises(FormatError, match="version") as caught:
        gt.load(into, store)
    assert "epochs" in str(caught.value.path)
    assert not into["w"].any()
    assert into["n"] == 0
    report = gt.load(into, store, fallback=True)
    assert (report.step, into["n"]) == (1, 1)


def test_a_structure_record_of_a_newer_format(store: str) -> None:
    with groupio.connect(store) as client:
        items = {"w": torch.ones(4), STRUCTURE: [1 << 20, "{", 1, "w", "="]}
        client.save(items, epoch=1).wait("durable", WAIT_S)
    into = {"w": torch.zeros(4)}
    with pytest.raises(FormatError, match="version"):
        gt.load(into, store)
    assert not into["w"].any()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_stock_dcp_directory_is_no_store_and_says_how_to_import_it(tmp_path: Path) -> None:
    stock = tmp_path / "stock"
    dcp.save({"w": torch.ones(4)}, checkpoint_id=str(stock), no_dist=True)
    before = sorted(path.name for path in stock.rglob("*"))
    into = {"w": torch.zeros(4)}
    with pytest.raises((InvalidInput, NotFound, FormatError)) as caught:
        gt.load(into, str(stock))
    assert str(stock) in caught.value.message
    assert "torch.distributed.checkpoint" in caught.value.message
    assert "dcp.load" in caught.value.message or "import" in caught.value.message
    assert not into["w"].any()
    with pytest.raises(CheckpointException, match="to import it"):
        dcp.load(into, checkpoint_id="1", storage_reader=gt.GroupStorageReader(stock))
    gt.close()
    assert sorted(path.name for path in stock.rglob("*")) == before


def test_what_is_no_address_of_a_store() -> None:
    for store in (None, 7, b"bytes"):
        with pytest.raises(InvalidInput, match="give a path or a file:// URL"):
            gt.save({"w": torch.ones(1)}, store, step=1)  # type: ignore[arg-type]
        with pytest.raises(InvalidInput, match="give a path or a file:// URL"):
            gt.load({"w": torch.ones(1)}, store)  # type: ignore[arg-type]


def test_a_file_and_a_folder_of_other_things(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    torch.save({"w": torch.ones(4)}, file)
    other = tmp_path / "photos"
    other.mkdir()
    (other / "cat.jpg").write_bytes(b"cat")
    into = {"w": torch.zeros(4)}
    for place in (file, other):
        with pytest.raises(GroupIOError) as caught:
            gt.load(into, str(place))
        assert str(place) in caught.value.message
        assert not into["w"].any()
    assert [path.name for path in other.iterdir()] == ["cat.jpg"]
    with pytest.raises(GroupIOError, match=r"model\.pt"):
        save(into, str(file))
    assert torch.load(file)["w"].all()


# -- two ranks ---------------------------------------------------------


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What both ranks reported; they ran once for all tests."""
    folder = tmp_path_factory.mktemp("bad")
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", "2", "--monitor-interval", "0.3", str(WORKER), str(folder)),
    ]
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=140,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.timeout(180)
def test_placements_that_cannot_be_saved(found: list[Any]) -> None:
    for result in found:
        places = result["placements"]
        for name, word in (("partial", "Partial"), ("local", "explicit shape")):
            assert places[name]["error"] == "InvalidInput", places[name]
            assert word in places[name]["message"]
            assert "['model']['w']" in places[name]["message"]
            assert places[name]["seconds"] < 30
        assert "error" not in places["good"]


def test_templates_that_do_not_fit_are_left_alone(found: list[Any]) -> None:
    for result in found:
        places = result["placements"]
        assert places["load partial"]["error"] in ("InvalidInput", "StateMismatch")
        assert "Partial" in places["load partial"]["message"]
        for name in ("load taller", "load double"):
            assert places[name]["error"] == "StateMismatch", places[name]
            assert "model.w" in places[name]["message"]
        for name in ("load partial", "load taller", "load double"):
            assert places[name]["untouched"], name
        assert "error" not in places["load across"], places["load across"]
        assert places["across equal"]


def test_meshes_that_contradict_each_other(found: list[Any]) -> None:
    """Each rank says that it alone holds the whole tensor: kept per rank, unless declared."""
    for result in found:
        meshes = result["meshes"]
        assert "error" not in meshes["own meshes"], meshes["own meshes"]
        assert "error" not in meshes["own meshes loaded"], meshes["own meshes loaded"]
        assert meshes["own meshes equal"]
        assert meshes["shapes"]["error"] == "ReplicaDivergence"
        assert meshes["shapes"]["items"] == ["w"]
        assert "in kind, dtype, shape or size" in meshes["shapes"]["message"]


def test_two_ranks_with_different_names(found: list[Any]) -> None:
    for result in found:
        names = result["names"]
        assert "error" not in names["saved"]
        assert "error" not in names["loaded"], names["loaded"]
        assert names["equal"]
        assert names["absent"]["error"] == "StateMismatch"
        assert names["absent"]["missing"] == ["of-7"]
        assert names["absent"]["untouched"]


def test_one_rank_that_cannot_save_or_load_fails_all_at_once(found: list[Any]) -> None:
    first, second = (result["refused"] for result in found)
    assert second["one"]["error"] == "InvalidInput"
    assert "['a']['b'][1]" in second["one"]["message"]
    assert first["one"]["error"] == "GroupAborted"
    assert first["one"]["members"] == [1]
    for result in (first, second):
        assert "error" not in result["next"]
        assert result["load"]["error"] == "InvalidInput"
        assert "['a']" in result["load"]["message"]
        assert max(result["one"]["seconds"], result["load"]["seconds"]) < 30
    assert first["untouched"]
