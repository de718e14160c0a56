"""The rows of the fault table, and how wild each seed lets them be.

A *cell* is a kind of fault in a step of the protocol. A fault hits the cells of all steps in which
some group is at that moment; with no group at all it hits the step ``idle``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

NETWORK = ("drop", "duplicate", "delay", "reorder", "partition", "one_way", "swizzle_clog")
PROCESSES = (
    *("agent_crash", "node_loss", "member_exit", "controller_crash"),
    *("pause", "slow_node", "clock_jump", "away"),
)
DISK = (
    *("eio", "enospc", "short_write", "torn_write", "lost_unsynced", "lost_rename"),
    *("fsync_error", "bit_rot", "misdirected_write"),
)
BACKEND = ("lost_success", "unavailable", "slow_down", "truncated_read", "stale_list")
STORES = ("copied_store",)
"""What nodes take for the store may be a copy of it, from some moment on."""
BUGGIFY = ("tiny_chunks", "queue_of_one", "one_tick", "plan_cache_of_one")

ROWS = (*NETWORK, *PROCESSES, *DISK, *BACKEND, *BUGGIFY, *STORES)
"""The fault table: one row for each kind of fault."""

STEPS = (
    *("gathering", "queued", "admitting", "copying", "hashing", "planning", "storing"),
    *("preparing", "deciding", "aborting", "abort_deciding", "reading", "idle"),
)
"""The steps of the protocol in which a group, or a grouped read, may be."""


UNREACHABLE: dict[tuple[str, str], str] = {}
"""Cells that no run can hit, each with the reason; they are not counted."""

CELLS = [(row, step) for row in ROWS for step in STEPS if (row, step) not in UNREACHABLE]


class Cells:
    """How often each cell of the fault table was hit."""

    def __init__(self) -> None:
        self.hits: dict[tuple[str, str], int] = {}

    def hit(self, row: str, steps: Iterable[str]) -> None:
        """Count a fault in all these steps."""
        hits = self.hits
        for step in steps:
            hits[row, step] = hits.get((row, step), 0) + 1

    def merge(self, other: dict[tuple[str, str], int]) -> None:
        """Add the hits of another run."""
        for cell, count in other.items():
            self.hits[cell] = self.hits.get(cell, 0) + count

    @property
    def missed(self) -> list[tuple[str, str]]:
        """The cells that were never hit, in the order of the table."""
        return [cell for cell in CELLS if not self.hits.get(cell)]

    def table(self) -> list[str]:
        """The matrix as lines of text."""
        width = max(map(len, ROWS))
        lines = [" " * width + "".join(f"{step[:9]:>10}" for step in STEPS)]
        for row in ROWS:
            counts = "".join(f"{self.hits.get((row, step), 0):>10}" for step in STEPS)
            lines.append(f"{row:<{width}}{counts}")
        return lines


@dataclass(slots=True)
class Options:
    """What one seed looks like: its size, its speeds and its faults."""

    members: int
    agents: int
    epochs: int
    replicas: int = 1
    domains: int = 0
    """So many failure domains the nodes are spread over; 0: each is its own."""
    node_local: bool = False
    budget: int = 256 << 20
    chunk_bytes: int = 4 << 20
    chunks: int = 3
    """Chunks of each member."""
    train_s: float = 1.0
    deadline_s: float = 60.0
    retries: float = 0.0
    """How likely a rank saves a failed epoch once more."""
    latency_s: float = 0.0005
    store_s: float = 0.005
    copy_s: float = 0.02
    chaos_events: int = 0
    """A process fault comes after so many events on average; 0: never."""
    network_rate: float = 0.0
    store_rate: float = 0.0
    rows: frozenset[str] = frozenset()
    """The faults that exist in this seed."""
    weights: dict[str, float] = field(default_factory=dict)
    parallel_store: bool = False
    real_links: bool = False
    """Sessions are made of the real link machines."""
    wire: bool = False
    """Messages between nodes travel as the bytes that production sends."""
    rereads: float = 0.0
    """How likely a rank reads the newest epoch after a save."""
    evictions: float = 0.0
    """How likely memory that a read released is used again at once."""
    local: bool = False
    """One agent that never joins a controller: it hosts its own, as without other nodes."""

    def pick(self, rng: random.Random, rows: tuple[str, ...]) -> str:
        """One of these faults, by the weights of this seed, or "" when none of them exists."""
        rows = tuple(row for row in rows if row in self.rows)
        if not rows:
            return ""
        return rng.choices(rows, [self.weights[row] for row in rows])[0]


def draw(
    rng: random.Random, members: int, agents: int, epochs: int, *, swarm: bool = True
) -> Options:
    """The options of a seed: a random subset of the faults with wild weights (swarm testing).

    Without ``swarm`` only the size is not drawn.
    """
    options = Options(
        members=max(1, round(members * rng.random() ** 2.5)) if rng.random() < 0.9 else members,
        agents=1,
        epochs=max(1, round(epochs * rng.random() ** 2.5)) if rng.random() < 0.9 else epochs,
    )
    options.agents = min(agents, options.members, max(1, round(agents * rng.random() * 1.2)))
    if not swarm:
        options.members, options.agents, options.epochs = members, min(agents, members), epochs
    calm = rng.random() < 0.1
    away = calm and rng.random() < 0.3
    some = rng.choice((0.15, 0.4, 0.8))
    rows = [row for row in (*NETWORK, *PROCESSES, *DISK, *BACKEND) if rng.random() < some]
    rows += [row for row in BUGGIFY if rng.random() < 0.12]
    options.rows = frozenset((("away",) if away else ()) if calm else rows)
    options.weights = {row: 10 ** rng.uniform(-1, 1) for row in ROWS if row not in STORES}
    options.replicas = rng.choice((1, 1, 2, 2, 3))
    options.domains = rng.choice((0, 0, 0, 2, 3))
    options.node_local = rng.random() < 0.3 and options.agents == 1
    options.train_s = 10 ** rng.uniform(-2, 1)
    options.deadline_s = rng.choice((10.0, 60.0, 600.0))
    options.retries = rng.choice((0.0, 0.5, 1.0))
    options.latency_s = 10 ** rng.uniform(-4, -2)
    options.store_s = 10 ** rng.uniform(-3.5, -0.5)
    options.copy_s = 10 ** rng.uniform(-3, 0)
    options.chaos_events = round(10 ** rng.uniform(1.7, 3.3))
    options.network_rate = rng.choice((0.0, 0.005, 0.05))
    options.store_rate = rng.choice((0.0, 0.01, 0.1))
    options.parallel_store = rng.random() < 0.5
    options.real_links = rng.random() < 0.25
    options.wire = rng.random() < 0.15
    options.rereads = rng.choice((0.0, 0.0, 0.1, 0.3))
    options.evictions = rng.choice((0.0, 0.0, 0.5))
    options.local = options.agents == 1 and rng.random() < 0.5
    options.rereads = 0.0 if options.local else options.rereads
    options.chunks = rng.choice((1, 2, 3, 6))
    options.chunk_bytes = rng.choice((1 << 20, 3 << 20, 4 << 20))
    _buggify(options, rng)
    if not calm and options.agents > 1 and rng.random() < 0.4:
        options.rows |= frozenset(STORES)
    options.weights |= {row: 10 ** rng.uniform(-1, 1) for row in STORES}
    return options


def _buggify(options: Options, rng: random.Random) -> None:
    """Sizes and limits at the edge of what is allowed."""
    if "tiny_chunks" in options.rows:
        options.chunk_bytes = rng.randint(1, 64)
    if "one_tick" in options.rows:
        options.deadline_s = rng.choice((0.01, 0.1, 0.5))
    per_node = -(-options.members // options.agents)
    need = per_node * ((options.chunks * options.chunk_bytes >> 21) + 1) * (2 << 20)
    options.budget = rng.choice((1, 2, 3, 8)) * need * min(options.replicas, 2)
    if "queue_of_one" in options.rows:
        options.budget = max(need, per_node * (12 << 20))


StepsOf = Callable[[], Iterable[str]]
