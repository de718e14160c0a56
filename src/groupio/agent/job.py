"""One job as this agent sees it: its store, and the way to its controller."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from groupio.controller.host import Host
from groupio.controller.store import JobStore
from groupio.protocol import events as ev


@dataclass(slots=True, eq=False)
class Job:
    """A store in use on this node."""

    path: str
    store: JobStore
    host: Host
    settling: list[Any] = field(default_factory=list)

    @property
    def idle(self) -> bool:
        """No group and no question to the store is outstanding."""
        return self.host.idle

    def tell(self, event: ev.ControllerEvent) -> None:
        """Tell the controller, wherever it is."""
        self.host.tell(event)

    def run(self, task: Callable[[], None]) -> None:
        """Run ``task`` in the job's thread, after what is there; its errors are logged."""
        self.host.run(task)

    def end(self) -> None:
        """Close the store and end the thread."""
        self.host.end()
