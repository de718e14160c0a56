"""An agent of its own for tests, which can be made to wait at chosen points, or to write slowly.

Runs like ``groupio agent run``. Before it passes a point, it waits as long as the file of that
name in ``TEST_HOLDS`` exists; it makes ``<point>.reached`` when it comes there. A file ``slow``
in that folder holds the bytes per second at which it writes segments. With ``TEST_HURRY`` it waits
less for others than a real one, with ``TEST_PATIENT`` longer than any test.

- ``pull``: chunks of peers come next
- ``seal``: all bytes of a round were handed to the store, none of them is durable yet
- ``prepare``, ``decide``: the controller's steps in the store
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from groupio.agent import __main__ as agent
from groupio.agent import links, unjoined
from groupio.agent.segment_writer import SegmentWriter
from groupio.controller import store
from groupio.controller.store import JobStore
from groupio.fabric.tcp import TcpFabric
from groupio.protocol import following, joining, proving
from groupio.protocol.linkconfig import LinkConfig
from groupio.settings import Settings

HOLDS = Path(os.environ["TEST_HOLDS"])


def wait_at(point: str) -> None:
    if (HOLDS / point).exists():
        (HOLDS / f"{point}.reached").touch()
    while (HOLDS / point).exists():
        time.sleep(0.005)


def hold(kind: type, name: str, point: str, when: Callable[[Any], bool] = lambda _: True) -> None:
    real: Callable[..., Any] = getattr(kind, name)

    def held(*args: Any, **named: Any) -> Any:
        if when(args[0]):
            wait_at(point)
        return real(*args, **named)

    setattr(kind, name, held)


def slow_down() -> None:
    real = SegmentWriter.write

    def write(self: SegmentWriter, run: list[Any]) -> Any:
        if (HOLDS / "slow").exists():
            time.sleep(sum(b.nbytes for b in run) / float((HOLDS / "slow").read_text()))
        return real(self, run)

    SegmentWriter.write = write  # type: ignore[method-assign]


def set_links(**others: float) -> None:
    """Links of this process have other times than real ones."""
    made = LinkConfig.__init__
    names = [field.name for field in dataclasses.fields(LinkConfig)]
    defaults = zip(names, made.__defaults__ or (), strict=True)
    made.__defaults__ = tuple(others.get(name, value) for name, value in defaults)


def be_patient() -> None:
    """Silence says nothing, and a controller that is only away is never replaced."""
    set_links(silence_s=300.0)
    following.RECONNECT_S = 300.0


def hurry() -> None:
    """Patience as short as a loaded machine allows: seconds become fractions of them."""
    set_links(heartbeat_s=0.3, silence_s=2.0, retry_max_s=1.0)
    following.RECONNECT_S = 1.5
    joining.RESUME_S = 3.0
    proving.PROOF_S = 2.0
    store.LOOK_S = 2.0
    unjoined.REFUSED_S = 4.0


if __name__ == "__main__":
    if os.environ["TEST_HURRY"]:
        hurry()
    if os.environ["TEST_PATIENT"]:
        be_patient()
    if os.environ["TEST_EQUAL_LINKS"]:
        links.SAMPLE_BYTES_MIN = 1 << 60  # nothing is measured, so that every node writes its own
    hold(TcpFabric, "pull", "pull")
    hold(SegmentWriter, "finish", "seal", lambda writer: writer.count > 0)
    hold(JobStore, "prepare", "prepare")
    hold(JobStore, "decide", "decide")
    slow_down()
    settings = json.dumps(dataclasses.asdict(Settings.from_env()))
    sys.exit(agent.main(["--settings", settings, "--foreground"]))
