"""Ranks and flush jobs of the protocol's small world: what is outside the machines."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from groupio.errors import GroupIOError
from groupio.model import DecisionKey, Level
from groupio.protocol import effects as fx
from groupio.protocol import events as ev

LADDER = (Level.STAGED, Level.REPLICATED, Level.REMOTE, Level.DURABLE)


@dataclass
class Save:
    """One save of a rank, and what it was told."""

    save_id: int
    epoch: int
    content: str
    key: DecisionKey | None = None
    grants: deque[fx.GrantLease] = field(default_factory=deque)
    copied: bool = False
    """The last wave is copied: the buffers are released."""
    levels: list[Level] = field(default_factory=list)
    error: GroupIOError | None = None
    withdrawn: bool = False

    @property
    def over(self) -> bool:
        return self.error is not None or Level.DURABLE in self.levels

    @property
    def released(self) -> bool:
        """The rank goes on training."""
        return self.copied or self.over

    def reach(self, level: Level) -> None:
        assert not self.over, f"{level} was told after the end of the save"
        assert not self.levels or LADDER.index(level) > LADDER.index(self.levels[-1])
        assert level is Level.STAGED or Level.STAGED in self.levels
        self.levels.append(level)

    def fail(self, error: GroupIOError) -> None:
        assert not self.over, f"{error!r} was told after the end of the save"
        self.error = error


@dataclass
class Rank:
    """A client in its process; it copies wave after wave and answers failures."""

    name: str
    process: ev.Process
    node: str
    rank: int
    world: int
    launch: int
    rewind_to: int | None
    next_epoch: int
    alive: bool = True
    connected: bool = True
    saves: dict[int, Save] = field(default_factory=dict)
    copying: fx.GrantLease | None = None
    outbox: deque[Any] = field(default_factory=deque)
    """Events on their way to the agent machine and, through it, to the controller."""

    @property
    def busy(self) -> bool:
        """A save has not released the rank yet."""
        return any(not save.released for save in self.saves.values())

    @property
    def can_copy(self) -> bool:
        granted = any(s.grants and not s.over for s in self.saves.values())
        return self.alive and (self.copying is not None or (self.connected and granted))

    def granted(self, grant: fx.GrantLease) -> None:
        save = self.saves[grant.save_id]
        assert not save.over, "a lease came after the failure"
        save.key = grant.key
        if save.withdrawn:
            self.outbox.append(ev.WriterStopped(self.name, save.save_id))
        else:
            save.grants.append(grant)

    def failed(self, save_id: int, error: GroupIOError) -> None:
        self.saves[save_id].fail(error)
        if self.copying is None or self.copying.save_id != save_id:
            self.outbox.append(ev.WriterStopped(self.name, save_id))

    def copy(self) -> None:
        """Start to copy a wave, or end it and say so."""
        if self.copying is None:
            save = next(s for s in self.saves.values() if s.grants and not s.over)
            self.copying = save.grants.popleft()
            return
        grant, self.copying = self.copying, None
        if not self.connected:
            return
        save = self.saves[grant.save_id]
        if save.over:
            self.outbox.append(ev.WriterStopped(self.name, save.save_id))
            return
        save.copied = grant.number + 1 == grant.waves
        self.outbox.append(ev.WaveCopied(self.name, save.save_id, grant.number))


@dataclass
class FlushJob:
    """The flush job of a group on a node: it works on the waves that it was given."""

    key: DecisionKey
    store: bool
    waves: deque[fx.AddWave] = field(default_factory=deque)
    added: list[fx.AddWave] = field(default_factory=list)
    members: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Client and save of each rank that handed a wave over."""
    finished: bool = False
    cancelled: bool = False
    ended: bool = False
    """It stored all, failed, or is idle after its cancelling: no thread of it is left."""

    def repeat(self) -> None:
        """It failed, and begins anew with all that it was given."""
        assert self.ended
        assert not self.cancelled
        assert all(wave.number == 0 for wave in self.added), "some bytes are in memory no more"
        self.ended, self.waves = False, deque(self.added)

    @property
    def has_work(self) -> bool:
        if self.cancelled:
            return not self.ended
        return not self.ended and (bool(self.waves) or self.finished)


def hand_over(job: Any, wave: fx.AddWave) -> None:
    """Give a job of either kind one more wave."""
    assert not job.finished
    job.waves.append(wave)
    job.added.append(wave)
    job.members[wave.rank] = (wave.client, wave.save_id)
