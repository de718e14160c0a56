"""Starting the agent: once, whoever comes; and a clear error when it does not come up."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from agent_tools import WAIT_S

import groupio
from groupio import Settings, wire
from groupio.agent import process, spawn
from groupio.errors import AgentLost, InvalidInput


@pytest.fixture
def quick(paths: process.RuntimePaths) -> Settings:
    return Settings(runtime_dir=str(paths.directory), idle_s=30.0)


def test_many_ranks_start_one_agent(
    paths: process.RuntimePaths, quick: Settings, end_agent: Callable[[], int | None]
) -> None:
    code = (
        "import sys\n"
        "from groupio import Settings\n"
        "from groupio.agent.spawn import ensure_agent\n"
        "print(ensure_agent(Settings(runtime_dir=sys.argv[1]), 60))\n"
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(paths.directory)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(6)
    ]
    answers = [rank.communicate(timeout=WAIT_S)[0].strip() for rank in ranks]
    assert answers == [str(paths.socket)] * 6
    assert paths.log.read_text().count("agent ends") == 0
    assert paths.log.read_text().count("memory budget") == 1
    first = process.holder_pid(paths)
    assert first is not None
    assert os.getsid(first) == first or os.getsid(first) != os.getsid(0)
    assert os.readlink(f"/proc/{first}/cwd") == "/"
    assert spawn.ensure_agent(quick, WAIT_S) == paths.socket
    assert process.holder_pid(paths) == first
    assert end_agent() == first
    assert spawn.ensure_agent(quick, WAIT_S) == paths.socket
    assert process.holder_pid(paths) not in (None, first)


def test_the_agent_inherits_nothing_it_should_not(
    paths: process.RuntimePaths, quick: Settings, end_agent: Callable[[], int | None]
) -> None:
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    spawn.ensure_agent(quick, WAIT_S)
    os.close(writer)
    # Only the end of all writers gives an end of file here.
    assert os.read(reader, 1) == b""
    os.close(reader)
    pid = process.holder_pid(paths)
    targets = {os.readlink(f"/proc/{pid}/fd/{n}") for n in (0, 1, 2)}
    assert targets == {os.devnull, str(paths.log)}
    assert paths.log.stat().st_mode & 0o777 == 0o600


def test_this_very_package_is_what_the_agent_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    home = Path(groupio.__file__).resolve().parent.parent
    monkeypatch.setenv("PYTHONPATH", "relative:/absolute")
    path = spawn._environment()["PYTHONPATH"].split(os.pathsep)
    assert path == [str(home), os.path.abspath("relative"), "/absolute"]


def program(tmp_path: Path, body: str) -> str:
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o700)
    return str(script)


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("exit 7", r"ended at once \(exit code 7\)"),
        ("exec sleep 600", "did not get ready in time"),
        (r"""printf '{"ready": false, "reason": "no luck"}' >/proc/self/fd/$7""", "no luck"),
    ],
)
def test_an_agent_that_does_not_come_up_is_agent_lost_naming_the_log(
    paths: process.RuntimePaths,
    quick: Settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    body: str,
    complaint: str,
) -> None:
    monkeypatch.setattr(sys, "executable", program(tmp_path, body))
    with pytest.raises(AgentLost, match=complaint) as caught:
        spawn.ensure_agent(quick, 0.3)
    assert caught.value.log == str(paths.log)
    assert str(paths.log) in str(caught.value)
    with process.starter_lock(paths, time.monotonic()):
        pass  # the next one can try


def test_an_interpreter_that_is_gone_is_named(
    quick: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(AgentLost, match="/nonexistent/python cannot be run"):
        spawn.ensure_agent(quick, 5)


def test_an_agent_that_lives_but_does_not_answer_is_named(
    paths: process.RuntimePaths, quick: Settings
) -> None:
    residence = process.Residence.take(paths)
    assert residence.retire()
    with pytest.raises(AgentLost, match=f"process {os.getpid()}.* does not end"):
        spawn.ensure_agent(quick, 0.1)
    residence.close()


def test_a_busy_agent_counts_as_running(paths: process.RuntimePaths, quick: Settings) -> None:
    residence = process.Residence.take(paths)
    residence.listener.listen(0)
    waiting = wire.connect(paths.socket, timeout_s=5)
    spawn_timeout, spawn._CONNECT_S = spawn._CONNECT_S, 0.05
    try:
        assert spawn.ensure_agent(quick, 5) == paths.socket
    finally:
        spawn._CONNECT_S = spawn_timeout
        waiting.close()
        residence.close()


def test_an_untrusted_runtime_directory_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(InvalidInput, match="written by others"):
        spawn.ensure_agent(Settings(runtime_dir=str(tmp_path)), 5)
