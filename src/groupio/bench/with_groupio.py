"""groupio itself, with and without the DCP door."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any, ClassVar

import groupio.torch
from groupio.bench.place import Place
from groupio.bench.state import State
from groupio.bench.system import Moments, System
from groupio.client.handle import SaveHandle
from groupio.errors import NotFound

LOOKED = (
    "the job looked for a checkpoint before its first save, untimed, which started the agent and "
    "let it prepare memory"
)


class WithDoor(System):
    """``groupio.torch.save`` as users call it. Its agent is its own, so the first save is one."""

    door: ClassVar[bool] = True

    def __init__(self, folder: Path, place: Place, timeout_s: float) -> None:
        super().__init__(folder, place, timeout_s)
        self._store = os.fspath(folder / "store")
        # The socket's path must be short; the launcher gives the directory and removes it.
        self._runtime = os.path.join(runtime_root(), folder.name)

    def _own_agent(self) -> None:
        os.environ["GROUPIO_RUNTIME_DIR"] = self._runtime

    def look(self, state: State) -> str:
        """Look for a checkpoint to go on from; there is none."""
        self._own_agent()
        try:
            groupio.torch.load(state.state_dict, self._store)
        except NotFound:
            return LOOKED
        raise AssertionError(f"{self._store} is not new")

    def begin(self, state: State, epoch: int) -> SaveHandle:
        """Return when the tensors may be overwritten."""
        self._own_agent()
        return groupio.torch.save(
            state.state_dict, self._store, step=epoch, dcp_door=self.door, deadline_s=self.timeout_s
        )

    def save(self, state: State, epoch: int) -> Moments:
        """Save and wait until the epoch is durable and, with a door, until that is published."""
        handle = self.begin(state, epoch)
        stall = time.monotonic()
        times = handle.wait("durable", timeout_s=self.timeout_s)
        waited = time.monotonic()

        def at(seconds: float | None) -> float | None:
            # Not from before the call: the first one of all also makes the connection.
            return None if seconds is None else handle._called_at + seconds

        return Moments(
            stall=stall,
            staged=at(times.staged),
            remote=at(times.remote),
            durable=at(times.durable),
            door=waited if self.door else None,
            note="; ".join(times.notes),
        )

    def load(self, state: State, epoch: int) -> int | None:
        """Load in place, as a group."""
        self._own_agent()
        report: Any = groupio.torch.load(state.state_dict, self._store, step=epoch)
        found: int | None = getattr(report, "bytes_read", None)
        return found

    def forget(self, epoch: int) -> None:
        """Keep it: later epochs refer to its segments."""

    def close(self) -> None:
        """Close the clients of this process."""
        groupio.torch.close()


class WithoutDoor(WithDoor):
    """``groupio.torch.save(dcp_door=False)``."""

    door = False


def runtime_root() -> str:
    """The directory for the agents' runtime directories."""
    return os.environ.get("GROUPIO_BENCH_RUNTIME") or tempfile.gettempdir()
