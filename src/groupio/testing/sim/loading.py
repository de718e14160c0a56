"""Loads of simulated ranks, and the promises that a grouped read is held to.

Every member gets its bytes bit for bit, or an error; and as long as nothing fails, each chunk
leaves the store once, for all nodes that read it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from groupio.model import DecisionKey
from groupio.protocol import reading_messages as rm
from groupio.testing.sim.engine import Violated
from groupio.testing.sim.reading import Asks, Pieces, Read, Took

if TYPE_CHECKING:
    from groupio.testing.sim.ranks import Rank
    from groupio.testing.sim.world import Sim

ONCE = 14
"""The number under which "each chunk leaves the store once" is reported; DESIGN.md has it under
its rules for the data path."""


class Loads:
    """Counts what leaves the store, over all nodes."""

    def __init__(self, sim: Sim) -> None:
        self.sim = sim
        self.spoiled: set[str] = set()
        """Reads in which something failed, or memory was used again: chunks may come twice."""
        self.counts: Counter[tuple[str, int]] = Counter()
        self.loads = 0
        """Loads that came to their end through an agent."""
        self.clean = 0
        """Those of them in whose reads nothing had failed."""

    def spoil(self) -> None:
        """A node was lost, or counts as lost: any read may have to get chunks again."""
        for node in self.sim.nodes.values():
            if node.lives:
                self.spoiled.update(map(str, node.reads.open))

    def leaves_store(self, read: Read, row: int) -> None:
        """A node reads a chunk from the store."""
        self.counts[read.name, row] += 1
        if self.counts[read.name, row] > 1 and read.name not in self.spoiled:
            where = f"{read.node.name}, row {row} of {read.name}"
            raise Violated(ONCE, f"a chunk leaves the store again though nothing failed: {where}")

    def ended(self, key: DecisionKey) -> None:
        """A load came to its end."""
        self.loads += 1
        self.clean += str(key) not in self.spoiled


@dataclass(slots=True)
class Load:
    """One load of one rank."""

    key: DecisionKey
    request: int
    left: dict[int, tuple[int, int]]
    digests: list[bytes] = field(default_factory=list)


class Loading:
    """The loads of one rank, one after the other."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.sim = rank.sim
        self.load: Load | None = None
        self._numbers = 0

    def begin(self, key: DecisionKey, group: str = "") -> None:
        """Ask the agent; ``group`` names a load in which all ranks of the launch take part."""
        rank, sim = self.rank, self.sim
        manifest = sim.disk.folders["epochs"][str(key)].content.manifest
        parts = rank.launch.parts and rank.launch.world > 1
        spans = load_of(rank, manifest, parts=parts)
        self._numbers += 1
        digests = [row.tobytes() for row in manifest.chunks.digests]
        self.load = Load(key, self._numbers, dict(spans), digests)
        rows = np.array(list(spans), np.int32)
        starts = np.array([lo for lo, _ in spans.values()], np.int64)
        stops = np.array([hi for _, hi in spans.values()], np.int64)
        members = rank.launch.world if group else 1
        wants = rm.ClientWants(rank.name, self._numbers, rows, starts, stops, group, members)
        rank.send(Asks(key, wants))

    def pieces(self, pieces: Pieces) -> None:
        """Rows may be copied, or will not come."""
        load = self.load
        if load is None or load.key != pieces.key:
            return
        if pieces.why:
            self._read_itself(pieces.why)
            return
        delay = self.sim.options.copy_s * self.sim.rng.random() * self.rank.process.slow
        self.sim.engine.post(delay, self.rank.process, self._copied, load, pieces)

    def _copied(self, load: Load, pieces: Pieces) -> None:
        """The rank has copied chunks out of the agent's memory."""
        if self.load is not load:
            return
        rank = self.rank
        assert pieces.read is not None
        for row in pieces.rows:
            start, stop = load.left.pop(row)
            here = pieces.read.memory.get(row)
            if here is None:
                raise Violated(12, f"{rank.name} copies row {row} of {load.key}, which is gone")
            if here.content != load.digests[row] or not here.start <= start <= stop <= here.stop:
                raise Violated(10, f"{rank.name} got {here} for row {row} of {load.key}")
        took = rm.ClientTook(rank.name, load.request, pieces.rows)
        rank.send(Took(load.key, took, done=not load.left))
        if not load.left:
            self.sim.loads.ended(load.key)
            self._end()

    def broken(self) -> None:
        """The agent is gone: the rank reads the store itself."""
        if self.load is not None:
            self._read_itself("agent lost")

    def _read_itself(self, why: str) -> None:
        load = self.load
        assert load is not None
        if not self.sim.options.rows:
            raise Violated(10, f"{self.rank.name} cannot load {load.key}: {why}, and nothing fails")
        self.sim.oracle.read(load.key)
        took = rm.ClientTook(self.rank.name, load.request, ())
        self.rank.send(Took(load.key, took, done=True))
        self._end()

    def _end(self) -> None:
        self.load = None
        if self.rank.connected:
            self.rank.loaded()

    def __bool__(self) -> bool:
        """A load is under way."""
        return self.load is not None


def load_of(rank: Rank, manifest: Any, *, parts: bool) -> dict[int, tuple[int, int]]:
    """What a rank loads of an epoch: rows of the table, and the bytes of each.

    Its own items; with another world size those of the member in its place, or a part of them.
    """
    members = {member.rank: member for member in manifest.members}
    member = members.get(rank.rank)
    if member is None or parts:
        member = members[rank.rank * len(members) // rank.launch.world % len(members)]
    spans = {}
    for row in np.unique(member.refs).tolist():
        length = int(manifest.chunks.lengths[row])
        half = length // 2
        cut = (0, half) if rank.rank % 2 else (half, length)
        spans[row] = cut if parts and half else (0, length)
    return spans


def newest(sim: Sim) -> DecisionKey | None:
    """The newest epoch of the line, as a reader finds it."""
    shown: dict[int, Any] = sim.shown()
    return shown[max(shown)] if shown else None
