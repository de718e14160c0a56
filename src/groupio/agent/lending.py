"""The node's staging memory at work: arenas made, filled ahead of use, and lent to ranks."""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING

from groupio.agent.arena import MemberArena
from groupio.errors import GroupIOError
from groupio.exhaustion import ThreadPool
from groupio.model import PAGE_BYTES
from groupio.protocol import effects as fx
from groupio.protocol import messages as msg

if TYPE_CHECKING:
    from groupio.agent.driver import Driver
    from groupio.agent.peer import Peer

log = logging.getLogger(__name__)

_NICER = 5


class Memory:
    """Executes the agent machine's orders about arenas, in the event loop."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.arenas: dict[int, MemberArena] = {}
        self._handed_over: set[int] = set()
        """Arenas that their clients have."""
        self._populating = ThreadPool(1, "populate", initializer=yield_to_others)
        self._populates: dict[tuple[int, int], threading.Event] = {}
        """Extents that are being filled, each with the sign that it is not wanted any more."""

    def shut(self) -> None:
        """Fill no further memory; what is being filled stops soon."""
        for unwanted in self._populates.values():
            unwanted.set()
        self._populating.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """Give all memory back."""
        for arena in self.arenas.values():
            arena.close()

    def execute(self, effect: fx.Effect) -> None:
        """Execute one effect that concerns memory."""
        match effect:
            case fx.OpenArena(arena=arena, client=client):
                self.arenas[arena] = MemberArena()
                if (peer := self._driver.clients.get(client)) is not None:
                    try:
                        self._hand_over(peer, arena)
                    except OSError as error:
                        # The lease that needs it tries again, and says what is wrong.
                        log.warning("an arena is not handed over yet: %s", error)
            case fx.CloseArena(arena=arena):
                for place, unwanted in self._populates.items():
                    if place[0] == arena:
                        unwanted.set()
                self._handed_over.discard(arena)
                self.arenas.pop(arena).close()
            case fx.Punch(arena=arena, offset=offset, length=length):
                if (populating := self._populates.get((arena, offset))) is not None:
                    populating.set()
                try:
                    self.arenas[arena].punch(offset, length)
                except OSError as error:
                    log.error("%d bytes of memory are not given back: %s", length, error)
            case fx.Populate():
                self._populate(effect)
            case fx.GrantLease():
                self._grant(effect)

    def view(self, arena: int, offset: int, length: int) -> memoryview | None:
        """Bytes of an arena, whole pages or not; None when it is gone. From any thread."""
        memory = self.arenas.get(arena)
        low = offset // PAGE_BYTES * PAGE_BYTES
        high = -(-(offset + length) // PAGE_BYTES) * PAGE_BYTES
        try:
            pages = None if memory is None else memory.map(low, high - low)
        except (OSError, ValueError):
            return None  # it was closed just now
        return None if pages is None else pages[offset - low : offset - low + length]

    def _hand_over(self, peer: Peer, number: int) -> None:
        """Give a client its arena, once; OSError when the system has no descriptor for that."""
        if number not in self._handed_over:
            self._driver.send(peer, msg.Arena(), (self.arenas[number].fd,))
            self._handed_over.add(number)

    def _grant(self, effect: fx.GrantLease) -> None:
        peer = self._driver.clients.get(effect.client)
        if peer is None:
            return
        wave, arena = effect.wave, self.arenas[effect.arena]
        if wave.virt_hi > wave.virt_lo:
            arena.map(effect.offset, wave.virt_hi - wave.virt_lo)
        self._hand_over(peer, effect.arena)
        message = msg.Grant(
            save_id=effect.save_id,
            key=effect.key,
            wave=effect.number,
            waves=effect.waves,
            offset=effect.offset,
            virt_lo=wave.virt_lo,
            virt_hi=wave.virt_hi,
            chunk_lo=wave.chunk_lo,
            chunk_hi=wave.chunk_hi,
        )
        self._driver.send(peer, message)

    def _populate(self, effect: fx.Populate) -> None:
        arena, place = self.arenas[effect.arena], (effect.arena, effect.offset)
        unwanted = self._populates[place] = threading.Event()

        def populate() -> None:
            try:
                if not unwanted.is_set():
                    arena.populate(effect.offset, effect.length, should_stop=unwanted.is_set)
                    if unwanted.is_set():
                        # It was given back meanwhile: what came after that must go, too.
                        arena.punch(effect.offset, effect.length)
            except (GroupIOError, OSError, ValueError) as error:
                if not unwanted.is_set():
                    log.warning("memory was not prepared ahead of its use: %s", error)
                unwanted.set()
            except Exception:
                log.exception("memory was not prepared ahead of its use")
                unwanted.set()
            self._driver.post(announce)

        def announce() -> None:
            if self._populates.get(place) is unwanted:
                del self._populates[place]
            peer = self._driver.clients.get(effect.client)
            if peer is None or unwanted.is_set() or arena.is_closed:
                return
            try:
                self._hand_over(peer, effect.arena)
            except OSError as error:
                log.warning("memory was not prepared ahead of its use: %s", error)
                return
            self._driver.send(peer, msg.Standby(effect.offset, effect.length))

        self._populating.submit(populate)


def yield_to_others() -> None:
    """Lower this thread's CPU priority; on Linux it belongs to the thread."""
    os.nice(_NICER)
