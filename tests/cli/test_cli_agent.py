"""``agent`` and ``status`` with a real agent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_help import Command
from prometheus_client.parser import text_string_to_metric_families

import groupio as library
from groupio.cli import asking
from groupio.cli.status import document, picture, ranks


@pytest.fixture
def no_agent_left(groupio: Command) -> Iterator[None]:
    """Whatever a test does, its agent ends with it."""
    yield
    assert groupio("agent", "stop").code == 0


def wait_for(condition: Any) -> Any:
    deadline = time.monotonic() + 60
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


@pytest.mark.usefixtures("no_agent_left")
def test_run_status_and_drain(groupio: Command) -> None:
    assert groupio("status").code == 1
    assert groupio("agent", "drain", "--json").json == {
        "schema": "groupio/agent-drain/1",
        "ran": False,
        "ended": True,
    }
    first = groupio("agent", "run", "--json")
    assert (first.code, first.json["started"]) == (0, True)
    again = groupio("agent", "run", "--json").json
    assert (again["started"], again["agent"]) == (False, first.json["agent"])
    assert "already runs" in groupio("agent", "run").out

    done = groupio("status", "--json")
    assert done.code == 0
    assert done.json["running"] is True
    assert done.json["agent"]["pid"] == first.json["agent"]["pid"]
    assert Path(done.json["agent"]["log"]).is_file()
    assert "0 B leased of" in groupio("status").out

    ended = groupio("agent", "drain", "--json")
    assert (ended.code, ended.json["ran"], ended.json["ended"]) == (0, True, True)
    assert groupio("status", "--json").json["running"] is False


@pytest.mark.usefixtures("no_agent_left")
def test_status_names_who_is_waited_for(groupio: Command, tmp_path: Path) -> None:
    saves: list[library.SaveHandle] = []
    with library.connect(tmp_path / "store", rank=0, world_size=3) as client:
        items = {"x": np.arange(9)}
        thread = threading.Thread(
            target=lambda: saves.append(client.save(items, epoch=7, deadline_s=60))
        )
        thread.start()
        groups = wait_for(lambda: [g for j in jobs(groupio) for g in j["groups"]])
        assert [(g["epoch"], g["missing"], g["copied"]) for g in groups] == [(7, [1, 2], 0)]
        text = groupio("status").out
        assert "gathering" in text
        assert "1-2" in text
        assert groupio("agent", "stop").code == 0
        thread.join(60)
        assert isinstance(saves[0].error, library.GroupIOError)


def jobs(groupio: Command) -> Any:
    return groupio("status", "--json").json["jobs"]


@pytest.mark.usefixtures("no_agent_left")
def test_the_foreground_agent_ends_with_an_interrupt(groupio: Command, tmp_path: Path) -> None:
    environment = {**os.environ, "GROUPIO_RUNTIME_DIR": str(tmp_path / "runtime")}
    command = [sys.executable, "-m", "groupio.cli", "agent", "run", "--foreground"]
    agent = subprocess.Popen(command, env=environment)
    try:
        wait_for(lambda: groupio("status").code == 0)
        assert groupio("status", "--json").json["agent"]["pid"] == agent.pid
        agent.send_signal(2)
        assert agent.wait(60) == 0
    finally:
        agent.kill()
        agent.wait()


@pytest.mark.usefixtures("no_agent_left")
@pytest.mark.parametrize("as_json", [True, False])
def test_watching_goes_on_in_a_pipe(groupio: Command, tmp_path: Path, as_json: bool) -> None:
    environment = {**os.environ, "GROUPIO_RUNTIME_DIR": str(tmp_path / "runtime")}
    command = [sys.executable, "-m", "groupio.cli", "status", "--watch", "--interval", "0.1"]
    watch = subprocess.Popen(
        [*command, *["--json"] * as_json],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        # Whoever runs the tests in the background may have interrupts ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert watch.stdout is not None
    try:
        lines = [watch.stdout.readline() for _ in range(3)]
        if as_json:
            assert [json.loads(line)["running"] for line in lines] == [False] * 3
        else:
            assert lines == [lines[0], "\n", lines[0]]
            assert "no agent runs" in lines[0].lower()
        watch.send_signal(2)
        assert watch.wait(60) == 0
    finally:
        watch.kill()
        watch.wait()
        watch.stdout.close()


def test_a_silent_agent_is_an_error(
    groupio: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from groupio import wire
    from groupio.agent import process

    paths = asking.paths()
    process.make_runtime_dir(paths)
    monkeypatch.setattr(asking.ask, "__kwdefaults__", {"timeout_s": 0.2})
    with wire.listen(paths.socket):
        done = groupio("status")
    assert done.code == 2
    assert "did not answer" in done.err


def test_the_picture_of_a_busy_agent(groupio: Command) -> None:
    from rich.console import Console

    agent = {"pid": 1, "version": "0", "uptime_s": 90, "log": "/[log]", "draining": True}
    memory = {"budget": 2 << 30, "leased": 1 << 30, "quarantined": 0, "free": 5}
    group = {"epoch": 3, "phase": "copying", "world_size": 4, "missing": [3], "copied": 3}
    job = {"store": "/s", "job": "j", "incarnation": 1, "lineage": 1, "last_committed": None}
    answer = {
        "agent": agent | {"memory": memory},
        "jobs": [job | {"groups": [group | {"age_s": 4000}]}],
        "clients": [{"pid": 7, "rank": 0, "world_size": 4, "store": "/s"}],
    }
    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(picture(answer))
    text = console.export_text()
    for words in ("1.0 GiB leased of 2.0 GiB", "draining", "3 of 4", "1.1 h", "/[log]"):
        assert words in text
    console.file.close()
    assert document(answer)["running"] is True


def test_ranks_are_joined_to_runs() -> None:
    assert ranks([]) == ""
    assert ranks([5, 0, 1, 2]) == "0-2, 5"


def test_metrics_are_prometheus_text(groupio: Command, tmp_path: Path) -> None:
    assert groupio("status", "--metrics").code == 1
    with library.connect(tmp_path / "store", rank=0, world_size=1) as client:
        client.save({"x": b"x" * 100_000}, epoch=1).wait("durable", timeout_s=60)
        answer = groupio("status", "--metrics")
        assert answer.code == 0
        families = {family.name: family for family in text_string_to_metric_families(answer.out)}
        hashed = families["groupio_hashed_bytes"].samples[0]
        assert (hashed.name, hashed.value) == ("groupio_hashed_bytes_total", 100_000)
        levels = {s.labels["level"] for s in families["groupio_level_seconds"].samples}
        assert {"staged", "durable"} <= levels
    assert groupio("agent", "drain").code == 0
