"""Doors of committed epochs, made in a thread of their own after the members heard of the commit.

A door is no part of a save: whatever goes wrong with it is a note on the members' handles. One
that an agent did not live to make is made by the next, when a client connects to the store.
"""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from groupio.errors import GroupIOError
from groupio.protocol import messages as msg

if TYPE_CHECKING:
    from groupio.agent.driver import Driver
    from groupio.agent.job import Job
    from groupio.protocol.effects import MemberSeat

log = logging.getLogger(__name__)

NICE = 5
"""CPU priority of the thread that makes doors: as the hash threads', and for the same reason."""

DCP = "dcp"


@dataclass(slots=True)
class _Order:
    """A door that is being made, and the saves that wait for it: (client, save id)."""

    waiting: list[tuple[str, int]] = field(default_factory=list)


class Doors:
    """The doors that this agent still has to make."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._asked: dict[tuple[str, int], tuple[str, int]] = {}
        """(client, save id) -> (store, epoch) of saves that are not decided yet."""
        self._orders: dict[tuple[str, int | None], _Order] = {}
        self._thread = ThreadPoolExecutor(1, "door", initializer=_yield_to_others)

    @property
    def busy(self) -> bool:
        """A door is still to be made."""
        return bool(self._orders)

    def opened(self, job: Job, client: str, message: msg.OpenSave) -> None:
        """A member opened a save; remember that it wants a door."""
        if message.door == DCP:
            self._asked[client, message.save_id] = job.path, message.epoch

    def decided(self, seat: MemberSeat, *, committed: bool) -> None:
        """A member's save is over: make its door, after the member has heard of the commit."""
        wanted = self._asked.pop((seat.client, seat.save_id), None)
        if wanted is not None and committed:
            self._order(*wanted).waiting.append((seat.client, seat.save_id))

    def recover(self, job: Job) -> None:
        """A store was opened: make the door of its newest epoch if that lacks one it should have.

        Costs a look at the store, in the doors' own thread.
        """
        self._order(job.path, None)

    def _order(self, path: str, epoch: int | None) -> _Order:
        """The order for an epoch's door; ``epoch`` None: the newest one's, if it should have one.

        A new one is made for each that comes after the last was carried out: that is a look at
        the door that is there.
        """
        place = path, epoch
        order = self._orders.get(place)
        if order is None:
            order = self._orders[place] = _Order()
            self._thread.submit(self._carry_out, path, epoch)
        return order

    def _carry_out(self, path: str, epoch: int | None) -> None:
        error = ""
        try:
            self._make(path, epoch)
        except GroupIOError as failed:
            log.warning("no door of epoch %s of %s: %s", epoch, path, failed.message)
            error = failed.message
        except Exception as failed:
            log.exception("making the door of epoch %s of %s failed", epoch, path)
            error = f"{type(failed).__name__}: {failed}"
        self._driver.post(lambda: self._done(path, epoch, error))

    def _make(self, path: str, epoch: int | None) -> None:
        # Imported here: an agent whose jobs want no doors does without.
        from groupio.door.publish import ensure_door

        made = ensure_door(path, epoch, pause=self._driver.workers.give_way)
        if made is not None:
            log.info("door of epoch %d: %d pieces, %d bytes", made.epoch, made.pieces, made.bytes)

    def _done(self, path: str, epoch: int | None, error: str) -> None:
        for client, save_id in self._orders.pop((path, epoch)).waiting:
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
