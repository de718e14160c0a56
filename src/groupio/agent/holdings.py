"""The chunks that this node has in memory, for peers and readers that ask by digest.

Chunks of a group in flight lie still until it is closed: they are sent from where they lie, and the
group is closed only when nobody is being sent any of them. Those of a committed epoch stay where
they are until their memory is used again, which may be at any moment: such a chunk is copied out
first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from groupio.agent.known import prefixes
from groupio.fabric.base import Served

ViewOf = Callable[[int, int, int], memoryview | None]
"""``length`` bytes of an arena at an offset: ``view_of(arena, offset, length)``; any alignment."""


class Places(NamedTuple):
    """Where chunks lie: ``digests`` uint8[n, 32]; ``arenas``, ``offsets``, ``lengths`` int64[n]."""

    digests: npt.NDArray[np.uint8]
    arenas: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class _Holding:
    """Chunks of one group; ``alive`` bool[n] may change."""

    group: int
    scope: str
    places: Places
    alive: npt.NDArray[np.bool_]
    cached: bool = False
    sealed: bool = False
    """Its memory is about to be used again: chunks are lent to nobody."""
    prefix: npt.NDArray[np.uint64] | None = None
    """Ascending, once the rows are in that order: many groups are never asked for anything."""

    def rows(self, digests: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
        """The row of each of ``digests`` uint8[m, 32], -1 where it is not here."""
        prefix = self._sort() if self.prefix is None else self.prefix
        wanted = prefixes(digests)
        at = np.searchsorted(prefix, wanted)
        found = np.full(len(digests), -1, np.int64)
        left = np.arange(len(digests))
        while True:
            left = left[at[left] < len(prefix)]
            left = left[prefix[at[left]] == wanted[left]]
            if not len(left):
                return found
            rows = at[left]
            equal = (self.places.digests[rows] == digests[left]).all(axis=1) & self.alive[rows]
            found[left[equal]] = rows[equal]
            left = left[~equal]
            at[left] += 1

    def joined(self, other: _Holding) -> _Holding:
        """The chunks of both."""
        places = Places(
            np.concatenate((self.places.digests, other.places.digests)),
            np.concatenate((self.places.arenas, other.places.arenas)),
            np.concatenate((self.places.offsets, other.places.offsets)),
            np.concatenate((self.places.lengths, other.places.lengths)),
        )
        alive = np.concatenate((self.alive, other.alive))
        return _Holding(self.group, self.scope, places, alive)

    def _sort(self) -> npt.NDArray[np.uint64]:
        prefix = prefixes(self.places.digests)
        order = np.argsort(prefix, kind="stable")
        digests, arenas, offsets, lengths = self.places
        self.places = Places(digests[order], arenas[order], offsets[order], lengths[order])
        self.alive = self.alive[order]
        self.prefix = prefix[order]
        return self.prefix


class Holdings:
    """All chunks of this node by the store that they belong to. Thread-safe."""

    def __init__(self, view_of: ViewOf) -> None:
        self._view_of = view_of
        self._changed = threading.Condition()
        self._holdings: list[_Holding] = []
        self._coming: dict[tuple[str, bytes], int] = {}
        """Chunks on their way here, by store and digest, and for how many fetches."""
        self._lent: dict[int, int] = {}
        """How many chunks of a group are being sent."""
        self._waiting: dict[int, Callable[[], None]] = {}
        """What is to be called when nothing of a group is lent any more."""

    # -- what comes and goes ----------------------------------------------------------------------

    def hold(self, group: int, scope: str, places: Places) -> None:
        """These chunks of the group lie still until :meth:`settle` or :meth:`release`."""
        alive = np.ones(len(places.lengths), np.bool_)
        with self._changed:
            new = _Holding(group, scope, places, alive)
            # Copies come batch by batch. Batches of about one size become one, so that a look-up
            # goes through few of them.
            for old in reversed(self._holdings):
                if (old.group, old.scope, old.cached) != (group, scope, False):
                    continue
                if len(old.alive) > 2 * len(new.alive):
                    break
                self._holdings.remove(old)
                new = old.joined(new)
            self._holdings.append(new)
            self._changed.notify_all()

    def expect(self, scope: str, digests: npt.NDArray[np.uint8]) -> None:
        """These chunks are on their way here: peers that ask for them may wait."""
        with self._changed:
            for digest in digests:
                name = (scope, digest.tobytes())
                self._coming[name] = self._coming.get(name, 0) + 1

    def expect_no_more(self, scope: str, digests: npt.NDArray[np.uint8]) -> None:
        """They came, or will not."""
        with self._changed:
            for digest in digests:
                name = (scope, digest.tobytes())
                left = self._coming.pop(name) - 1
                if left:
                    self._coming[name] = left

    def seal(self, group: int, then: Callable[[], None]) -> None:
        """Lend nothing more of the group; call ``then`` once nothing is lent, from any thread.

        No chunk comes for the group any more. Those that are here are served as copies. What is
        lent comes back in bounded time: the fabric ends a connection that takes too long.
        """
        with self._changed:
            for holding in self._holdings:
                holding.sealed |= holding.group == group
            if group in self._lent:
                self._waiting[group] = then
                return
        then()

    def settle(self, group: int) -> None:
        """The group is committed: its chunks may be served until their memory is used again."""
        with self._changed:
            for holding in self._holdings:
                holding.cached |= holding.group == group

    def release(self, group: int) -> None:
        """The group is over and was not committed: its chunks are served no more."""
        with self._changed:
            self._holdings = [h for h in self._holdings if h.group != group or h.cached]

    def drop(self, arena: int, offset: int, length: int) -> None:
        """This range of an arena is about to hold other bytes."""
        with self._changed:
            for holding in self._holdings:
                places = holding.places
                ends = places.offsets + places.lengths
                touched = (places.offsets < offset + length) & (ends > offset)
                holding.alive &= ~(touched & (places.arenas == arena))
            self._holdings = [h for h in self._holdings if h.alive.any() or not h.cached]

    # -- questions ---------------------------------------------------------------------------------

    def has(self, scope: str, digests: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
        """Which of ``digests`` uint8[n, 32] are here, bool[n]."""
        here = np.zeros(len(digests), np.bool_)
        with self._changed:
            for holding in self._of(scope):
                here |= holding.rows(digests) >= 0
        return here

    def find(self, job: str, digest: bytes, wait_s: float) -> Served | None:
        """The chunk of the store ``job``; waits up to ``wait_s`` seconds for it to come."""
        name = np.frombuffer(digest, np.uint8).reshape(1, -1)
        deadline = time.monotonic() + wait_s
        while True:
            with self._changed:
                for holding in self._of(job):
                    row = int(holding.rows(name)[0])
                    if row >= 0 and (served := self._serve(holding, row)) is not None:
                        return served
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._changed.wait(left)

    def read_into(self, job: str, digest: bytes, into: memoryview) -> bool:
        """Copy a chunk of the store ``job`` to memory of its size; False when it is not here."""
        name = np.frombuffer(digest, np.uint8).reshape(1, -1)
        with self._changed:
            for holding in self._of(job):
                row = int(holding.rows(name)[0])
                if row < 0 or int(holding.places.lengths[row]) != len(into):
                    continue
                places = holding.places
                view = self._view_of(int(places.arenas[row]), int(places.offsets[row]), len(into))
                if view is not None:
                    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(view, np.uint8))
                    return True
        return False

    def expects(self, job: str, digest: bytes) -> bool:
        """Whether the chunk is here or on its way here."""
        name = np.frombuffer(digest, np.uint8).reshape(1, -1)
        with self._changed:
            here = any(int(h.rows(name)[0]) >= 0 for h in self._of(job))
            return here or (job, digest) in self._coming

    def _of(self, scope: str) -> Sequence[_Holding]:
        return [h for h in self._holdings if h.scope == scope]

    def _serve(self, holding: _Holding, row: int) -> Served | None:
        places = holding.places
        view = self._view_of(
            int(places.arenas[row]), int(places.offsets[row]), int(places.lengths[row])
        )
        if view is None:
            return None
        if not (holding.cached or holding.sealed):
            self._lent[holding.group] = self._lent.get(holding.group, 0) + 1
            return Served(view, partial(self._take_back, holding.group))
        # Whoever is about to reuse the memory needs the lock to say so: the copy is whole.
        return Served(memoryview(bytes(view)), _nothing)

    def _take_back(self, group: int) -> None:
        """A chunk of the group was sent."""
        with self._changed:
            left = self._lent.pop(group) - 1
            if left:
                self._lent[group] = left
                return
            then = self._waiting.pop(group, None)
        if then is not None:
            then()


def _nothing() -> None:
    """The memory of what was served needs no unpinning."""
