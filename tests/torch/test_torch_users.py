"""What users reported of other checkpoint layers: each report has its test; the short ones here."""

from __future__ import annotations

import ast
import gc
import json
import os
import shutil
import subprocess
import sys
import weakref
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from users_rows import rows

import groupio
import groupio.torch as gt
from groupio.client.store_reader import StoreReader
from groupio.torch import loading

TESTS = Path(__file__).parents[1]
WORKER = Path(__file__).with_name("collectives_worker.py")
WAIT_S = 60.0


@cache
def names_in(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def test_each_report_has_tests_that_exist() -> None:
    found = rows()
    assert len(found) == 91
    absent = []
    for number, row in found.items():
        assert bool(row.tests) != bool(row.later), number
        assert row.thread.count("/") == 3, number
        for test in row.tests:
            file, _, name = test.partition("::")
            path = TESTS / file
            if not path.is_file() or name not in names_in(path):
                absent.append(f"{number}: {test}")
    assert absent == []
    assert sum(bool(row.later) for row in found.values()) <= 8


def save(state: Any, store: str, step: int = 1) -> None:
    gt.save(state, store, step=step, deadline_s=WAIT_S, dcp_door=False).wait("durable", WAIT_S)


def status(name: str) -> int:
    """A figure of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(name)


def test_a_saved_tensor_is_let_go(store: str) -> None:
    state = {"w": torch.randn(1000, 1000), "small": torch.randn(3)}
    gone = [weakref.ref(tensor) for tensor in state.values()]
    save(state, store)
    state.clear()
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_a_save_makes_no_private_copy(store: str) -> None:
    """The one copy lies in the arena, which is the agent's memory: the rank's own stays."""
    save({"n": 1}, store, step=1)
    state = {f"w{i}": torch.full((1 << 22,), float(i)) for i in range(16)}  # 256 MiB
    before = status("RssAnon")
    for step in (2, 3):
        save({name: tensor.add_(1) for name, tensor in state.items()}, store, step=step)
        assert status("RssAnon") - before < 32 << 20


def test_many_saves_leak_neither_memory_nor_descriptors(store: str) -> None:
    state = {"w": torch.randn(1 << 20), **{f"p{i}": torch.randn(16) for i in range(500)}}

    def rounds(first: int, count: int) -> tuple[int, int]:
        for step in range(first, first + count):
            state["w"].add_(1)
            save(state, store, step=step)
            gt.load({name: torch.empty_like(tensor) for name, tensor in state.items()}, store)
        gc.collect()
        return status("RssAnon"), len(os.listdir("/proc/self/fd"))

    memory, descriptors = rounds(1, 8)
    later_memory, later_descriptors = rounds(9, 20)
    assert later_memory - memory < 16 << 20
    assert later_descriptors <= descriptors + 2


def test_files_do_not_grow_with_ranks_or_tensors(store: str) -> None:
    save({f"p{i}": torch.full((16,), float(i)) for i in range(2000)}, store, step=1)
    files = [path for path in Path(store).rglob("*") if path.is_file()]
    assert len(files) <= 6, files


def test_a_copied_store_is_the_same_store(store: str, tmp_path: Path) -> None:
    """Nothing in it depends on where it lies, and no marker beside it can be forgotten."""
    state = {"w": torch.randn(1 << 19), "n": 7}
    save(state, store)
    gt.close()
    copy = tmp_path / "elsewhere" / "renamed"
    shutil.copytree(store, copy)
    shutil.rmtree(store)
    into = {"w": torch.zeros(1 << 19), "n": 0}
    assert gt.load(into, copy).step == 1
    assert torch.equal(into["w"], state["w"])
    assert into["n"] == 7


def test_a_manifest_that_this_node_sees_late(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a network file system, whose cache still has the directory of before."""
    state = {"w": torch.randn(8)}
    save(state, store)
    seen: list[Any] = []
    manifest = StoreReader.manifest

    def late(self: StoreReader, key: Any) -> Any:
        seen.append(key)
        # The first look is that of rank 0, which decides; two more see nothing yet.
        return None if len(seen) in (2, 3) else manifest(self, key)

    monkeypatch.setattr(StoreReader, "manifest", late)
    into = {"w": torch.zeros(8)}
    gt.load(into, store)
    assert torch.equal(into["w"], state["w"])
    assert len(seen) >= 4
    monkeypatch.setattr(loading, "APPEAR_S", 0.1)
    seen[:] = []
    monkeypatch.setattr(
        StoreReader,
        "manifest",
        lambda self, key: seen.append(key) or (manifest(self, key) if len(seen) == 1 else None),
    )
    with pytest.raises(groupio.NotFound, match="same file system"):
        gt.load(into, store)


def test_extra_state_is_bytes_that_are_stored_once(store: str) -> None:
    """Opaque blobs, such as the scales of an fp8 layer, are bytes like others."""
    blob = os.urandom(300_000)
    state = {f"layer{i}._extra_state": blob for i in range(10)}
    state["as_tensor._extra_state"] = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
    save(state, store, step=1)
    save(state, store, step=2)
    with groupio.connect(store) as client:
        first, second = client.epochs()
    assert first.bytes_unique < 320_000
    assert second.bytes_stored < 4096
    into: dict[str, Any] = dict.fromkeys(state)
    gt.load(into, store)
    assert into["layer3._extra_state"] == blob
    assert bytes(into["as_tensor._extra_state"].numpy()) == blob


@pytest.mark.timeout(180)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_saving_and_loading_call_no_collective(tmp_path: Path) -> None:
    """Not in the call nor in the background: the user's group is the user's, and so is its GPU."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", "2", "--monitor-interval", "0.3", str(WORKER), str(tmp_path)),
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
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["calls"] == []
        assert found["guarded"] > 20
        assert found["equal"]
        assert found["steps"] > 3, "the training thread went on with its own collectives"
    # However the replicas were handed over, unmodified torch reads them.
    torch.manual_seed(1)
    expected = {name: torch.randn(2000, 1000) for name in ("shard", "replica")}
    for step in range(1, 7):
        into = {name: torch.zeros(2000, 1000) for name in expected}
        dcp.load(into, checkpoint_id=tmp_path / "store" / "dcp" / str(step), no_dist=True)
        for name, tensor in expected.items():
            assert torch.equal(into[name], tensor), (step, name)
