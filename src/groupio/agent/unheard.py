"""Events of a node's clients that are kept while there is no controller to tell."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from groupio.protocol import events as ev

KEEP_S = 30.0
"""An agent without clients looks for a controller so much longer to tell it."""

News = ev.ClientArrived | ev.MemberGone | ev.MemberFailed


@dataclass(slots=True)
class Unheard:
    """The news of one job, in their order."""

    _news: list[News] = field(default_factory=list)
    _awaited_until: float = 0.0

    def add(self, event: ev.MemberGone | ev.MemberFailed, client: ev.ClientArrived | None) -> None:
        """Keep ``event`` of ``client``.

        A client that lost its agent in a save, and ended before there was a controller again,
        would be known to nobody: the group of its epoch would wait for it until the deadline.
        """
        if isinstance(event, ev.MemberGone) and client is not None and client.gave_up:
            self._news.append(client)
            self._awaited_until = time.monotonic() + KEEP_S
        self._news.append(event)

    def take(self) -> list[News]:
        """All of it, for the controller that was found."""
        news, self._news, self._awaited_until = self._news, [], 0.0
        return news

    @property
    def awaited(self) -> bool:
        """Others wait for what is known here."""
        return time.monotonic() < self._awaited_until
