"""An agent in which one call of the system fails as long as a file of that name is in
``TEST_HOLDS``; the file has the number of the error, or "thread"."""

from __future__ import annotations

import dataclasses
import json
import os
import selectors
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from groupio.agent import __main__ as agent
from groupio.agent import arena
from groupio.agent.arena import MemberArena
from groupio.settings import Settings

HOLDS = Path(os.environ["TEST_HOLDS"])


def failing(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    """``real``, which fails at the test's word."""

    def call(*args: Any, **named: Any) -> Any:
        try:
            what = (HOLDS / name).read_text() if (HOLDS / name).exists() else ""
        except OSError:
            what = ""
        if not what:
            return real(*args, **named)
        if name in ("sendmsg", "recvmsg_into") and args[0].family != socket.AF_UNIX:
            return real(*args, **named)
        (HOLDS / f"{name}.failed").touch()
        if what == "thread":
            raise RuntimeError("can't start new thread")
        raise OSError(int(what), os.strerror(int(what)))

    return call


def main() -> int:
    for name in ("memfd_create", "ftruncate", "pidfd_open", "dup"):
        setattr(os, name, failing(name, getattr(os, name)))
    for name in ("sendmsg", "recvmsg_into"):
        setattr(socket.socket, name, failing(name, getattr(socket.socket, name)))
    for name in ("register", "modify"):
        setattr(
            selectors.EpollSelector, name, failing(name, getattr(selectors.EpollSelector, name))
        )
    arena.map_shared = failing("map_shared", arena.map_shared)
    MemberArena.punch = failing("punch", MemberArena.punch)  # type: ignore[method-assign]
    start = failing("thread", threading.Thread.start)
    threading.Thread.start = start  # type: ignore[method-assign]
    settings = json.dumps(dataclasses.asdict(Settings.from_env()))
    return agent.main(["--settings", settings, "--foreground"])


if __name__ == "__main__":
    sys.exit(main())
