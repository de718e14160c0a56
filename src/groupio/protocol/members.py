"""Records of the processes of a job, as its controller knows them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from groupio.protocol import events as ev

OPENS_REMEMBERED = 64
"""So many saves of each client are remembered, to know an open that comes twice."""


class FormedLaunch(NamedTuple):
    """A launch whose members met and made its id themselves: it stands for these processes.

    Each time processes of a ``series`` meet in another set of members, the number is greater.
    """

    series: str
    number: int
    members: str
    """A digest of the ids of the processes, in the order of their ranks."""

    @property
    def launch_id(self) -> str:
        """The id that its members say when they connect."""
        return f"formed/{self.series}/{self.number}/{self.members}"

    @classmethod
    def parse(cls, launch_id: str | None) -> FormedLaunch | None:
        """The launch of this id; None for the id of a launcher, which stands for no processes."""
        words = (launch_id or "").split("/")
        if len(words) != 4 or words[0] != "formed" or not words[2].isdecimal():
            return None
        return cls(words[1], int(words[2]), words[3])


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
    is_complete: bool = False
    """All of its members came to one of its groups."""

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
    gone_at: int = 0
    """The moment at which its process or its node was known to be gone; 0 while it is not."""
    opened_at: int = 0
    """The moment of :class:`groupio.protocol.presence.Presence` at which it opened a save last."""
    opened: deque[int] = field(default_factory=lambda: deque(maxlen=OPENS_REMEMBERED))
