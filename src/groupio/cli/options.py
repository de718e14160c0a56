"""Options that several commands share, and the settings that they change."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Annotated, Any

import typer

from groupio.cli.output import CommandError
from groupio.settings import Settings, parse_rate, parse_size

FOREVER_S = 1e9
"""Thirty years: an agent with this idle time ends when somebody ends it."""

MemoryOption = Annotated[
    str | None,
    typer.Option("--memory", metavar="SIZE", help="Host memory for staging, such as 64GiB."),
]
UplinkOption = Annotated[
    str | None,
    typer.Option("--uplink", metavar="RATE", help="At most to the store, and from it: 12.5GB/s."),
]
FabricOption = Annotated[
    str | None,
    typer.Option("--fabric", metavar="RATE", help="At most to other nodes, and from them: 25GB/s."),
]
DomainOption = Annotated[
    str | None, typer.Option("--domain", help="What fails together with this node (a rack).")
]
NodeOption = Annotated[
    str | None, typer.Option("--node", help="This node's name. Default: the host name.")
]
ListenOption = Annotated[
    str | None,
    typer.Option("--listen", metavar="HOST:PORT", help="Where other nodes reach this process."),
]
ControllerOption = Annotated[
    str | None,
    typer.Option(
        "--controller",
        metavar="WHERE",
        help="Where controllers are: local, store, tcp://HOST:PORT or etcd://HOST:PORT.",
    ),
]
IdleOption = Annotated[
    str | None,
    typer.Option("--idle", metavar="S", help="End after so many idle seconds, or never."),
]
RuntimeDirOption = Annotated[
    str | None,
    typer.Option("--runtime-dir", metavar="DIR", help="Where clients find the agent."),
]
JobOption = Annotated[
    str | None,
    typer.Option("--job", help="The job of a new store. Default: the last part of its path."),
]


def settings_with(**flags: str | None) -> Settings:
    """The settings of the environment, changed by flags that were given.

    The names are those of the flags. CommandError for a value that cannot be read, InvalidInput
    for one that is out of range.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    changed = dict(_read(name, text) for name, text in given.items())
    return replace(Settings.from_env(), **changed)


def _read(name: str, text: str) -> tuple[str, Any]:
    field, parse, expected = _FLAGS[name]
    try:
        return field, parse(text)
    except ValueError:
        flag = name.replace("_", "-")
        raise CommandError(f"--{flag} {text!r} cannot be read: {expected}") from None


def _idle(text: str) -> float:
    return FOREVER_S if text == "never" else float(text)


_RATE = "give bytes per second, such as 12.5GB/s"
_FLAGS: dict[str, tuple[str, Any, str]] = {
    "memory": ("memory_bytes", parse_size, "give a size such as 64GiB"),
    "uplink": ("uplink_bytes_per_s", parse_rate, _RATE),
    "fabric": ("fabric_bytes_per_s", parse_rate, _RATE),
    "domain": ("failure_domain", str, ""),
    "node": ("node", str, ""),
    "listen": ("listen", str, ""),
    "controller": ("controller", str, ""),
    "idle": ("idle_s", _idle, "give seconds, or never"),
    "runtime_dir": ("runtime_dir", os.path.abspath, ""),
}
