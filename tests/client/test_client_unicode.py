"""Text that UTF-8 cannot say is refused where it is given, before anything has begun."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import groupio
from groupio import InvalidInput
from groupio.agent.process import runtime_paths
from groupio.client.address import recorded_job
from groupio.client.arguments import check_patterns
from groupio.client.launch import launch_id

ODD = os.fsdecode(b"a\xff")


@pytest.mark.parametrize(
    ("store", "job", "said"),
    [
        (ODD, None, "path"),
        (f"{ODD}/store", None, "path"),
        ("file:///tmp/%FF/\udcff", None, "path"),
        ("store", ODD, "job="),
        ("store", "\ud800", "job="),
    ],
)
def test_paths_and_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str, job: str | None, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GROUPIO_RUNTIME_DIR", str(tmp_path / "runtime"))
    with pytest.raises(InvalidInput, match=f"(?s){said}.*not valid U") as caught:
        groupio.connect(store, job=job, rank=0, world_size=1)
    caught.value.message.encode()  # so that every log and message can hold it
    assert not (tmp_path / "runtime").exists(), "no agent was started"


def test_a_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ODD
    folder.mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(InvalidInput, match="not valid UTF-8"):
        groupio.connect("store", rank=0, world_size=1)


def test_patterns_and_settings() -> None:
    with pytest.raises(InvalidInput, match="not valid Unicode"):
        check_patterns(["weight", ODD])
    fields: list[dict[str, Any]] = [{"failure_domain": ODD}, {"runtime_dir": f"/tmp/{ODD}"}]
    for given in fields:
        with pytest.raises(InvalidInput, match="not valid Unicode"):
            groupio.Settings(**given)
    with pytest.raises(InvalidInput, match="not valid Unicode"):
        groupio.Settings.from_env({"GROUPIO_FAILURE_DOMAIN": ODD})


def test_what_the_environment_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ODD
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    assert ODD not in str(runtime_paths(None, "1").directory)
    environ = {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": ODD, "MASTER_PORT": "1"}
    found = launch_id(environ)
    assert found is not None
    assert found.encode() == b"a\\udcff:1"
    (tmp_path / "groupio.json").write_text('{"job": "\\ud800"}')
    assert recorded_job(str(tmp_path)) == ""
