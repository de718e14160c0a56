"""``python -m groupio.testing.sim``: run seeds, replay one, or go through the small world.

Exit code 0: no violation; 1: there is one, or a cell was missed; 2: the command is wrong.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from groupio.testing.sim import guards, small
from groupio.testing.sim.runner import Sizes, Summary, run_many, run_seed
from groupio.testing.sim.world import Result


def main(argv: list[str] | None = None) -> int:
    """Run what the command line asks for."""
    logger = logging.getLogger("groupio")
    before = logger.level
    # What the real drivers log about simulated faults is no news.
    logger.setLevel(logging.CRITICAL)
    try:
        return _run(_parse(argv))
    finally:
        logger.setLevel(before)


def _run(given: argparse.Namespace) -> int:
    removed = frozenset(given.without)
    if given.exhaustive:
        return _exhaustive(given)
    sizes = Sizes(given.members, given.agents, given.epochs, not given.fixed_size)
    if given.seeds is None and given.seed is not None:
        return _replay(given, sizes, removed)
    first = given.seed if given.seed is not None else int(time.time() * 1000) % 10**9 * 1000
    seeds = range(first, first + (given.seeds or 100))
    _say(f"seeds {seeds.start} to {seeds.stop - 1}")
    with guards.removed(removed):
        summary = run_many(
            seeds, sizes, jobs=given.jobs, guards=removed, told=_progress(len(seeds))
        )
    for result in summary.bad:
        _complain(result, given)
    if given.matrix:
        _say("\n".join(summary.cells.table()))
    found = summary.as_json()
    if given.json:
        _write(given.json, found)
    _say(
        f"{found['seeds']} seeds, {found['violations']} violations, {found['events']} events in "
        f"{found['wall_s']} s ({found['events_per_s']} events/s, {found['seeds_per_s']} seeds/s), "
        f"{found['commits']} commits, {found['fault_cells_hit']} of {found['fault_cells_total']} "
        "fault cells hit"
    )
    if given.json:
        _say(f"the figures are in {given.json}")
    if given.all_cells and summary.cells.missed:
        _say(f"not hit: {', '.join(f'{row} while {step}' for row, step in summary.cells.missed)}")
        return 1
    return 1 if summary.bad else 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m groupio.testing.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, help="how many seeds to run")
    parser.add_argument(
        "--seed", type=int, help="the first seed; alone: replay it, with a timeline"
    )
    parser.add_argument("--members", type=int, default=16)
    parser.add_argument("--agents", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--fixed-size", action="store_true", help="do not draw smaller worlds")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("--matrix", action="store_true", help="show the fault cells")
    parser.add_argument(
        "--all-cells", action="store_true", help="every cell has to be hit: exit code 1 if not"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="cores to use")
    parser.add_argument("--lines", type=int, default=300, help="lines of a timeline")
    parser.add_argument("--without", action="append", default=[], choices=guards.GUARDS)
    parser.add_argument(
        "--exhaustive", type=int, choices=(1, 2), help="the small world with so many faults"
    )
    parser.add_argument("--every", type=int, default=1, help="of the pairs, every so manyth")
    given = parser.parse_args(argv)
    if min(given.members, given.agents, given.epochs, given.jobs, given.every) < 1:
        parser.error("members, agents, epochs, jobs and every are 1 or more")
    if given.seeds is not None and given.seeds < 1:
        parser.error("seeds is 1 or more")
    return given


def _replay(given: argparse.Namespace, sizes: Sizes, removed: frozenset[str]) -> int:
    began = time.monotonic()
    with guards.removed(removed):
        result = run_seed(given.seed, sizes.options(given.seed), guards=removed, trace=True)
    _say("\n".join(result.lines[-given.lines :]))
    if given.json:
        summary = Summary(wall_s=time.monotonic() - began)
        summary.add(result)
        _write(given.json, summary.as_json())
    _say(
        f"{result.events} events, {result.seconds:.1f} simulated seconds, {result.commits} commits"
    )
    if result.violation is None:
        _say("no violation")
        return 0
    _say(str(result.violation))
    return 1


def _exhaustive(given: argparse.Namespace) -> int:
    summary = small.run(given.exhaustive, jobs=given.jobs, every=given.every)
    for point, text in summary.bad[:10]:
        _say(f"VIOLATION at {point}: {text}")
    if given.json:
        _write(given.json, summary.as_json())
    _say(
        f"{summary.points} points of {given.exhaustive} fault(s), {len(summary.bad)} violations, "
        f"{summary.events} events in {summary.wall_s:.1f} s"
    )
    return 1 if summary.bad else 0


def _complain(result: Result, given: argparse.Namespace) -> None:
    """A violation, and the one command that shows how it comes about."""
    words = [f"python -m groupio.testing.sim --seed {result.seed}"]
    for name, usual in (("members", 16), ("agents", 8), ("epochs", 20)):
        if getattr(given, name) != usual:
            words.append(f"--{name} {getattr(given, name)}")
    words += ["--fixed-size"] if given.fixed_size else []
    words += [f"--without '{guard}'" for guard in given.without]
    _say(f"VIOLATION of seed {result.seed}: {result.violation}\n  replay: {' '.join(words)}")


def _progress(total: int) -> Callable[[Summary], None]:
    """Says how far a long run is, every few seconds, where someone looks on."""
    shown = time.monotonic()

    def told(summary: Summary) -> None:
        nonlocal shown
        if sys.stderr.isatty() and time.monotonic() - shown > 5:
            shown = time.monotonic()
            rate = summary.seeds / max(summary.wall_s, 1e-9)
            sys.stderr.write(f"{summary.seeds} of {total} seeds, {rate:.0f}/s\n")

    return told


def _write(path: str, figures: dict[str, Any]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(figures, file, indent=1)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
