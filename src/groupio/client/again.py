"""After the loss of an agent: its successor hears which saves were given up with it."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence

from groupio.client import nesting
from groupio.errors import GroupIOError

log = logging.getLogger("groupio.client")

EPOCHS_TOLD = 16
"""So many epochs are told to the next agent, the newest ones."""


class Again:
    """Epochs whose saves were blocked in their calls when this client lost their agent.

    Members that had not called yet open the group at the next agent, and would wait there for
    this one until their deadline: so it connects anew at once and says what it gave up.
    ``connect`` makes the connection; without ``others`` there is nobody to tell.
    """

    def __init__(self, connect: Callable[[], object], *, others: bool) -> None:
        self.epochs: tuple[int, ...] = ()
        self._connect = connect
        self._others = others

    def lost(self, epochs: Sequence[int]) -> None:
        """An agent is lost with the saves of these epochs; returns at once."""
        self.epochs = tuple(sorted({*self.epochs, *epochs})[-EPOCHS_TOLD:])
        if self._others:
            # Refused at the end of the interpreter, when it does not matter any more.
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=self._run, name="groupio-again", daemon=True).start()

    @nesting.thread
    def _run(self) -> None:
        try:
            self._connect()
        except GroupIOError as error:
            log.info("no agent heard that epochs %s were given up: %s", self.epochs, error.message)
