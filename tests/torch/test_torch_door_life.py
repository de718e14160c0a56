"""Doors that were not made, were lost or have to be made again; what making one costs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import door_help
import torch
from door_help import differences, door_files, nested, save, stock_load

import groupio
import groupio.torch as gt


def test_epoch_without_a_door_is_exported_later(store: str) -> None:
    state = nested()
    save(state, store, 1, dcp_door=False)
    save(state, store, 2, dcp_door=False)
    assert not Path(store, "dcp").exists()
    exported = export(store, "--epoch", "1")
    assert exported["door"] == f"{store}/dcp/1"
    assert exported["bytes_copied"] > 12_000_000
    assert differences(state, stock_load(store, 1, state)) == []
    # Saved with a door on top of unframed segments: their chunks have to be copied.
    save(state, store, 3)
    assert differences(state, stock_load(store, 3, state)) == []
    assert export(store)["epoch"] == 3


def test_a_door_that_somebody_deleted(store: str) -> None:
    state = {"w": torch.arange(9.0), "n": 3}
    save(state, store, 1)
    shutil.rmtree(f"{store}/dcp")
    wiped = {"w": torch.zeros(9), "n": 0}
    gt.load(wiped, store)
    assert differences(state, wiped) == []
    export(store)
    Path(store, "dcp", "1", ".metadata").unlink()
    assert not door_help.is_current(store, 1)
    export(store)
    assert door_help.is_current(store, 1)
    assert differences(state, stock_load(store, 1, state)) == []


def test_save_of_the_same_content_makes_the_missing_door(store: str) -> None:
    state = {"w": torch.arange(5.0)}
    save(state, store, 1, dcp_door=False)
    save(state, store, 1)
    assert differences(state, stock_load(store, 1, state)) == []


def test_a_door_that_cannot_be_made_is_a_note(store: str) -> None:
    state = {"w": torch.arange(5.0)}
    Path(store).mkdir()
    Path(store, "dcp").write_text("in the way")
    handle = gt.save(state, store, step=1)
    notes = [note for note in handle.wait("durable", 60).notes if note.startswith("door")]
    assert len(notes) == 1
    assert "dcp" in notes[0]
    assert handle.error is None
    Path(store, "dcp").unlink()
    export(store)
    assert differences(state, stock_load(store, 1, state)) == []


def test_agent_killed_between_commit_and_door(store: str, tmp_path: Path) -> None:
    save({"w": torch.zeros(5)}, store, 1)
    gt.close()
    # In the agent of the child a door takes for ever.
    patch = tmp_path / "patch"
    patch.mkdir()
    (patch / "sitecustomize.py").write_text(SLOW_DOOR)
    child = subprocess.run(
        [sys.executable, "-c", KILLED, store, tempfile.mkdtemp(prefix="gk-", dir=tmp_path)],
        env={**os.environ, "PYTHONPATH": f"{patch}:{os.environ.get('PYTHONPATH', '')}"},
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr
    found = json.loads(child.stdout)
    assert found["durable"]
    assert not found["door"]
    assert "agent was gone" in found["notes"]
    with groupio.connect(store) as client:
        end = time.monotonic() + 30
        while not door_help.is_current(store, 2) and time.monotonic() < end:
            time.sleep(0.02)
        assert [info.epoch for info in client.epochs()] == [1, 2]
    state = {"w": torch.arange(5.0)}
    assert differences(state, stock_load(store, 2, state)) == []


SLOW_DOOR = """
import time
import groupio.agent.doors
groupio.agent.doors.Doors._make = lambda *_: time.sleep(600)
"""

KILLED = """
import json, os, pathlib, signal, sys, threading
store, os.environ["GROUPIO_RUNTIME_DIR"] = sys.argv[1:]
import torch, groupio.torch as gt
handle = gt.save({"w": torch.arange(5.0)}, store, step=2)
agent = gt.clients.client_for(store, gt.members.find_members(None))._connections[-1].welcome
handle.add_done_callback("durable", lambda h: os.kill(agent.agent_pid, signal.SIGKILL))
times = handle.wait("durable", 30)
door = (pathlib.Path(store) / "dcp" / "2").exists()
print(json.dumps({"durable": times.durable is not None, "door": door, "notes": str(times.notes)}))
os._exit(0)
"""


def test_twenty_thousand_tiny_tensors_cost_little(store: str) -> None:
    state = {f"layer.{i}.exp_avg": torch.full((16,), float(i)) for i in range(20_000)}
    save(state, store, 1)
    assert sum(door_files(store, 1).values()) < 200 * 20_000
    done = subprocess.run(
        [sys.executable, "-c", TINY, store], timeout=60, capture_output=True, text=True, check=True
    )
    # Half a second on a processor that needs 0.05 s for the million multiplications.
    assert float(done.stdout) < 10
    names = ["layer.0.exp_avg", "layer.19999.exp_avg"]
    some = {name: state[name] for name in names}
    assert differences(some, stock_load(store, 1, some)) == []


TINY = """
import sys, time
from groupio.client.store_reader import StoreReader
from groupio.door.publish import make_door
def unit():
    start = time.process_time()
    sum(i * i for i in range(1_000_000))
    return time.process_time() - start
best = 1e9
for _ in range(6):
    with StoreReader.open(sys.argv[1]) as reader:
        start = time.process_time()
        make_door(reader, reader.resolve(1))
        spent = time.process_time() - start
    best = min(best, spent / unit())
print(best)
"""


def export(store: str, *more: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "groupio.cli", "export", store, "--dcp", "--json", *more],
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_copied_chunks_are_verified_when_data_is_read(store: str) -> None:
    save({"w": torch.randn(300_000)}, store, 1, dcp_door=False)
    export(store)
    copies = Path(store, "dcp", "1", "__extra.bin")
    data = bytearray(copies.read_bytes())
    data[500_000] ^= 1
    copies.write_bytes(data)
    assert verify(store) == (0, [])
    assert verify(store, "--read-data") == (1, [("corrupt", str(copies))])


def test_no_door_shows_an_epoch_that_a_rewind_abandoned(store: str) -> None:
    """Not even under the number of an epoch that was saved without a door since."""
    for step in (1, 2, 3):
        save({"w": torch.full((5,), float(step))}, store, step)
    gt.close()
    code = (
        "import sys, groupio\n"
        "client = groupio.connect(sys.argv[1], rank=0, world_size=1, rewind_to=1)\n"
        "client.save({'w': b'other'}, epoch=2).wait('durable', 30)\n"
        "client.close()\n"
    )
    subprocess.run([sys.executable, "-c", code, store], check=True, timeout=60)
    assert {info.epoch for info in groupio.connect(store).epochs() if not info.abandoned} == {1, 2}
    end = time.monotonic() + 10
    while Path(store, "dcp", "2").exists() and time.monotonic() < end:
        time.sleep(0.02)
    assert sorted(os.listdir(Path(store, "dcp"))) == ["1", "3"]
    assert verify(store) == (0, [])


def verify(store: str, *options: str) -> tuple[int, list[tuple[str, str]]]:
    """The exit code of ``groupio verify``, and kind and path of what it found."""
    command = [sys.executable, "-m", "groupio.cli", "verify", store, "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, [(d["kind"], d["path"]) for d in json.loads(done.stdout)["damage"]]
