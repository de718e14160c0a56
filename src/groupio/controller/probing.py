"""Asks whether the controller of a recorded rule still answers; the store alone cannot say that."""

from __future__ import annotations

import asyncio
import socket

from groupio.controller import messages as cm
from groupio.controller.coordinator import Rule
from groupio.controller.keys import Keys
from groupio.controller.sockets import split_address
from groupio.controller.transport import ControlClient
from groupio.errors import ControllerLost, FormatError, InvalidInput, from_wire
from groupio.protocol.wireform import WireForm

PROBE_S = 5.0
"""So long a controller may take to answer before it counts as gone."""


LISTENS_S = 2.0
"""How long a machine may take to answer whether somebody listens there."""


def is_taken(address: str) -> bool:
    """Whether somebody takes connections at ``tcp://host:port``; nothing is said there."""
    try:
        socket.create_connection(split_address(address), LISTENS_S).close()
    except (OSError, InvalidInput):
        return False
    return True


async def rules_still(
    rule: Rule, hello: cm.NodeHello, keys: Keys, timeout_s: float = PROBE_S
) -> bool:
    """Whether ``rule.address`` answers ``hello`` as the controller of its store does.

    An answer that refuses this release counts too. False after ``timeout_s`` seconds of silence,
    and when whoever is there says that the controller is not.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[bool] = loop.create_future()
    form = WireForm(cm.FROM_CONTROLLER)

    def say(alive: bool) -> None:
        if not answer.done():
            answer.set_result(alive)

    def take(payload: bytes) -> None:
        try:
            message = form.decode(payload)
        except FormatError:
            say(True)  # another release, but it is there
            return
        refused = isinstance(message, cm.NodeRefused)
        say(not (refused and isinstance(from_wire(message.error), ControllerLost)))

    try:
        client = ControlClient(
            loop,
            rule.address,
            keys,
            life=hello.life,
            on_message=take,
            on_lost=lambda why: say(False),
        )
    except InvalidInput:
        return False  # nobody with this job's settings can reach it
    try:
        client.send(WireForm(cm.FROM_NODE).encode(hello))
        return await asyncio.wait_for(answer, timeout_s)
    except TimeoutError:
        return False
    finally:
        client.close()
