"""Runs seeds, many after each other on several cores, and says what came of them."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from groupio.testing.sim.engine import Violated
from groupio.testing.sim.faults import CELLS, ROWS, STEPS, UNREACHABLE, Cells, Options, draw
from groupio.testing.sim.world import Result, Sim, options_rng

BATCH = 10
"""Seeds that a core is given at a time."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the worlds may be; ``swarm`` lets each seed draw its size up to that."""

    members: int = 16
    agents: int = 8
    epochs: int = 20
    swarm: bool = True

    def options(self, seed: int) -> Options:
        """The options that a seed draws."""
        sizes = (self.members, self.agents, self.epochs)
        return draw(options_rng(seed), *sizes, swarm=self.swarm)


@dataclass(slots=True)
class Summary:
    """What a run of many seeds came to."""

    first: int = 0
    """The lowest seed."""
    seeds: int = 0
    events: int = 0
    commits: int = 0
    loads: int = 0
    """Loads of ranks that went through agents, and those in which nothing failed."""
    clean_loads: int = 0
    simulated_s: float = 0.0
    wall_s: float = 0.0
    cells: Cells = field(default_factory=Cells)
    bad: list[Result] = field(default_factory=list)

    def add(self, result: Result) -> None:
        """Count the result of one seed."""
        self.first = min(self.first, result.seed) if self.seeds else result.seed
        self.seeds += 1
        self.loads += result.loads
        self.clean_loads += result.clean_loads
        self.events += result.events
        self.commits += result.commits
        self.simulated_s += result.seconds
        self.cells.merge(result.cells)
        if result.violation is not None:
            self.bad.append(result)

    def as_json(self) -> dict[str, Any]:
        """Plain values, for a file."""
        wall = max(self.wall_s, 1e-9)
        return {
            "seeds": self.seeds,
            "violations": len(self.bad),
            "events": self.events,
            "fault_cells_hit": len(CELLS) - len(self.cells.missed),
            "fault_cells_total": len(CELLS),
            "wall_s": round(self.wall_s, 3),
            "first_seed": self.first,
            "commits": self.commits,
            "loads": self.loads,
            "clean_loads": self.clean_loads,
            "simulated_s": round(self.simulated_s, 1),
            "events_per_s": round(self.events / wall),
            "seeds_per_s": round(self.seeds / wall, 2),
            "failing_seeds": [result.seed for result in self.bad],
            "cells": {
                row: {step: self.cells.hits.get((row, step), 0) for step in STEPS} for row in ROWS
            },
            "cells_missed": [f"{row} while {step}" for row, step in self.cells.missed],
            "cells_unreachable": {f"{r} while {s}": why for (r, s), why in UNREACHABLE.items()},
        }


def run_seed(
    seed: int,
    options: Options,
    *,
    guards: frozenset[str] = frozenset(),
    trace: bool = False,
) -> Result:
    """Run one world to its end; a broken promise or a failure of a machine is in the result."""
    sim = Sim(seed, options, guards=guards, trace=trace)
    with guarded(sim):
        sim.begin()
        sim.live()
        sim.heal()
    return sim.result()


class guarded:
    """Keeps a violation, or the failure of a machine, in the world in which it happened."""

    def __init__(self, sim: Sim) -> None:
        self._sim = sim

    def __enter__(self) -> None:
        self._sim.violation = None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, Violated):
            self._sim.violation = error
        elif isinstance(error, Exception):
            # A machine that raises is a finding like any other.
            text = "".join(traceback.format_exception(error)[-6:])
            self._sim.violation = Violated(0, text)
        return isinstance(error, Exception)


def _batch(seeds: tuple[int, ...], sizes: Sizes, guards: frozenset[str]) -> list[Result]:
    return [run_seed(seed, sizes.options(seed), guards=guards) for seed in seeds]


def run_many(
    seeds: Iterable[int],
    sizes: Sizes,
    *,
    jobs: int = 1,
    guards: frozenset[str] = frozenset(),
    told: Callable[[Summary], None] = lambda summary: None,
    stop_after: int = 10,
) -> Summary:
    """Run these seeds on so many cores; ends early after ``stop_after`` violations."""
    start = time.monotonic()
    summary = Summary()
    work = partial(_batch, sizes=sizes, guards=guards)
    batches = _batches(iter(seeds))
    if jobs == 1:
        results: Iterable[list[Result]] = map(work, batches)
        pool = None
    else:
        pool = ProcessPoolExecutor(jobs)
        results = pool.map(work, list(batches))
    try:
        for batch in results:
            for result in batch:
                summary.add(result)
            summary.wall_s = time.monotonic() - start
            told(summary)
            if len(summary.bad) >= stop_after:
                break
    finally:
        if pool is not None:
            pool.shutdown(cancel_futures=True)
    return summary


def _batches(seeds: Iterator[int]) -> Iterator[tuple[int, ...]]:
    while batch := tuple(islice(seeds, BATCH)):
        yield batch
