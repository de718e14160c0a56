"""An agent for tests of grouped reads: it waits, reads slowly or lies as files in ``TEST_HOLDS``
say.

- ``pull``: chunks of peers come next
- ``read``: a chunk of the store comes next
- ``slow_read``: the seconds that each read of the store takes longer
- ``lie``: what peers get from here has a wrong bit
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from typing import Any

from agent_process import HOLDS, hold, hurry

from groupio.agent import __main__ as agent
from groupio.agent.read_sources import StoreSource
from groupio.fabric.base import Served
from groupio.fabric.serving import Outbox
from groupio.fabric.tcp import TcpFabric
from groupio.settings import Settings


def read_slowly() -> None:
    real = StoreSource._read

    def read(self: StoreSource, job: Any) -> None:
        if (HOLDS / "slow_read").exists():
            time.sleep(float((HOLDS / "slow_read").read_text()))
        real(self, job)

    StoreSource._read = read  # type: ignore[method-assign]


def lie() -> None:
    real = Outbox.add

    def add(self: Outbox, row: Any, served: Served) -> None:
        if (HOLDS / "lie").exists():
            wrong = bytearray(served.view)
            wrong[len(wrong) // 2] ^= 1
            served = Served(memoryview(wrong), served.release)
        real(self, row, served)

    Outbox.add = add  # type: ignore[method-assign]


if __name__ == "__main__":
    hurry()
    hold(TcpFabric, "pull", "pull")
    read_slowly()
    hold(StoreSource, "_read", "read")
    lie()
    settings = json.dumps(dataclasses.asdict(Settings.from_env()))
    sys.exit(agent.main(["--settings", settings, "--foreground"]))
