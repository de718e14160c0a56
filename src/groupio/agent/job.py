"""One job as this agent sees it: its store, its clients' open saves, the way to its controller."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from groupio.backend.place import Place
from groupio.controller.host import Host
from groupio.controller.store import JobStore
from groupio.errors import IntegrityError
from groupio.model import DecisionKey, Level
from groupio.protocol import effects as fx
from groupio.protocol import events as ev

if TYPE_CHECKING:
    from groupio.agent.joining import Joining


@dataclass(slots=True, eq=False)
class Job:
    """A store in use on this node.

    ``host`` is its controller where that is in this process; ``joining`` is the way to it where
    the job spans nodes. A job of one node has the first only.
    """

    path: str
    store: JobStore
    place: Place | None = None
    """What the path led to when the first client came, where that was known."""
    host: Host | None = None
    joining: Joining | None = None
    settling: list[Any] = field(default_factory=list)
    clients: dict[str, ev.ClientArrived] = field(default_factory=dict)
    opens: dict[tuple[str, int], ev.MemberOpened] = field(default_factory=dict)
    """Saves of this node's clients that are not over, by client and save id: a controller that
    takes over asks for them."""

    @property
    def idle(self) -> bool:
        """Nothing is outstanding, here or with agents that follow a controller here."""
        if self.joining is not None and self.joining.unheard.awaited:
            return False
        # Other nodes' agents leave when they are done: the controller stays for them.
        return self.quiet and (self.host is None or not self.host.lines.by_node)

    @property
    def quiet(self) -> bool:
        """No group and no question to the store is outstanding."""
        if self.joining is not None and (self.opens or not self.joining.idle):
            return False
        return self.host is None or self.host.idle

    def tell(self, event: ev.ControllerEvent) -> None:
        """Tell the controller, wherever it is."""
        if self.joining is None:
            assert self.host is not None
            self.host.tell(event)
            return
        match event:
            case ev.ClientArrived(client=client):
                self.clients[client] = event
            case ev.MemberOpened(client=client, save_id=save_id):
                self.opens[client, save_id] = event
                if (known := self.clients.get(client)) is not None:
                    # A controller that takes over has to know that this client is a member.
                    self.clients[client] = replace(known, has_saved=True)
            case ev.MemberFailed(client=client, save_id=save_id):
                self.opens.pop((client, save_id), None)
        self.joining.tell(event)
        if isinstance(event, ev.MemberGone):
            self.clients.pop(event.client, None)

    def over(self, effect: fx.TellReached | fx.TellFailed) -> None:
        """A member was told how far its save is."""
        if isinstance(effect, fx.TellFailed) or effect.level is Level.DURABLE:
            self.opens.pop((effect.seat.client, effect.seat.save_id), None)
        if isinstance(effect, fx.TellFailed) and isinstance(effect.error, IntegrityError):
            # What the save referred to may be gone: the next one writes all its chunks anew.
            self.store.forget_chunks()

    def opens_now(self) -> tuple[ev.MemberOpened, ...]:
        """The open saves, with what of their time has passed by now."""
        now = time.monotonic()
        return tuple(
            replace(one, elapsed_s=one.elapsed_s + now - one.at, at=now)
            for one in self.opens.values()
        )

    def learn(self, key: DecisionKey) -> None:
        """An epoch is committed, by a controller that may be elsewhere."""
        if self.joining is not None:
            self.run(lambda: self.store.learn(key))

    def run(self, task: Callable[[], None]) -> None:
        """Run ``task`` in the job's thread, after what is there; its errors are logged."""
        (self.joining or self.host).run(task)  # type: ignore[union-attr]

    def leave(self) -> None:
        """Take part no more; in the event loop, ahead of :meth:`end`."""
        if self.joining is not None:
            self.joining.leave()
        if self.host is not None:
            self.host.hang_up("its agent leaves the job")
        if self.joining is not None:
            self.joining.shut()

    def end(self) -> None:
        """Close the store and end the threads; takes as long as what they are at. Any thread."""
        if self.joining is not None:
            self.joining.end()
        if self.host is not None:
            self.host.end()
