"""What must be true of a store after any fault: one question for all crash tests.

The statements are those of ``groupio.testing.invariants``, asked through the eyes of ``groupio
verify --read-data``, before and after a new agent has recovered the store.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from whole_path import WORLD, Script, content_of

from groupio.agent.identity import Writer, node_name
from groupio.backend.posix import PosixBackend
from groupio.cli.inspection import UNFINISHED, Inspection, Inspector, Leftover
from groupio.client.store_reader import StoreReader
from groupio.controller.store import JobStore
from groupio.errors import NotFound
from groupio.model import EpochInfo, Level
from groupio.testing import invariants
from groupio.testing.invariants import Ack

Told = Sequence[Mapping[str, Any]]


@dataclass(slots=True)
class History:
    """What the members of a store have been told so far, and what they may have written."""

    contents: dict[int, set[int]] = field(default_factory=dict)
    acks: list[Ack] = field(default_factory=list)
    refused: dict[int, bool] = field(default_factory=dict)
    """For each epoch: every save of it was told that it is not committed."""

    def add(self, script: Script, told: Told, lineage: int = 1) -> None:
        """Note one life of the job."""
        for epoch, numbers in script.contents().items():
            self.contents.setdefault(epoch, set()).update(numbers)
        for line in told:
            if "acked" in line:
                level = Level(line["acked"])
                self.acks.append(Ack(lineage, line["epoch"], line["rank"], WORLD, 0, level))
        for epoch in {step.epoch for step in script.steps}:
            tries = sum(step.epoch == epoch for step in script.steps)
            said = [one["failed"]["outcome"] for one in told if _is_failure(one, epoch)]
            never = said == ["not_committed"] * tries * WORLD
            self.refused[epoch] = self.refused.get(epoch, True) and never

    def newest(self, lineage: int) -> int:
        """The newest epoch that was acknowledged in a lineage, -1 if there is none."""
        return max((ack.epoch for ack in self.acks if ack.lineage == lineage), default=-1)


def _is_failure(line: Mapping[str, Any], epoch: int) -> bool:
    return "failed" in line and line["epoch"] == epoch


def look(store: Path) -> Inspection | None:
    """What ``verify --read-data`` finds; None when there is no store (yet)."""
    try:
        with PosixBackend.open(store, create=False) as backend:
            return Inspector(backend).inspect(read_data=True)
    except NotFound:
        return None


def kept(found: Inspection) -> list[Leftover]:
    """Leftovers that should be gone; unfinished files of killed writers go by their age."""
    return [leftover for leftover in found.leftovers if leftover.detail != UNFINISHED]


def recover(store: Path) -> None:
    """Decide what is undecided, as the next agent does."""
    job = JobStore(str(store), store.name, node_name(), Writer.of_this_process())
    job.open(())
    job.close()


def check(store: Path, history: History, *, powerless: bool = False) -> int:
    """Recover ``store`` and check everything; the newest committed epoch, -1 if there is none.

    ``powerless``: the power failed, so that announcements may be gone while segments are there.
    AssertionError says what does not hold.
    """
    before = look(store)
    if before is None:
        assert not history.acks, "the store is gone"
    else:
        _check_damage(before, powerless)
        _none(invariants.check_no_lost_ack(before.store, history.acks))
    recover(store)
    after, newest = check_at_rest(store, history)
    if before is not None:
        _none(invariants.check_decisions_stand(before.store, after.store))
        _none(invariants.check_retention(before.store, after.store))
    return newest


def check_at_rest(store: Path, history: History) -> tuple[Inspection, int]:
    """Check a store in which nothing is undecided; what was found, and the newest epoch."""
    found = look(store)
    assert found is not None
    assert not found.damage
    assert not kept(found)
    _none(invariants.check_store(found.store, history.acks))
    return found, _check_epochs(store, history)


def _check_damage(found: Inspection, powerless: bool) -> None:
    # A power cut may keep whole segments and lose their announcement; recovery removes them.
    assert all(powerless and damage.kind == "missing" for damage in found.damage), found.damage


def _check_epochs(store: Path, history: History) -> int:
    with StoreReader.open(store) as reader:
        listed = reader.epochs()
        assert not reader.damaged
        for info in listed:
            _check_epoch(reader, info, history)
        line = [info.epoch for info in listed if not info.abandoned]
        newest = max(line, default=-1)
        assert newest >= history.newest(max(reader.lineages()))
        if line:
            assert reader.resolve("latest").header.epoch == newest
    return newest


def _check_epoch(reader: StoreReader, info: EpochInfo, history: History) -> None:
    assert info.metadata["content"] in history.contents[info.epoch], f"never saved: {info}"
    assert not history.refused.get(info.epoch), f"told as not committed: {info}"
    saved, loaded = {}, {}
    for rank in range(WORLD):
        manifest = reader.resolve(info.epoch)
        if manifest.header.lineage != info.lineage:
            continue  # another line has an epoch of this number, and is asked for it
        saved |= _digests(rank, content_of(info.metadata["content"], rank))
        loaded |= _digests(rank, reader.read_items(manifest, rank, threads=1))
    _none(invariants.check_bit_exact(saved, loaded))


def _digests(rank: int, items: Mapping[str, Any]) -> dict[tuple[int, str], bytes]:
    found = {}
    for name, value in items.items():
        array = np.asarray(value)
        head = f"{type(value).__name__} {array.dtype} {array.shape} ".encode()
        found[rank, name] = blake3(head + array.tobytes()).digest()
    return found


def _none(violations: Iterable[invariants.Violation]) -> None:
    found = list(violations)
    assert not found, found
