"""What a controller knows of the processes of its job."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from groupio.protocol import events as ev

OPENS_REMEMBERED = 64
"""So many saves of each client are remembered, to know an open that comes twice."""


@dataclass(slots=True)
class Incarnation:
    """One life of the job's processes; ``clients`` by rank."""

    number: int
    world_size: int
    rewind_to: int | None
    launch_id: str | None
    newest: int = -1
    """The newest epoch that this life of the job has committed."""
    clients: dict[int, str] = field(default_factory=dict)

    def rank_of(self, client: str) -> int | None:
        """The rank of a client in this life, or None."""
        return next((rank for rank, name in self.clients.items() if name == client), None)


@dataclass(slots=True)
class Client:
    """One connection of a process; ``incarnation`` is 0 until it has a rank in one."""

    process: ev.Process
    incarnation: int = 0
    alive: bool = True
    process_gone: bool = False
    closed: bool = False
    """It said goodbye."""
    has_saved: bool = False
    """It saved before this controller heard of it."""
    rank: int = 0
    node: str = ""
    node_lost: bool = False
    """It was connected to an agent that is lost; whether its process ended is not known."""
    opened: deque[int] = field(default_factory=lambda: deque(maxlen=OPENS_REMEMBERED))
