"""Who may read a store: the modes that a rank's umask gives, and a colleague of the same group."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import groupio

READER = Path(__file__).with_name("reading_user.py")
GROUP = 4321

SAVE = """
import sys, os
import numpy as np
import groupio
mode = int(sys.argv[3], 8) if len(sys.argv) > 3 else None
settings = groupio.Settings(
    file_mode=mode, runtime_dir=os.environ["GROUPIO_RUNTIME_DIR"], idle_s=60.0
)
os.umask(int(sys.argv[2], 8))
with groupio.connect(sys.argv[1], rank=0, world_size=1, settings=settings) as client:
    for epoch in map(int, os.environ["EPOCHS"].split(",")):
        handle = client._save({"w": np.arange(3.0)}, epoch=epoch, door="dcp")
        handle.wait("durable")
        assert handle.error is None
from groupio.cli import main
main.run(["agent", "stop"])
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every user can reach."""
    path = Path(tempfile.mkdtemp(prefix="groupio-access-"))
    path.chmod(0o777)
    yield path
    shutil.rmtree(path)


def save(place: Path, umask: str, *mode: str, epochs: str = "1") -> None:
    """Save to the store with a process of that umask, and an agent."""
    environment = {
        **os.environ,
        "GROUPIO_RUNTIME_DIR": str(place / "run"),
        "EPOCHS": epochs,
    }
    command = [sys.executable, "-c", SAVE, str(place / "store"), umask, *mode]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def modes(store: Path) -> set[tuple[bool, int]]:
    found = [store, *store.rglob("*")]
    return {(path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in found}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("007",), (0o660, 0o770)),
        (("077", "640"), (0o640, 0o750)),
    ],
)
def test_a_store_follows_the_umask_of_the_rank(
    place: Path, arguments: tuple[str, ...], expected: tuple[int, int]
) -> None:
    """Segments, manifests, records and doors; what is the agent's own stays private."""
    before = os.umask(0)
    try:
        save(place, *arguments)
    finally:
        os.umask(before)
    assert (place / "store" / "dcp" / "1" / ".metadata").exists()
    assert modes(place / "store") == {(False, expected[0]), (True, expected[1])}
    assert stat.S_IMODE((place / "run").stat().st_mode) == 0o700
    private = list((place / "run").iterdir())
    assert private
    assert all(stat.S_IMODE(path.stat().st_mode) & 0o077 == 0 for path in private)


def test_the_client_that_opened_the_store_decides_for_all_of_its_agent(place: Path) -> None:
    """Until the agent closes the store: the next client that opens it decides anew."""
    save(place, "022", epochs="1")
    before = {path for path in (place / "store").rglob("*") if path.is_file()}
    save(place, "077", epochs="2")
    new = {path for path in (place / "store").rglob("*") if path.is_file()} - before
    assert {stat.S_IMODE(path.stat().st_mode) for path in before} == {0o644}
    assert {stat.S_IMODE(path.stat().st_mode) for path in new} == {0o600}
    assert (place / "store" / "dcp" / "2" / ".metadata") in new


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_colleague_of_the_group_reads_and_verifies_without_writing(place: Path) -> None:
    (place / "store").mkdir()
    os.chown(place / "store", -1, GROUP)
    (place / "store").chmod(0o2750)
    save(place, "027", epochs="1,2")
    before = modes(place / "store")
    command = [sys.executable, str(READER), str(place / "store"), "65534", str(GROUP)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["w"] == [0.0, 1.0, 2.0]
    assert found["epochs"] == [1, 2]
    assert found["save"] != "NoneType"
    for command_name in ("ls", "show", "verify"):
        assert found[command_name]["code"] == 0, found[command_name]
    checks = {check["name"]: check for check in found["doctor"]["checks"]}
    assert checks["access"]["verdict"] == "ok", checks["access"]
    assert modes(place / "store") == before, "nothing was written"

    stranger = subprocess.run(
        [*command[:-1], "65534"], capture_output=True, text=True, timeout=120, check=False
    )
    assert stranger.returncode != 0
    assert "Permission denied" in stranger.stderr


@pytest.mark.parametrize("mode", [0o400, 0o770, 0o611, 0o1600, -1, True])
def test_modes_that_suit_no_store(mode: int) -> None:
    with pytest.raises(groupio.InvalidInput, match="without x, with which the owner can read"):
        groupio.Settings(file_mode=mode)
