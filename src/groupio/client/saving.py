"""One save on the caller's side: wait for leases, copy wave after wave, hand them over.

The calling thread copies; the listening thread brings grants and failures. The agent may reuse a
lease only after this side said that nobody writes to it any more, so exactly one of the two
answers a failure: the copying thread while it copies, else the listening one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from groupio.client.arena import ClientArena
from groupio.client.copying import copy_range, wave_bytes
from groupio.client.handle import SaveHandle
from groupio.client.values import Prepared
from groupio.errors import (
    AgentLost,
    GroupAborted,
    GroupIOError,
    Outcome,
    from_wire,
    to_wire,
)
from groupio.model import Level
from groupio.plan.layout import Layout
from groupio.protocol import messages as msg

log = logging.getLogger("groupio.client")

ANSWER_MARGIN_S = 10.0
"""The agent ends a save at its deadline; so much later the client stops believing in it."""

_SEND_S = 60.0
"""A message that the agent does not take for so long means that it hangs."""

_LAST_WORD_S = 1.0
"""After the deadline, or an error of its own, the call does not wait longer than this."""


class Save:
    """A save in work.

    ``send(message, timeout_s)`` raises AgentLost; ``handle`` gets all news; ``deadline`` is a
    reading of ``time.monotonic``.
    """

    def __init__(
        self,
        save_id: int,
        rank: int,
        handle: SaveHandle,
        deadline: float,
        send: Callable[[msg.ToAgent, float], None],
        agent_log: str,
    ) -> None:
        self.save_id = save_id
        self.handle = handle
        self._rank = rank
        self._deadline = deadline
        self._send_in = send
        self._agent_log = agent_log
        self._condition = threading.Condition()
        self._grants: deque[tuple[msg.Grant, ClientArena]] = deque()
        self._failed = False
        self._copying = False
        self._handed_over = False

    @property
    def is_handed_over(self) -> bool:
        """Whether the agent has all bytes, or the save failed."""
        return self._handed_over or self._failed or self.handle._has_failed()

    # -- the calling thread ----------------------------------------------------------------------

    def run(
        self,
        opened: msg.OpenSave,
        prepared: Prepared,
        layout: Layout,
        on_open: Callable[[], None] = lambda: None,
    ) -> None:
        """Send ``opened``, then copy until the last wave is handed over or the save failed.

        ``on_open`` is called once ``opened`` is sent.

        Never raises an error of groupio: it goes to the handle. Anything else (an interrupt) is
        raised after the agent was told that this member does not go on.
        """
        try:
            self._send(opened)
            on_open()
            while self._copy_next_wave(prepared, layout):
                pass
        except GroupIOError as error:
            self._give_up(error)
        except Exception as error:  # noqa: BLE001  whatever a tensor library throws
            self._give_up(
                GroupAborted(
                    f"rank {self._rank} could not copy its items of epoch {opened.epoch}: "
                    f"{type(error).__name__}: {error}",
                    members=[self._rank],
                    epoch=opened.epoch,
                    outcome=Outcome.UNKNOWN,
                )
            )
        except BaseException:
            self._give_up(
                GroupAborted(
                    f"rank {self._rank} was interrupted while it saved epoch {opened.epoch}",
                    members=[self._rank],
                    epoch=opened.epoch,
                    outcome=Outcome.UNKNOWN,
                )
            )
            raise

    def _copy_next_wave(self, prepared: Prepared, layout: Layout) -> bool:
        """Copy one wave; True when another one is to come."""
        granted = self._next_grant()
        if granted is None:
            return False
        grant, arena = granted
        done = True
        try:
            if grant.virt_hi > grant.virt_lo:
                lo, hi = wave_bytes(layout, grant.chunk_lo, grant.chunk_hi)
                lease, address = arena.address(grant.offset, grant.virt_hi - grant.virt_lo)
                done = copy_range(
                    prepared, layout, lo, hi, address + lo - grant.virt_lo, lambda: self._failed
                )
                del lease  # until here it kept the memory mapped
        finally:
            called_off = self._end_copying()
        if called_off:
            self._send(msg.Released(self.save_id))
        if called_off or not done:
            return False
        copied_at = time.monotonic()
        self._send(msg.Copied(self.save_id, grant.wave))
        if grant.wave + 1 < grant.waves:
            return True
        self._handed_over = True
        self.handle._reach(Level.RELEASED, copied_at, notes=_wave_notes(grant.waves))
        return False

    def _next_grant(self) -> tuple[msg.Grant, ClientArena] | None:
        """The next lease to fill; None when the save failed. From here on this thread copies."""
        with self._condition:
            while not self._grants:
                if self._failed:
                    return None
                left = self._deadline + ANSWER_MARGIN_S - time.monotonic()
                if left <= 0:
                    raise AgentLost(
                        f"the agent did not say what became of epoch {self.handle.epoch} until "
                        f"{ANSWER_MARGIN_S:.0f} s after the deadline; it hangs or its node is "
                        f"overloaded; its log is {self._agent_log}",
                        log=self._agent_log,
                    )
                self._condition.wait(left)
            if self._failed:
                return None
            self._copying = True
            return self._grants.popleft()

    def _end_copying(self) -> bool:
        """This thread writes to no lease any more; True when it has to answer a failure."""
        with self._condition:
            self._copying = False
            return self._failed

    def _send(self, message: msg.ToAgent) -> None:
        left = self._deadline + ANSWER_MARGIN_S - time.monotonic()
        self._send_in(message, min(max(left, _LAST_WORD_S), _SEND_S))

    def _give_up(self, error: GroupIOError) -> None:
        self.handle._fail(error)
        try:
            self._send_in(msg.SaveFailed(self.save_id, to_wire(error)), _LAST_WORD_S)
        except GroupIOError:
            pass  # without an agent there is nobody to tell; the handle has the first error

    # -- the listening thread --------------------------------------------------------------------

    def granted(self, grant: msg.Grant, arena: ClientArena) -> None:
        """A lease came."""
        with self._condition:
            self._grants.append((grant, arena))
            self._condition.notify_all()

    def note(self, notes: tuple[str, ...]) -> None:
        """Warn, once in the job, of a new lineage."""
        for note in notes:
            if self._rank == 0 and note.startswith("lineage: "):
                log.warning("%s", note.removeprefix("lineage: "))

    def failed(self, error: dict[str, Any]) -> None:
        """The group failed: stop copying, and tell the agent when that is so."""
        self.handle._fail(from_wire(error))
        with self._condition:
            answer = not self._copying
            self._failed = True
            self._condition.notify_all()
        if answer:
            self._send(msg.Released(self.save_id))

    def lost(self, error: GroupIOError) -> None:
        """The agent is gone, or this client closed: nobody waits for an answer."""
        self.handle._fail(error)
        self.handle._door_done(
            "not published before the agent was gone; a later connect, or `groupio export --dcp`, "
            "makes it"
        )
        with self._condition:
            self._failed = True
            self._condition.notify_all()


def _wave_notes(waves: int) -> tuple[str, ...]:
    """Why the call blocked longer than a copy takes, if it did."""
    if waves == 1:
        return ()
    return (
        f"released: after {waves} waves, because the state is larger than the memory budget; "
        "staged: in memory or already written",
    )
