"""Doors of committed epochs, made in a thread of their own after the members heard of the commit.

A door is no part of a save: whatever goes wrong with it is a note on the members' handles. One
that an agent did not live to make is made by the next, when a client connects to the store.
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from groupio.backend.doors import DOORS
from groupio.errors import GroupIOError
from groupio.exhaustion import ThreadPool
from groupio.protocol import messages as msg

if TYPE_CHECKING:
    from groupio.agent.driver import Driver
    from groupio.agent.job import Job
    from groupio.protocol.effects import MemberSeat

log = logging.getLogger(__name__)

NICE = 5
"""CPU priority of the thread that makes doors: as the hash threads', and for the same reason."""

DCP = "dcp"

ELSEWHERE_S = 20.0
"""How long the agent of rank 0 may take for a door before another one makes it."""


class _Wish(NamedTuple):
    """The door of an epoch of the store at ``path``; ``epoch`` None: of the newest one, if it
    should have one. Not ``wanted``: only that of another write has to go."""

    path: str
    epoch: int | None
    wanted: bool
    file_mode: int | None = None
    umask: int | None = None
    elsewhere: bool = False
    """The agent of rank 0 makes it: of many nodes, one is enough."""


@dataclass(slots=True)
class _Order:
    """A door that is being made, and the saves that wait for it: (client, save id)."""

    waiting: list[tuple[str, int]] = field(default_factory=list)


class Doors:
    """The doors that this agent still has to make."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._asked: dict[tuple[str, int], _Wish] = {}
        """By (client, save id), of saves that are not decided yet."""
        self._orders: dict[_Wish, _Order] = {}
        self._thread = ThreadPool(1, "door", initializer=_yield_to_others)

    @property
    def busy(self) -> bool:
        """A door is still to be made."""
        return bool(self._orders)

    def opened(self, job: Job, client: str, message: msg.OpenSave) -> None:
        """A member opened a save; remember whether it wants a door."""
        wanted = message.door == DCP
        self._asked[client, message.save_id] = _Wish(
            job.path, message.epoch, wanted, job.store.file_mode, job.store.umask
        )

    def decided(self, seat: MemberSeat, *, committed: bool) -> None:
        """A member's save is over: make its door, after the member has heard of the commit."""
        wish = self._asked.pop((seat.client, seat.save_id), None)
        if wish is None or not committed:
            return
        if wish.wanted:
            wish = wish._replace(elsewhere=self._is_elsewhere(wish.path, seat))
            self._order(wish).waiting.append((seat.client, seat.save_id))
        else:
            # A rewind may have left the door of an abandoned epoch under this one's number.
            self._order(wish)

    def forget(self, path: str) -> None:
        """The store at ``path`` is closed: no save of it is undecided."""
        self._asked = {seat: wish for seat, wish in self._asked.items() if wish.path != path}

    def _is_elsewhere(self, path: str, seat: MemberSeat) -> bool:
        job = self._driver.jobs.get(path)
        if job is None or job.joining is None:
            return False
        ranks = (peer.hello.rank for peer in self._driver.clients.values() if peer.hello)
        return 0 not in (seat.rank, *ranks)

    def recover(self, job: Job) -> None:
        """A store was opened: make the door of its newest epoch if that lacks one it should have.

        Costs a look at the store, in the doors' own thread.
        """
        self._order(_Wish(job.path, None, False, job.store.file_mode, job.store.umask))

    def _order(self, wish: _Wish) -> _Order:
        """The order for an epoch's door.

        A new one is made for each that comes after the last was carried out: that is a look at
        the door that is there.
        """
        order = self._orders.get(wish)
        if order is None:
            order = self._orders[wish] = _Order()
            self._thread.submit(self._carry_out, wish)
        return order

    def _carry_out(self, wish: _Wish) -> None:
        error = ""
        try:
            self._make(wish)
        except GroupIOError as failed:
            log.warning("no door of epoch %s of %s: %s", wish.epoch, wish.path, failed.message)
            error = failed.message
        except Exception as failed:
            log.exception("making the door of epoch %s of %s failed", wish.epoch, wish.path)
            error = f"{type(failed).__name__}: {failed}"
        self._driver.post(lambda: self._done(wish, error))

    def _make(self, wish: _Wish) -> None:
        number = None if wish.wanted else wish.epoch
        if number is not None and not os.path.lexists(os.path.join(wish.path, DOORS, str(number))):
            return
        # Imported here: an agent whose jobs want no doors does without.
        from groupio.door.publish import await_door, ensure_door

        if wish.elsewhere and wish.epoch is not None:
            if await_door(wish.path, wish.epoch, ELSEWHERE_S):
                return
            log.warning("nobody made the door of epoch %d: this agent does", wish.epoch)
        pause = self._driver.workers.give_way
        made = ensure_door(
            wish.path,
            wish.epoch,
            wanted=wish.wanted,
            pause=pause,
            file_mode=wish.file_mode,
            umask=wish.umask,
        )
        if made is not None:
            log.info("door of epoch %d: %d pieces, %d bytes", made.epoch, made.pieces, made.bytes)

    def _done(self, wish: _Wish, error: str) -> None:
        for client, save_id in self._orders.pop(wish).waiting:
            peer = self._driver.clients.get(client)
            if peer is not None:
                self._driver.send(peer, msg.DoorDone(save_id, error))

    def close(self) -> None:
        """Begin no further door; the thread ends after the one that it is at."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _yield_to_others() -> None:
    thread = threading.get_native_id()
    now = os.getpriority(os.PRIO_PROCESS, thread)
    os.setpriority(os.PRIO_PROCESS, thread, max(now, NICE))
