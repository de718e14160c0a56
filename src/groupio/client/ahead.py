"""Prepares a first save in the background, while the job loads or trains.

Only an advance: whatever fails here is said by the save itself, which does it again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from groupio.client import nesting
from groupio.client.client import Client
from groupio.errors import GroupIOError
from groupio.exhaustion import start_some
from groupio.protocol import messages as msg

log = logging.getLogger("groupio.client")


def connect_ahead(client: Client) -> Client:
    """``client``, which connects, starting the agent, in the background.

    Calls that need the agent wait for that.
    """
    _in_background(client, client._connected)
    return client


def expect_save(client: Client, total_bytes: int) -> None:
    """Get ready for a first save of about so many bytes, in the background.

    The agent prepares that much memory if there is room, and this process maps it.
    """

    def tell() -> None:
        connection = client._connected()
        # A client that is closing says Bye after this, or this not at all.
        with client._connecting:
            if not client._closed:
                connection.send(msg.Expect(total_bytes))
        _warm_up()

    _in_background(client, tell)


def _in_background(client: Client, work: Callable[[], Any]) -> None:
    @nesting.thread
    def run() -> None:
        try:
            work()
        except (GroupIOError, OSError) as error:
            log.info("%s: getting ready for a save failed: %s", client.store, error)

    if nesting.is_nested():
        nesting.start(run)
        return
    try:
        start_some([threading.Thread(target=run, name="groupio-ahead", daemon=True)])
    except GroupIOError as error:
        log.info("%s: not getting ready for a save: %s", client.store, error.message)


def _warm_up() -> None:
    """Import what a save needs; numpy loads parts of itself at their first use, too."""
    import groupio.client.arena
    import groupio.client.saving  # noqa: F401
    from groupio.client.outgoing import Packer

    Packer().pack({"x": b""}, ())
