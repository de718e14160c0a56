"""The unit for systemd and the manifest for Kubernetes are what those accept, and fit the code."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from shutil import which
from typing import Any

import kubernetes_validate
import pytest
import yaml
from typer.main import get_command

import groupio
from groupio.cli.main import app
from groupio.settings import Settings

DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.fixture
def daemonset() -> Any:
    return yaml.safe_load((DEPLOY / "daemonset.yaml").read_text())


def test_the_manifest_fits_the_schema(daemonset: Any) -> None:
    kubernetes_validate.validate(daemonset, kubernetes_validate.latest_version(), strict=True)
    del daemonset["spec"]["template"]["spec"]["containers"][0]["name"]
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(daemonset, kubernetes_validate.latest_version(), strict=True)


def test_the_parts_of_the_manifest_belong_together(daemonset: Any) -> None:
    spec = daemonset["spec"]["template"]["spec"]
    assert (
        daemonset["spec"]["selector"]["matchLabels"].items()
        <= daemonset["spec"]["template"]["metadata"]["labels"].items()
    )
    (agent,) = spec["containers"]
    volumes = {volume["name"] for volume in spec["volumes"]}
    for container in (agent, *spec["initContainers"]):
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        assert container["image"] == f"groupio:{groupio.__version__}"
    environment = {one["name"]: one.get("value") for one in agent["env"]}
    settings = Settings.from_env({name: value for name, value in environment.items() if value})
    mounts = {mount["mountPath"] for mount in agent["volumeMounts"]}
    assert settings.runtime_dir in mounts
    # The staging memory counts against the pod's limit.
    limit = int(agent["resources"]["limits"]["memory"].removesuffix("Gi")) << 30
    assert settings.memory_bytes is not None
    assert settings.memory_bytes < limit
    for command in (agent["command"], agent["lifecycle"]["preStop"]["exec"]["command"]):
        check_command(command)
    check_command(agent["readinessProbe"]["exec"]["command"])


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    if which("systemd-analyze") is None:
        pytest.skip("peer not installed: systemd-analyze (Debian package systemd)")
    program = Path(sys.executable).with_name("groupio")
    text = unit().replace("/opt/groupio/bin/groupio", str(program))
    assert str(program) in text

    def verify(text: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "groupio-agent.service").write_text(text)
        return subprocess.run(
            ["systemd-analyze", "verify", "--user", str(tmp_path / "groupio-agent.service")],
            env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    done = verify(text)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    broken = verify(text.replace("KillMode=mixed", "KillMode=sometimes"))
    assert "kill mode" in broken.stderr


def test_the_commands_of_the_unit_exist() -> None:
    lines = [line for line in unit().splitlines() if line.startswith("Exec")]
    assert len(lines) == 2
    for line in lines:
        check_command(shlex.split(line.partition("=")[2]))
    examples = [line.removeprefix("#").strip() for line in unit().splitlines()]
    named = dict(line.split("=", 1) for line in examples if line.startswith("GROUPIO_"))
    assert named
    token = named.pop("GROUPIO_TOKEN_FILE")
    assert token
    settings = Settings.from_env(named)
    assert (settings.memory_bytes, settings.uplink_bytes_per_s) == (64 << 30, 12.5e9)


def unit() -> str:
    return (DEPLOY / "groupio-agent.service").read_text()


def check_command(words: list[str]) -> None:
    """``groupio ...`` has these commands and options."""
    assert words[0].rpartition("/")[2] == "groupio"
    command: Any = get_command(app)
    for word in words[1:]:
        if word.startswith("--"):
            names = [name for option in command.params for name in option.opts]
            assert word in names, (words, names)
        elif hasattr(command, "commands"):
            command = command.commands[word]
