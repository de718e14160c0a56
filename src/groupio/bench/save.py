"""One rank of ``groupio bench save``: all systems save each epoch in turn."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from groupio.bench.limits import Copy, RawWrite, settle
from groupio.bench.news import News
from groupio.bench.options import Options
from groupio.bench.place import Place
from groupio.bench.state import Content, State
from groupio.bench.system import System, added, files_of, hottest_rank, open_system


def open_all(options: Options, place: Place) -> dict[str, System]:
    """The adapters of all systems, on this rank."""
    folder = Path(options.folder)
    return {name: open_system(name, folder, place, options.timeout_s) for name in options.systems}


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """Another system begins in each turn, so that none always follows the same one."""
    start = turn % len(names)
    return [*names[start:], *names[:start]]


def save_all(options: Options, place: Place, news: News) -> None:
    """Measure every system in every epoch, then load from each and compare."""
    state = State(Content(options), place.rank)
    systems = open_all(options, place)
    looked = {name: system.look(state) for name, system in systems.items()}
    copy = Copy(state.region)
    raw = RawWrite(Path(options.folder), options.bytes_unique) if place.rank == 0 else None
    for epoch in range(1, options.epochs + 1):
        state.fill(epoch)
        limits = _limits_of_epoch(options, place, state, copy, raw, epoch)
        for name in rotated(options.systems, epoch - 1):
            if place.rank == 0:
                news.tell("begins", system=name, epoch=epoch)
            row = _measure(options, place, systems[name], state, copy, epoch)
            if epoch == 1 and looked[name]:
                row["note"] = "; ".join(filter(None, (row["note"], looked[name])))
            news.tell("saved", system=name, epoch=epoch, **limits, **row)
            if place.rank == 0 and epoch > 1:
                systems[name].forget(epoch - 1)
    for name, system in systems.items():
        _verify(name, system, state, options.epochs, place, news)
        system.close()


def save_once(options: Options, place: Place, news: News) -> None:
    """Save epoch 1 with every system, for others to load."""
    state = State(Content(options), place.rank)
    state.fill(1)
    for name, system in open_all(options, place).items():
        if place.rank == 0:
            news.tell("begins", system=name, epoch=1)
        place.barrier()
        system.save(state, 1)
        place.barrier()
        system.close()


def _limits_of_epoch(
    options: Options, place: Place, state: State, copy: Copy, raw: RawWrite | None, epoch: int
) -> dict[str, Any]:
    """The raw write and the hash of this epoch's bytes, which all systems are compared with."""
    found: dict[str, Any] = {"bytes_unique": state.content.new_bytes(epoch)}
    if raw is not None:
        seconds, how = raw.fastest(found["bytes_unique"], options.settle_s)
        found |= {"limit_durable_s": seconds, "limit_durable_how": how}
    place.barrier()
    copy.measure(place)
    found["limit_stall_tensors_s"] = copy.measure_tensors(
        place, [slot.nbytes for slot in state.content.slots]
    )
    return found | {"limit_hash_s": copy.measure_hash(place)}


def _measure(
    options: Options, place: Place, system: System, state: State, copy: Copy, epoch: int
) -> dict[str, Any]:
    """One save of one system, and the memcpy right before it; seconds from a common start."""
    before = {}
    if place.rank == 0:
        settle(options.settle_s)
        before = files_of(system.folder)
    copied = copy.measure(place)
    start = place.start()
    moments = system.save(state, epoch)
    place.barrier()
    row: dict[str, Any] = {"limit_stall_s": copied, "note": moments.note}
    for level in ("stall", "staged", "remote", "durable", "door"):
        at = getattr(moments, level)
        row[f"{level}_s"] = None if at is None else at - start
    if place.rank == 0:
        after = files_of(system.folder)
        row["bytes_stored"] = added(before, after)
        row["bytes_hottest_rank"] = hottest_rank(system, before, after)
    place.barrier()
    return row


def _verify(name: str, system: System, state: State, epoch: int, place: Place, news: News) -> None:
    """Load what ``system`` saved last and compare every byte."""
    state.wipe()
    place.barrier()
    system.load(state, epoch)
    news.tell("verified", system=name, wrong=state.differences(epoch)[:5])
    place.barrier()
    if place.rank == 0 and system.directory(epoch).exists():
        shutil.rmtree(system.directory(epoch))
