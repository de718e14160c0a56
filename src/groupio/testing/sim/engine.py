"""The heart of the simulator: a clock that jumps from event to event, and what may stop a process.

One seed gives one order of everything. An event belongs to a process or to nobody; the events of
a dead process are dropped, those of a paused one wait until it goes on.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

TRACE_LINES = 20_000
"""So many of the last lines of a timeline are kept."""

Act = Callable[..., object]
_Entry = tuple[float, int, "Process | None", Act, tuple[Any, ...]]


class Violated(AssertionError):
    """An invariant of the design is broken; ``number`` is its number in DESIGN.md."""

    def __init__(self, number: int, detail: str) -> None:
        super().__init__(f"invariant {number}: {detail}")
        self.number = number
        self.detail = detail

    def __reduce__(self) -> tuple[type[Violated], tuple[int, str]]:
        return (Violated, (self.number, self.detail))


class Process:
    """One life of an operating-system process: agent, controller, rank or store worker."""

    __slots__ = ("alive", "backlog", "name", "paused", "slow")

    def __init__(self, name: str, slow: float = 1.0) -> None:
        self.name = name
        self.alive = True
        self.paused = False
        self.slow = slow
        """All that the process does takes so many times as long."""
        self.backlog: list[_Entry] = []

    def __repr__(self) -> str:
        return self.name


class Engine:
    """Events in the order of simulated time, in seconds; ties go in the order of posting."""

    def __init__(self, seed: int, *, trace: bool = False) -> None:
        self.now = 0.0
        self.rng = random.Random(seed)
        self.events = 0
        self.next_chaos = 1 << 62
        """The number of the event before which ``chaos`` is called."""
        self.chaos: Callable[[], None] = lambda: None
        self.acting: Process | None = None
        """Whose event is next, while ``chaos`` is called."""
        self.tracing = trace
        self.lines: list[str] = []
        self._heap: list[_Entry] = []
        self._count = 0

    def post(self, delay: float, process: Process | None, act: Act, *args: Any) -> None:
        """Let ``act(*args)`` happen after ``delay`` seconds, as something that ``process`` does."""
        self._count += 1
        heappush(self._heap, (self.now + delay, self._count, process, act, args))

    def post_at(self, at: float, process: Process | None, act: Act, *args: Any) -> None:
        """Let ``act(*args)`` happen at the time ``at``."""
        self._count += 1
        heappush(self._heap, (at, self._count, process, act, args))

    def run(self, until: float, limit: int) -> bool:
        """Go on until that time, or until ``limit`` more events; False when it was the limit."""
        heap = self._heap
        last = self.events + limit
        while heap and heap[0][0] <= until:
            if self.events >= last:
                return False
            entry = heappop(heap)
            self.now = entry[0]
            self.events += 1
            process = entry[2]
            if self.events >= self.next_chaos:
                self.acting = process
                self.chaos()
            if process is None or process.alive:
                if process is not None and process.paused:
                    process.backlog.append(entry)
                else:
                    entry[3](*entry[4])
        if not heap:
            return True
        self.now = max(self.now, until)
        return True

    @property
    def next_at(self) -> float | None:
        """When the next event is, or None when nothing will ever happen."""
        return self._heap[0][0] if self._heap else None

    def resume(self, process: Process) -> None:
        """A paused process goes on with what happened meanwhile, in its order."""
        process.paused = False
        waiting, process.backlog = process.backlog, []
        for entry in waiting:
            self.post(0.0, process, entry[3], *entry[4])

    def note(self, where: str, text: str) -> None:
        """One line of the timeline; only called while ``tracing``."""
        if len(self.lines) >= 2 * TRACE_LINES:
            del self.lines[:TRACE_LINES]
        self.lines.append(f"{self.events:>7} {self.now:>11.4f} {where:<14} {text}")


_SHOWN = frozenset(
    (
        *("client", "save_id", "group", "key", "node", "rank", "epoch", "commit", "committed"),
        *("ours", "round", "level", "error", "name", "term", "number", "reason", "planned"),
    )
)


def brief(thing: Any) -> str:
    """A struct in one short line."""
    text = type(thing).__name__
    fields = getattr(thing, "__struct_fields__", ())
    for name in fields:
        if name in _SHOWN:
            value = getattr(thing, name)
            text += f" {name}={str(value)[:60]}"
    return text
