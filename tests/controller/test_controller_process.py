"""``groupio controller run`` in processes of its own, with agents that follow it."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from controller_help import Running, controller

import groupio as library
from groupio.cli import main

_RANK = Path(__file__).with_name("controller_rank.py")


def test_agents_follow_a_controller_without_an_agent(
    start: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    store = tmp_path / "store"
    first = start(controller(store, "--job", "alone"))
    news = first.news()
    assert news["state"] == "rules"
    address = news["address"]

    def rank(number: int) -> Running:
        here = {"GROUPIO_NODE": f"n{number}", "GROUPIO_RUNTIME_DIR": str(tmp_path / f"n{number}")}
        command = [str(_RANK), str(store), str(number), "2"]
        return start(command, GROUPIO_CONTROLLER=address, GROUPIO_IDLE_S="1", **here)

    ranks = [rank(0), rank(1)]
    for one in ranks:
        one.say("1")
    assert [one.line() for one in ranks] == ["durable 1", "durable 1"]

    monkeypatch.setenv("GROUPIO_RUNTIME_DIR", str(tmp_path / "n1"))
    assert main.run(["status", "--json"]) == 0
    (job,) = json.loads(capsys.readouterr().out)["jobs"]
    assert (job["controller"], job["term"], job["last_committed"]) == (address, 1, 1)
    assert [node["node"] for node in job["nodes"]] == ["n0", "n1"]
    assert job["saved"]["bytes_deduplicated"] >= 350_000

    # It dies; its agents come back to the one that is started at its place.
    first.process.kill()
    first.process.wait()
    second = start(controller(store, "--listen", address.removeprefix("tcp://")))
    assert "term 2" in second.news()["detail"]
    for one in ranks:
        one.say("2")
    assert [one.line() for one in ranks] == ["durable 2", "durable 2"]
    for one in ranks:
        assert one.process.stdin is not None
        one.process.stdin.close()
        assert one.process.wait(60) == 0
    assert second.end(signal.SIGTERM)[0] == 0
    with library.connect(store, rank=0, world_size=1) as client:
        assert [info.epoch for info in client.epochs()] == [1, 2]
    for name in ("n0", "n1"):
        monkeypatch.setenv("GROUPIO_RUNTIME_DIR", str(tmp_path / name))
        assert main.run(["agent", "stop"]) == 0


def test_the_second_one_ends_at_once_and_says_who_rules(start: Any, tmp_path: Path) -> None:
    store = tmp_path / "store"
    first = start(controller(store))
    address = first.news()["address"]
    second = start(controller(store))
    _, err = second.process.communicate(timeout=60)
    assert second.process.returncode == 1
    assert address in err
    assert "--coordinator etcd://" in err
    assert first.end(signal.SIGINT)[0] == 0
    # It gave its rule up, so the next one has nothing to wait for.
    third = start(controller(store))
    assert third.news()["state"] == "rules"
    assert third.end(signal.SIGTERM)[0] == 0


def test_one_with_another_secret_replaces_none_that_lives(start: Any, tmp_path: Path) -> None:
    """It could not talk to the other's agents; neither finds out who has which by a try."""
    store = tmp_path / "store"
    for mine, theirs in (({}, {"GROUPIO_TOKEN": "5" * 32}), ({"GROUPIO_TOKEN": "5" * 32}, {})):
        first = start(controller(store), **mine)
        first.news()
        second = start(controller(store), **theirs)
        _, err = second.process.communicate(timeout=60)
        assert second.process.returncode == 2
        assert "another token than this process" in err
        assert first.end(signal.SIGTERM)[0] == 0
