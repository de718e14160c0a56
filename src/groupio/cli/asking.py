"""Asking the node's agent: one question, one answer, over its socket."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

from groupio import wire
from groupio.agent import process, spawn
from groupio.cli.output import CommandError
from groupio.protocol.messages import Answer, Ask, ToRank
from groupio.settings import Settings

ASK_S = 10.0
"""How long a question may take that the agent answers from memory."""

_POLL_S = 0.02


def paths() -> process.RuntimePaths:
    """Where this user's agent of this release lives."""
    return spawn.agent_paths(Settings.from_env())


def ask(what: str, *, timeout_s: float = ASK_S) -> dict[str, Any] | None:
    """The body of the agent's answer, or None when no agent runs.

    CommandError when one runs and does not answer in time.
    """
    where = paths()
    try:
        sock = wire.connect(where.socket, timeout_s=timeout_s)
    except (FileNotFoundError, ConnectionRefusedError):
        return None
    except (TimeoutError, BlockingIOError):
        raise _silent(where, timeout_s) from None
    channel = wire.Channel(sock, ToRank)
    try:
        return _converse(channel, what, time.monotonic() + timeout_s)
    except TimeoutError:
        raise _silent(where, timeout_s) from None
    except wire.ChannelClosed:
        # It ended between the question and the answer; for "stop" that is an answer too.
        return None
    finally:
        channel.close()


def _converse(channel: wire.Channel, what: str, deadline: float) -> dict[str, Any]:
    number = os.getpid()
    channel.send(Ask(number, what), timeout_s=max(deadline - time.monotonic(), 0.001))
    while True:
        message = channel.recv(max(deadline - time.monotonic(), 0.001)).message
        if isinstance(message, Answer) and message.request_id == number:
            return message.body


def _silent(where: process.RuntimePaths, timeout_s: float) -> CommandError:
    return CommandError(
        f"the agent (process {process.holder_pid(where)}) did not answer for {timeout_s:g} s; look "
        f"into {where.log}"
    )


def wait_until_gone(timeout_s: float) -> bool:
    """Wait until no agent of this release lives; False when one still does after ``timeout_s``."""
    where = paths()
    deadline = time.monotonic() + timeout_s
    with contextlib.suppress(FileNotFoundError):  # without the directory there is no agent
        while process.is_alive(where):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
    return True
