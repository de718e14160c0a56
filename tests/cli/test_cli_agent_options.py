"""The options of ``agent``: what they set, and what is said of mistakes."""

from __future__ import annotations

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
        (("--uplink", "12 parsecs"), "--uplink '12 parsecs' cannot be read"),
        (("--fabric", "0"), "fabric_bytes_per_s=0.0 is not bytes per second"),
        (("--idle", "soon"), "--idle 'soon' cannot be read: give seconds, or never"),
        (("--node", "a b"), "node='a b' is not a name"),
        (("--controller", "there"), "controller='there' is not local, store"),
        (("--listen", "a:b:c"), "listen='a:b:c' is not HOST"),
    ],
)
def test_a_wrong_option_is_told_in_one_line(
    groupio: Command, options: tuple[str, ...], words: str
) -> None:
    done = groupio("agent", "run", *options)
    assert (done.code, done.out) == (2, "")
    assert words in done.err
    assert groupio("status").code == 1
