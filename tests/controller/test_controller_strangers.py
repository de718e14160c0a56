"""Without a token: agents of one user meet on one machine, and no other user gets in."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import groupio as library
from groupio.agent import process
from groupio.backend.posix import PosixBackend
from groupio.cli import main

_HERE = Path(__file__).parent
_RANK = _HERE / "controller_rank.py"


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every user can reach."""
    path = Path(tempfile.mkdtemp(prefix="groupio-strangers-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GROUPIO_TOKEN", "GROUPIO_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)


def run_dir(place: Path, number: int) -> str:
    return str(place / f"run{number}")


def rank(start: Any, place: Path, number: int, world: int = 2, **changes: str) -> Any:
    """A rank on a node of its own: it has an agent of its own."""
    environment = {
        "GROUPIO_NODE": f"n{number}",
        "GROUPIO_RUNTIME_DIR": run_dir(place, number),
        "GROUPIO_CONTROLLER": "store",
        "GROUPIO_REPLICAS": "2",
        "GROUPIO_IDLE_S": "5",
        **changes,
    }
    return start([str(_RANK), str(place / "store"), str(number), str(world)], **environment)


def sockets_of(pid: int) -> list[str]:
    """The inodes of a process's sockets."""
    links = [
        os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd") if entry.is_symlink()
    ]
    return [link[8:-1] for link in links if link.startswith("socket:[")]


def stop_agents(place: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    for number in range(count):
        monkeypatch.setenv("GROUPIO_RUNTIME_DIR", run_dir(place, number))
        assert main.run(["agent", "stop"]) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_another_user_is_refused_without_a_word_of_the_job(
    start: Any, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = place / "store"
    ranks = [rank(start, place, number) for number in (0, 1)]
    for one in ranks:
        one.say("1")
    assert [one.line() for one in ranks] == ["durable 1", "durable 1"]
    assert (store / "controllers" / "key").stat().st_mode & 0o777 == 0o600
    paths = [process.runtime_paths(run_dir(place, n), library.__version__) for n in (0, 1)]
    pids = [process.holder_pid(one) for one in paths]
    with PosixBackend.open(store, create=False) as backend:
        store_id = backend.store_record().store_id
        (record,) = backend.list("controllers")[:1]
    about = {
        "store": str(store),
        "store_id": store_id,
        "job": "store",
        "digest": "00" * 32,
        "inodes": [inode for pid in pids if pid for inode in sockets_of(pid)],
        "private": [
            str(store / "controllers" / "key"),
            *(str(path) for one in paths for path in (one.socket, one.log, one.lock)),
            *(f"/proc/{pid}/fd" for pid in pids),
        ],
    }
    stranger = subprocess.run(
        [sys.executable, str(_HERE / "stranger.py")],
        input=json.dumps(about),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert stranger.returncode == 0, stranger.stderr
    found = json.loads(stranger.stdout)
    # One for control, two for data; that of an agent that would have been the controller, too.
    count = len(found["ports"])
    assert count in (3, 4)
    assert all(why == "Permission denied" for why in found["opened"].values()), found["opened"]
    assert found["zmq"] == [[]] * count
    assert found["joined"] == [[]] * 3 * count
    assert set(found["pulled"]) <= {"refused", "lost", "gone"}, found["pulled"]
    assert "refused" in found["pulled"]
    said = "".join(found["plain"]) + stranger.stderr.encode().hex()
    for word in (store_id, str(place), "n0", "n1"):
        assert word.encode().hex() not in said
    assert bytes.fromhex(store_id).hex() not in said

    # The job does not notice, and nobody was taken in.
    for one in ranks:
        one.say("2")
    assert [one.line() for one in ranks] == ["durable 2", "durable 2"]
    monkeypatch.setenv("GROUPIO_RUNTIME_DIR", run_dir(place, 0))
    assert main.run(["status", "--json"]) == 0
    (job,) = json.loads(capsys.readouterr().out)["jobs"]
    assert [node["node"] for node in job["nodes"]] == ["n0", "n1"]
    assert any("refused a control connection" in one.log.read_text() for one in paths)
    assert all("refused a data connection" in one.log.read_text() for one in paths)
    assert record.isdigit()
    for one in ranks:
        one.process.stdin.close()
        assert one.process.wait(60) == 0
    stop_agents(place, monkeypatch, 2)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_store_of_another_owner_needs_a_token(
    start: Any, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its key is not ours; the save says what to set, and with a token all goes well."""
    with PosixBackend.open(place / "store", create=True) as backend:
        backend.ensure_store_record("store")
    key = place / "store" / "controllers" / "key"
    key.write_text("groupio store key 1\n" + "0" * 64 + "\n")
    key.chmod(0o600)
    os.chown(key, 65534, 65534)
    alone = rank(start, place, 0, world=1)
    alone.say("1")
    answer = alone.line()
    assert answer.startswith("failed 1: the agents of"), answer
    assert "belongs to user 65534" in answer
    assert "GROUPIO_TOKEN_FILE" in answer
    alone.process.stdin.close()
    assert alone.process.wait(60) == 0
    stop_agents(place, monkeypatch, 1)
    with_token = rank(start, place, 0, world=1, GROUPIO_TOKEN="5" * 32)
    with_token.say("1")
    assert with_token.line() == "durable 1"
    with_token.process.stdin.close()
    assert with_token.process.wait(60) == 0
    stop_agents(place, monkeypatch, 1)
