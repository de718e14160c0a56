"""The disk of the runtime directory is full: the log is lost, not the saves; starts fail typed."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_help import data, save_all

from groupio.errors import AgentLost, from_wire


@pytest.fixture
def node(tmp_path: Path, small_tmpfs: Path, make_node: Any) -> Any:
    made = make_node(idle_s="30", log_level="debug")
    assert made.paths.directory == small_tmpfs
    return made


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid():
        pytest.skip("only root can mount")
    place = tmp_path / "runtime0"
    place.mkdir(mode=0o700)
    options = "size=256k,mode=0700"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], check=True)
    yield place
    # The agent may still be closing its log.
    subprocess.run(["umount", "--lazy", place], check=True)


def fill_up(folder: Path) -> None:
    with contextlib.suppress(OSError), (folder / "full").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def test_a_full_disk_under_the_log_costs_no_save(node: Any, tmp_path: Path) -> None:
    store = tmp_path / "store"
    ranks = node.world(2, store)
    save_all(ranks, 1, lambda r: r)
    agent = node.agent_pid()
    fill_up(node.paths.directory)
    for epoch in range(2, 6):
        save_all(ranks, epoch, lambda r: r)
    late = node.rank(0, 1, tmp_path / "other")
    save_all([late], 1, lambda r: r)
    for one in ranks:
        one.ask("load", expect=data(one.rank))
    assert node.agent_pid() == agent
    node.kill_agent()
    answer = late.ask("save", epoch=2, items=data(0))
    if answer["error"] is not None:
        assert isinstance(from_wire(answer["error"]), AgentLost), answer
    (node.paths.directory / "full").unlink()
    assert late.ask("save", epoch=3, items=data(0), wait_for="durable")["error"] is None
