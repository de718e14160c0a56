"""The listening side of links: which session a frame belongs to, with a bound on their number."""

from __future__ import annotations

from collections.abc import Callable

from groupio.protocol.link import Link
from groupio.protocol.linkconfig import LinkConfig
from groupio.protocol.linkframe import Frame, FrameKind, end_of


class Listener:
    """Which end of this process a frame belongs to; makes a listening end for each new OPEN.

    ``life`` is this process; ``hello`` is what it answers. ``number`` gives a number that this
    life uses once. At most ``ends_max`` sessions, half-open ones included.
    """

    def __init__(
        self,
        life: str,
        number: Callable[[], int],
        *,
        hello: bytes = b"",
        ends_max: int = 4096,
        config: LinkConfig | None = None,
    ) -> None:
        self._life = life
        self._number = number
        self._hello = hello
        self._ends_max = ends_max
        self._config = config or LinkConfig()
        self._by_own: dict[str, Link] = {}
        self._by_peer: dict[str, Link] = {}

    def __len__(self) -> int:
        return len(self._by_own)

    def route(self, now: float, frame: Frame) -> Link | None:
        """The end that has to handle ``frame``, or None.

        Answer a frame that has none with :func:`groupio.protocol.linkframe.reject`.
        """
        if frame.kind is not FrameKind.OPEN:
            return self._by_own.get(frame.target)
        link = self._by_peer.get(frame.source)
        if link is None and frame.source and len(self._by_own) < self._ends_max:
            own = end_of(self._life, self._number())
            link = Link(own, now, hello=self._hello, peer=frame.source, config=self._config)
            self._by_own[own] = self._by_peer[frame.source] = link
        return link

    def drop(self, link: Link) -> None:
        """Forget an end that was lost or closed."""
        del self._by_own[link.own]
        del self._by_peer[link.peer]
