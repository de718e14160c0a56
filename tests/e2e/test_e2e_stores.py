"""Stores that are not what one expects: files, read-only, replaced under a known path, foreign."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_help import data, save_all

from groupio.errors import (
    AgentLost,
    GroupAborted,
    InvalidInput,
    NotFound,
    StorageError,
    from_wire,
)


@contextlib.contextmanager
def mounted(*arguments: str) -> Iterator[None]:
    """A mount of this test; the last argument is where."""
    subprocess.run(["mount", *arguments], check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", arguments[-1]], check=True, capture_output=True)


def test_store_path_is_a_file(node: Any, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("not a store")
    with pytest.raises((InvalidInput, StorageError)) as caught:
        node.rank(0, 1, path)
    assert str(path) in caught.value.message


def test_absent_store_is_not_made_by_reading(node: Any, tmp_path: Path) -> None:
    one = node.rank(0, 1, tmp_path / "absent")
    with pytest.raises(NotFound):
        one.ask("load", expect={})
    assert not (tmp_path / "absent").exists()


@pytest.mark.root
def test_read_only_store_loads_and_refuses_to_save(node: Any, tmp_path: Path) -> None:
    store = tmp_path / "store"
    ranks = node.world(2, store)
    save_all(ranks, 1, lambda r: r)
    for one in ranks:
        one.ask("close")
        one.end()
    node.wait_agent_gone()
    with mounted("--bind", str(store), str(store)):
        subprocess.run(["mount", "-o", "remount,bind,ro", str(store)], check=True)
        again = node.world(2, store)
        for one in again:
            one.ask("load", expect=data(one.rank))
            one.send("save", epoch=2, items=data(one.rank))
        for one in again:
            error = from_wire(one.answer()["error"])
            assert isinstance(error, StorageError)
            assert str(store) in error.message
            one.ask("load", expect=data(one.rank))
        for one in again:
            one.end()
        node.wait_agent_gone()


@pytest.mark.root
def test_another_file_system_under_a_known_path_is_another_store(node: Any, tmp_path: Path) -> None:
    store = tmp_path / "store"
    one = node.rank(0, 1, store)
    save_all([one], 1, lambda r: 1)
    with mounted("-t", "tmpfs", "none", str(store)):
        # It may be a mount that came back wrong: nothing is written to it, however often.
        for _ in range(2):
            answer = one.ask("save", epoch=2, items=data(2), wait_for="durable")
            assert isinstance(from_wire(answer["error"]), StorageError)
            assert list(store.iterdir()) == []
        one.ask("close")
        one.end()
        node.wait_agent_gone()
        # Who connects anew means what is there.
        anew = node.rank(0, 1, store)
        save_all([anew], 2, lambda r: 2)
        anew.ask("load", expect=data(2))
        assert anew.ask("epochs")["epochs"] == [2]
        anew.ask("close")
        anew.end()
        node.wait_agent_gone()
    other = node.rank(0, 1, store)
    other.ask("load", expect=data(1))
    assert other.ask("epochs")["epochs"] == [1]


def test_store_of_another_job_is_refused(node: Any, tmp_path: Path) -> None:
    one = node.rank(0, 1, tmp_path / "store", job="mine")
    save_all([one], 1, lambda r: 1)
    one.ask("close")
    one.end()
    node.wait_agent_gone()
    other = node.rank(0, 1, tmp_path / "store", job="yours")
    error = from_wire(other.ask("save", epoch=2, items=data(2))["error"])
    assert isinstance(error, InvalidInput)
    assert "mine" in error.message
    assert "yours" in error.message
    other.ask("load", expect=data(1))


def cli(node: Any, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "groupio.cli", *arguments],
        env=node.environ,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_drain_finishes_what_is_in_flight_and_new_saves_get_a_new_agent(
    make_node: Any, tmp_path: Path
) -> None:
    node = make_node(idle_s="30")
    ranks = node.world(2, tmp_path / "store")
    for one in ranks:
        one.send("save", epoch=1, items=data(one.rank), wait_for="staged")
    for one in ranks:
        assert one.answer()["error"] is None
    first = node.agent_pid()
    assert cli(node, "agent", "drain").returncode == 0
    for one in ranks:
        one.ask("wait", epoch=1, timeout_s=30)
    for epoch in (2, 3):
        for one in ranks:
            one.send("save", epoch=epoch, items=data(epoch), wait_for="durable")
        errors = [one.answer(40)["error"] for one in ranks]
        if errors == [None, None]:
            break
        assert all(isinstance(from_wire(e), (AgentLost, GroupAborted)) for e in errors if e)
    assert errors == [None, None]
    assert node.agent_pid() != first


def test_stop_gives_up_what_is_not_staged(make_node: Any, tmp_path: Path) -> None:
    node = make_node(idle_s="30")
    ranks = node.world(2, tmp_path / "store")
    save_all(ranks, 1, lambda r: r)
    ranks[0].send("save", epoch=2, items=data(2))
    node.until(lambda s: s["jobs"][0]["groups"])
    stopped = node.agent_pid()
    assert cli(node, "agent", "stop").returncode == 0
    error = from_wire(ranks[0].answer(20)["error"])
    assert isinstance(error, AgentLost)
    deadline = time.monotonic() + 20
    while node.agent_pid() == stopped:  # a rank may have started the next one already
        assert time.monotonic() < deadline
        time.sleep(0.05)
    ranks[0].ask("load", expect=data(0))


def test_start_is_race_safe(node: Any, tmp_path: Path) -> None:
    ranks = [node.start(r) for r in range(6)]
    for r, one in enumerate(ranks):
        one.send("connect", store=str(tmp_path / "store"), rank=r, world_size=6)
    for one in ranks:
        one.answer()
    assert len(node.status()["clients"]) == 6
    assert node.log().count("memory budget") == 1


def test_runtime_directory_of_somebody_else_is_refused(make_node: Any, tmp_path: Path) -> None:
    node = make_node()
    node.paths.directory.mkdir(mode=0o777)
    os.chmod(node.paths.directory, 0o777)
    one = node.rank(0, 1, tmp_path / "store")
    error = from_wire(one.ask("save", epoch=1, items=data(1))["error"])
    assert "can be written by others" in error.message


def test_first_save_into_a_directory_that_exists(node: Any, tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    ranks = node.world(2, store)
    assert os.listdir(store) == []
    save_all(ranks, 1, lambda r: r)
    ranks[0].ask("load", expect=data(0))


def test_a_closed_client_does_not_keep_the_agent(node: Any, tmp_path: Path) -> None:
    one = node.rank(0, 1, tmp_path / "store")
    save_all([one], 1, lambda r: r)
    one.ask("close")
    node.wait_agent_gone(10)
    assert one.process.poll() is None
