"""One rank of ``groupio bench load``: all systems load the same epoch in turn, cold and warm."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from groupio.bench.limits import (
    Copy,
    RawRead,
    RawWrite,
    bytes_read_so_far,
    drop_cache,
    settle,
    warm_up,
)
from groupio.bench.news import News
from groupio.bench.options import SYSTEMS, Options
from groupio.bench.place import Place
from groupio.bench.save import open_all, rotated
from groupio.bench.state import Content, State
from groupio.bench.system import System, files_of


def load_again(options: Options, place: Place, news: News) -> None:
    """Load epoch 1 with every system, as often as the options say, and compare every byte.

    Another number of ranks than the one that saved loads each tensor whole, on every rank.
    """
    whole = options.load_ranks != options.ranks
    state = State(Content(options), place.rank, whole=whole)
    names = [name for name in options.systems if SYSTEMS[name].reshards or not whole]
    systems = {name: system for name, system in open_all(options, place).items() if name in names}
    copy = Copy(state.region)
    raw = _raw_file(options, place)
    for turn in range(1, options.epochs + 1):
        for cold in (True, False):
            for name in rotated(names, turn - 1):
                if place.rank == 0:
                    news.tell("begins", system=name, epoch=turn)
                limit = _limit(place, raw, copy, cold=cold)
                row = _measure(options, place, systems[name], state, cold=cold)
                news.tell(
                    "loaded",
                    system=name,
                    epoch=turn,
                    cold=cold,
                    bytes_unique=options.bytes_unique,
                    limit_load_s=limit,
                    **row,
                )
    for system in systems.values():
        system.close()


def _raw_file(options: Options, place: Place) -> RawRead:
    path = Path(options.folder) / "read.bin"
    if place.rank == 0:
        RawWrite(Path(options.folder), options.bytes_unique).keep(options.bytes_unique)
    place.barrier()
    return RawRead(path, place)


def _limit(place: Place, raw: RawRead, copy: Copy, *, cold: bool) -> float:
    """Seconds to read the unique bytes once, and then to copy all that this rank is to get."""
    place.barrier()
    read = raw.fastest(cold=cold)
    return place.largest(read) + copy.measure(place)


def _measure(
    options: Options, place: Place, system: System, state: State, *, cold: bool
) -> dict[str, Any]:
    state.wipe()
    if place.rank == 0:
        settle(options.settle_s)
        paths = [Path(path) for path in files_of(system.folder) if os.path.isfile(path)]
        drop_cache(paths) if cold else warm_up(paths)
    place.barrier()
    before = bytes_read_so_far()
    start = place.start()
    counted = system.load(state, 1)
    seconds = time.monotonic() - start
    read = bytes_read_so_far() - before
    place.barrier()
    return {
        "load_s": seconds,
        "bytes_read": read if counted is None else counted,
        "counted": counted is not None,
        "wrong": state.differences(1)[:5],
    }
