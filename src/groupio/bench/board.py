"""Shared board of ``groupio bench coordination``: times of steps, and the start signal.

A file of float64 readings of ``time.monotonic``, which all processes of a machine share, mapped by
each of them; 0 is "not yet". Epochs are counted from 1, and each has a row of its own.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from groupio.errors import GroupTimeout, Outcome

POLL_S = 0.01
"""Between two looks for a start that is not fixed yet; who waits shall not burden who works."""

GROUP = ("open", "plan", "last_hashed", "plan_begun", "planned", "orders_sent")
"""Columns of a group: the two starts that the benchmark fixes, and what its controller did."""

MEMBER = ("ready", "opened", "granted")
"""Columns of a member: about to open its save, told its agent, has its memory."""

NODE = ("start_copy", "held", "complete", "hashed", "ordered", "cpu_start", "cpu_end", "learnt")
"""Columns of an agent: told to let members copy, all chunks named and waiting for the start,
released, its report made, its order taken, its CPU seconds at the start and with the order, and
when it knew the chunks of the committed epoch."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What every process of a run has to know. Sizes in bytes, paths absolute."""

    members: int
    agents: int
    chunks: int
    chunk_bytes: int
    epochs: int
    folder: str
    store: str
    timeout_s: float

    def node_of(self, rank: int) -> int:
        """The number of the agent that serves a member: neighbours share one."""
        return rank * self.agents // self.members

    def runtime_dir(self, node: int) -> Path:
        """Where the agent of a node lives."""
        return Path(self.folder, f"n{node}")

    @classmethod
    def load(cls, folder: str) -> Plan:
        """The plan of the run in ``folder``."""
        return msgspec.json.decode(Path(folder, "plan.json").read_bytes(), type=cls)

    def save(self) -> None:
        """Leave the plan where :meth:`load` finds it, and an empty board."""
        Path(self.folder, "plan.json").write_bytes(msgspec.json.encode(self))
        cells = len(GROUP) + self.members * len(MEMBER) + self.agents * len(NODE)
        Path(self.folder, "board").write_bytes(bytes(8 * cells * (self.epochs + 1)))


class Board:
    """The readings of one run; each cell is written by one process only."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        cells: npt.NDArray[np.float64] = np.memmap(
            Path(plan.folder, "board"), np.float64, "r+"
        ).reshape(plan.epochs + 1, -1)
        first, second = len(GROUP), len(GROUP) + plan.members * len(MEMBER)
        self._group = cells[:, :first]
        self._members = cells[:, first:second].reshape(-1, plan.members, len(MEMBER))
        self._nodes = cells[:, second:].reshape(-1, plan.agents, len(NODE))

    def group(self, epoch: int, column: str) -> float:
        """A reading of the whole group."""
        return float(self._group[epoch, GROUP.index(column)])

    def members(self, epoch: int, column: str) -> npt.NDArray[np.float64]:
        """The readings of all members."""
        return self._members[epoch, :, MEMBER.index(column)]

    def nodes(self, epoch: int, column: str) -> npt.NDArray[np.float64]:
        """The readings of all agents."""
        return self._nodes[epoch, :, NODE.index(column)]

    def say(self, epoch: int, column: str, at: float | None = None) -> None:
        """Set a reading of the group, now or ``at``; the last one counts."""
        if 0 < epoch <= self._plan.epochs:
            self._group[epoch, GROUP.index(column)] = time.monotonic() if at is None else at

    def say_member(self, epoch: int, rank: int, column: str) -> None:
        """A member is so far, now."""
        if 0 < epoch <= self._plan.epochs:
            self.members(epoch, column)[rank] = time.monotonic()

    def say_node(self, epoch: int, node: int, column: str, value: float | None = None) -> None:
        """An agent is so far, now; or another ``value``."""
        if 0 < epoch <= self._plan.epochs:
            self.nodes(epoch, column)[node] = time.monotonic() if value is None else value

    def await_start(self, epoch: int, column: str) -> None:
        """Sleep until the start ``column``, once it is fixed. GroupTimeout when it never is."""
        end = time.monotonic() + self._plan.timeout_s
        while not self.group(epoch, column):
            if time.monotonic() > end:
                raise late(f"the start of {column!r} in epoch {epoch}", self._plan.timeout_s)
            time.sleep(POLL_S)
        time.sleep(max(0.0, self.group(epoch, column) - time.monotonic()))


def late(what: str, timeout_s: float) -> GroupTimeout:
    """The error for something that did not come within the time of the run."""
    return GroupTimeout(
        f"bench coordination: {what} did not come within {timeout_s:.0f} s; give more --timeout, "
        "or fewer members",
        outcome=Outcome.UNKNOWN,
    )


def items(plan: Plan, rank: int, epoch: int) -> dict[str, Any]:
    """What a member saves: as many items as chunks, of the same names and sizes on all of them.

    Every chunk of every member and every epoch is another one.
    """
    made = np.random.Generator(np.random.SFC64([epoch, rank]))
    state = made.integers(0, 256, (plan.chunks, plan.chunk_bytes), np.uint8)
    return {f"model.layers.{number}.weight": state[number] for number in range(plan.chunks)}
