"""An agent whose store is away as long as the file ``away`` is in ``TEST_HOLDS``."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from agent_process import HOLDS, hurry

from groupio.agent import __main__ as agent
from groupio.agent.segment_writer import SegmentWriter
from groupio.controller.store import JobStore
from groupio.errors import StorageError
from groupio.settings import Settings


def fail_while_away(kind: type, name: str) -> None:
    real: Callable[..., Any] = getattr(kind, name)

    def failing(*args: Any, **named: Any) -> Any:
        empty = isinstance(args[0], SegmentWriter) and args[0].count == 0
        if (HOLDS / "away").exists() and not empty:
            number = int((HOLDS / "away").read_text() or errno.ESTALE)
            raise StorageError(f"{name}: {os.strerror(number)}", path="/away", errno=number)
        return real(*args, **named)

    setattr(kind, name, failing)


if __name__ == "__main__":
    if os.environ["TEST_HURRY"]:
        hurry()
    fail_while_away(SegmentWriter, "write")
    fail_while_away(SegmentWriter, "finish")
    for step in ("open", "publish", "prepare", "decide"):
        fail_while_away(JobStore, step)
    settings = json.dumps(dataclasses.asdict(Settings.from_env()))
    sys.exit(agent.main(["--settings", settings, "--foreground"]))
