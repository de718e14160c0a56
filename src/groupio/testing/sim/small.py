"""The small world, gone through completely: 2 members, 2 agents, 2 chunks, 1 epoch.

Nothing in it is left to chance. Processes and links fail before every event of a run that concerns
them, store calls fail at every step, messages are lost or doubled one by one; then the same for
every pair.

What would be the same run is not run twice. An agent's crash is the same before any event between
two that concern its node; a cut is the same anywhere between two looks at the links; a fault that
finds nothing to break (a dead process, a step that it cannot strike) is no fault.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from math import isqrt
from typing import Any, NamedTuple

from groupio.testing.sim.engine import Process
from groupio.testing.sim.faults import PROCESSES, Options
from groupio.testing.sim.runner import guarded
from groupio.testing.sim.world import Sim

AT_EVENTS = ("crash n0", "crash n1", "power n0", "power n1", "kill 0", "kill 1", "cut", "one way")
"""What may happen before each event."""

AT_STEPS = ("error", "lost answer", "full")
"""What may happen to each step of a store call."""

FULL = {"lost answer": ("link",), "full": ("write", "link")}
"""The steps that these faults can strike; an error can strike all."""

AT_MESSAGES = ("drop", "duplicate")
"""What may happen to each message between the two nodes."""

AWAY_S = 8.0
"""What fails comes back after so long: longer than a peer is waited for."""

BATCH = 100


class Point(NamedTuple):
    """One fault: ``what`` happens at the event, step or message of this number."""

    what: str
    at: int


Case = tuple[Point, ...]


def options() -> Options:
    """The sizes of the small world."""
    return Options(
        members=2,
        agents=2,
        epochs=1,
        replicas=2,
        chunks=2,
        chunk_bytes=1 << 20,
        train_s=0.01,
        deadline_s=30.0,
        budget=64 << 20,
        rows=frozenset(PROCESSES),
    )


class Script:
    """Puts the faults of one case at their places, and counts the places."""

    def __init__(self, sim: Sim, case: Case) -> None:
        self.sim = sim
        self.steps = 0
        self.messages = 0
        self.places: list[Point] = []
        """The places where another fault makes another run."""
        self._fresh = set(AT_EVENTS)
        self._events = sorted(p for p in case if p.what in AT_EVENTS)
        self._events.sort(key=lambda point: point.at)
        self._steps = {p.at: p.what for p in case if p.what in AT_STEPS}
        self._messages = {p.at: p.what for p in case if p.what in AT_MESSAGES}
        sim.engine.chaos = self.strike
        sim.store_fault = self._store_fault  # type: ignore[method-assign]
        sim.network_fault = self._network_fault  # type: ignore[method-assign]
        self._reaches = sim.network.reaches
        sim.network.reaches = self._look  # type: ignore[method-assign]
        sim.engine.next_chaos = 0

    def strike(self) -> None:
        """An event comes: note what would make a difference here, and strike if that is due."""
        sim = self.sim
        if sim.healed:
            return
        at = sim.engine.events
        for what in sorted(self._fresh):
            if self._possible(what):
                self.places.append(Point(what, at))
        self._fresh.clear()
        while self._events and self._events[0].at <= at:
            self._strike(self._events.pop(0).what)
        self._concerns(sim.engine.acting)

    def _concerns(self, process: Process | None) -> None:
        """After the event of this process these faults are not what they were before it."""
        if process is None:
            self._fresh.update(AT_EVENTS)
            return
        for name, node in self.sim.nodes.items():
            if process is node.process:
                self._fresh.update((f"crash {name}", f"power {name}"))
        launch = self.sim.launch
        for rank in launch.ranks if launch is not None else ():
            if process is rank.process:
                self._fresh.update((f"kill {rank.rank}", f"power {rank.node.name}"))
                self._fresh.add(f"crash {rank.node.name}")  # it writes to the agent's memory
            elif process is rank.node.process:
                self._fresh.add(f"kill {rank.rank}")  # it may tell the rank something

    def _possible(self, what: str) -> bool:
        kind, _, name = what.partition(" ")
        if kind in ("crash", "power"):
            return self.sim.nodes[name].up
        launch = self.sim.launch
        if kind == "kill":
            return launch is not None and launch.ranks[int(name)].process.alive
        return ("n0", "n1") not in self.sim.network.blocked

    def _look(self, source: str, target: str) -> bool:
        """Somebody looks whether one node reaches another, and at that node."""
        if source != target:
            self._fresh.update(("cut", "one way", f"crash {target}", f"power {target}"))
        return self._reaches(source, target)

    def _strike(self, what: str) -> None:
        sim = self.sim
        sim.trace("FAULT", what)
        kind, _, name = what.partition(" ")
        if kind in ("crash", "power"):
            node = sim.nodes[name]
            if node.up and kind == "crash":
                node.crash(what)
                sim.engine.post(AWAY_S, None, self._start, name)
            elif node.up:
                sim.trouble.power_off(node, AWAY_S)
        elif kind == "kill":
            if sim.launch is not None:
                sim.kill(sim.launch.ranks[int(name)])
        else:
            pairs = [("n0", "n1"), ("n1", "n0")][: 2 if what == "cut" else 1]
            sim.network.cut(pairs)
            sim.engine.post(AWAY_S, None, sim.network.join, pairs)

    def _start(self, name: str) -> None:
        if not self.sim.nodes[name].up:
            self.sim.nodes[name].start()

    def _store_fault(self, step: str) -> str:
        if self.sim.healed or step in ("hash", "pull"):
            return ""
        self.steps += 1
        for kind in AT_STEPS:
            if step in FULL.get(kind, (step,)):
                self.places.append(Point(kind, self.steps))
        what = "" if self.sim.healed else self._steps.get(self.steps, "")
        if step not in FULL.get(what, (step,)):
            return ""
        if what == "lost answer":
            return "lost_success"
        if what == "full":
            return "enospc"
        if what == "error":
            return "fsync_error" if step in ("fsync", "dirsync") else "eio"
        return ""

    def _network_fault(self) -> str:
        if not self.sim.healed:
            # The messages between the nodes concern the link between them.
            self._fresh.update(("cut", "one way"))
            self.messages += 1
            self.places += [Point(kind, self.messages) for kind in AT_MESSAGES]
        return "" if self.sim.healed else self._messages.get(self.messages, "")


def run_case(case: Case, *, trace: bool = False) -> tuple[Sim, list[Point]]:
    """The small world with these faults: the world at its end, and the places for another fault."""
    sim = Sim(0, options(), trace=trace)
    sim.rng.random = lambda: 0.5  # type: ignore[method-assign]
    script = Script(sim, case)
    with guarded(sim):
        for node in sim.nodes.values():
            node.start()
        sim.relaunch()
        sim.live()
        sim.heal()
    return sim, script.places


def later(places: list[Point], first: Point) -> list[Point]:
    """Those of the places in a run with a first fault that make a pair that is not seen twice.

    Of two faults of one kind of place the second is not before the first.
    """
    kinds = (AT_EVENTS, AT_STEPS, AT_MESSAGES)
    mine = next(number for number, names in enumerate(kinds) if first.what in names)
    found = []
    for point in places:
        number = next(n for n, names in enumerate(kinds) if point.what in names)
        same = number == mine
        if number > mine or (same and (point.at, point.what) > (first.at, first.what)):
            found.append(point)
    return found


@dataclass(slots=True)
class Walk:
    """What going through the small world came to."""

    faults: int
    points: int = 0
    events: int = 0
    wall_s: float = 0.0
    bad: list[tuple[str, str]] = field(default_factory=list)

    def add(self, part: Walk) -> None:
        """Count another part."""
        self.points += part.points
        self.events += part.events
        self.bad += part.bad

    def as_json(self) -> dict[str, Any]:
        """Plain values, for a file."""
        return {
            "faults": self.faults,
            "points": self.points,
            "violations": len(self.bad),
            "events": self.events,
            "wall_s": round(self.wall_s, 3),
            "failing_points": [point for point, _ in self.bad[:100]],
        }


def _try(walk: Walk, case: Case) -> None:
    sim, _ = run_case(case)
    walk.points += 1
    walk.events += sim.engine.events
    if sim.violation is not None:
        walk.bad.append((" + ".join(f"{p.what} @{p.at}" for p in case), str(sim.violation)))


def _singles(batch: tuple[Point, ...], every: int) -> Walk:
    walk = Walk(1)
    for number, point in enumerate(batch):
        if number % every == 0:
            _try(walk, (point,))
    return walk


def _pairs(batch: tuple[Point, ...], every: int) -> Walk:
    """All second faults after each of these first ones, or each ``every``-th of them."""
    walk = Walk(2)
    for first in batch:
        _, places = run_case((first,))
        for number, second in enumerate(later(places, first)):
            if (number + first.at) % every == 0:
                _try(walk, (first, second))
    return walk


def run(faults: int, *, jobs: int = 1, every: int = 1) -> Walk:
    """Go through all cases of one fault or of two, or through each ``every``-th of them."""
    start = time.monotonic()
    _, places = run_case(())
    walk = Walk(faults)
    work = _singles if faults == 1 else _pairs
    size = BATCH if faults == 1 else 1
    if faults == 2:
        # As many first faults are left out as second ones after each of them.
        fewer = isqrt(every)
        places, every = places[::fewer], every // fewer
    parts = list(_batches(places, size))
    if jobs == 1:
        for part in parts:
            walk.add(work(part, every))
    else:
        with ProcessPoolExecutor(jobs) as pool:
            for done in pool.map(work, parts, [every] * len(parts), chunksize=1):
                walk.add(done)
    walk.wall_s = time.monotonic() - start
    return walk


def _batches(all_points: Iterable[Point], size: int) -> Iterator[tuple[Point, ...]]:
    rest = iter(all_points)
    while batch := tuple(islice(rest, size)):
        yield batch
