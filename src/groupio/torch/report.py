"""The report of a load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SkippedEpoch:
    """An epoch that a load with ``fallback=True`` passed over, and why."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What :func:`groupio.torch.load` did.

    ``step`` is the epoch that was loaded, on all members the same one. ``missing`` are names of
    the given state dict that were not saved (left as they were), ``unexpected`` saved names that
    the state dict does not have: both are empty after a strict load. ``skipped_epochs`` are newer
    epochs that were damaged, the newest first. ``bytes_read`` came from the store to this rank,
    ``bytes_forwarded`` from ranks of its host, from other nodes or the agent's memory, each read
    once for all of them; both count whole chunks. ``notes`` say what went another way than usual.
    """

    step: int
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    skipped_epochs: tuple[SkippedEpoch, ...] = ()
    bytes_read: int = field(default=0, compare=False)
    bytes_forwarded: int = field(default=0, compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)


def joined(
    step: int,
    reports: Sequence[tuple[str | None, LoadReport]],
    skipped: Sequence[SkippedEpoch],
) -> LoadReport:
    """One report of the loads of several parts; names of a named part begin with its name."""

    def named(part: str | None, names: Sequence[str]) -> list[str]:
        return [name if part is None else f"{part}.{name}" for name in names]

    return LoadReport(
        step=step,
        missing=tuple(n for part, one in reports for n in named(part, one.missing)),
        unexpected=tuple(n for part, one in reports for n in named(part, one.unexpected)),
        skipped_epochs=tuple(skipped),
        bytes_read=sum(one.bytes_read for _, one in reports),
        bytes_forwarded=sum(one.bytes_forwarded for _, one in reports),
        notes=tuple(note for _, one in reports for note in one.notes),
    )
