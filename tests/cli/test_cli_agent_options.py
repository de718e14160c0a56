"""The options of ``agent``: what they set, and what is said of mistakes."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from cli_help import Command


@pytest.fixture
def no_agent_left(groupio: Command) -> Iterator[None]:
    """Whatever a test does, its agent ends with it."""
    yield
    assert groupio("agent", "stop").code == 0


@pytest.mark.usefixtures("no_agent_left")
def test_options_without_a_command_start_the_agent(groupio: Command) -> None:
    options = ("--memory", "64MiB", "--uplink", "12.5GB/s", "--fabric", "25GB/s")
    options += ("--domain", "rack-3", "--node", "gpu-7", "--listen", "127.0.0.1", "--idle", "never")
    first = groupio("agent", *options, "--controller", "store", "--json")
    assert (first.code, first.json["started"]) == (0, True)
    agent = groupio("status", "--json").json["agent"]
    assert agent["memory"]["budget"] == 64 << 20
    assert agent["node"] == "gpu_7"

    again = groupio("agent", "run", "--memory", "32MiB")
    assert again.code == 0
    assert "already runs" in again.out
    assert "its settings stay as they are" in again.out
    assert "settings" not in groupio("agent").out


def test_options_belong_behind_the_command(groupio: Command) -> None:
    done = groupio("agent", "--memory", "64MiB", "drain")
    assert (done.code, done.out) == (2, "")
    assert "groupio agent drain [OPTIONS]" in done.err
    assert groupio("status").code == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--memory", "much"), "--memory 'much' cannot be read: give a size such as 64GiB"),
        (("--memory", "1MiB"), "memory_bytes=1048576 is not a size of at least 16 MiB"),
        (("--memory", "900TiB"), "bytes, and this machine or its cgroup has"),
        (("--uplink", "12 parsecs"), "--uplink '12 parsecs' cannot be read"),
        (("--fabric", "0"), "fabric_bytes_per_s=0.0 is not bytes per second"),
        (("--idle", "soon"), "--idle 'soon' cannot be read: give seconds, or never"),
        (("--node", "a b"), "node='a b' is not a name"),
        (("--controller", "there"), "controller='there' is not local, store"),
        (("--listen", "a:b:c"), "listen='a:b:c' is not HOST"),
        (("--listen", "127.0.0.1:99999"), "listen='127.0.0.1:99999' is not HOST or HOST:PORT"),
        (("--controller", "tcp://a:70000"), "controller='tcp://a:70000' is not local, store"),
        (("--controller", "etcd://a:1,b:70000"), "with ports of at most 65535"),
        (("--listen", "0.0.0.0"), "GROUPIO_TOKEN_FILE"),
        (("--listen", "10.0.0.1:7400"), "GROUPIO_TOKEN_FILE"),
    ],
)
def test_a_wrong_option_is_told_in_one_line(
    groupio: Command, options: tuple[str, ...], words: str
) -> None:
    done = groupio("agent", "run", *options)
    assert (done.code, done.out) == (2, "")
    assert words in done.err
    assert groupio("status").code == 1


@pytest.mark.parametrize("foreground", [(), ("--foreground",)])
@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"GROUPIO_TOKEN": "short"}, "GROUPIO_TOKEN: a job token has 16 to 4096 bytes"),
        ({"GROUPIO_TOKEN_FILE": "/nowhere/token"}, "the token file /nowhere/token cannot be read"),
        ({"GROUPIO_TOKEN": "7f" * 32, "GROUPIO_TOKEN_FILE": "/a"}, "are both set; unset one"),
    ],
)
def test_a_token_of_no_use_is_told_before_the_agent_starts(
    groupio: Command,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    words: str,
    foreground: tuple[str, ...],
) -> None:
    def exec_nothing(*arguments: object) -> None:
        raise AssertionError("it becomes the agent")

    monkeypatch.setattr(os, "execv", exec_nothing)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    done = groupio("agent", "run", *foreground)
    assert (done.code, done.out) == (2, "")
    assert words in done.err
    assert groupio("status").code == 1
