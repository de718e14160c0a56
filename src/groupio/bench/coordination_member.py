"""The members of ``groupio bench coordination``: real client processes, forked from one.

``python -m groupio.bench.coordination_member FOLDER``. Each saves epoch after epoch with
``Client.save``; it only waits for a common start before it tells its agent so.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from typing import Any
from unittest.mock import patch

import groupio
from groupio.bench.board import Board, Plan, items
from groupio.bench.coordination_agent import settings_of
from groupio.client import saving
from groupio.client.connection import Connection
from groupio.protocol import messages as msg


def save_all(plan: Plan, rank: int) -> None:
    """Save every epoch of the run as ``rank``. The error of a save that fails."""
    board = Board(plan)
    send, granted = Connection.send, saving.Save.granted

    def on_send(connection: Connection, message: Any, *more: Any, **named: Any) -> None:
        if isinstance(message, msg.OpenSave):
            board.say_member(message.epoch, rank, "ready")
            board.await_start(message.epoch, "open")
            board.say_member(message.epoch, rank, "opened")
        send(connection, message, *more, **named)

    def on_granted(save: saving.Save, *grant: Any) -> None:
        board.say_member(save.handle.epoch, rank, "granted")
        granted(save, *grant)

    patch.object(Connection, "send", on_send).start()
    patch.object(saving.Save, "granted", on_granted).start()
    settings = settings_of(plan, plan.node_of(rank))
    client = groupio.connect(plan.store, rank=rank, world_size=plan.members, settings=settings)
    with client:
        for epoch in range(1, plan.epochs + 1):
            handle = client.save(items(plan, rank, epoch), epoch=epoch, deadline_s=plan.timeout_s)
            handle.wait("durable", timeout_s=plan.timeout_s)


def main(arguments: list[str]) -> int:
    """Fork all members and wait for them; 1 when one failed, whose error is on stderr."""
    plan = Plan.load(arguments[0])
    members = [_fork(plan, rank) for rank in range(plan.members)]
    signal.signal(signal.SIGTERM, lambda *_: _end(members))
    failed = [pid for pid in members if os.waitpid(pid, 0)[1]]
    return 1 if failed else 0


def _fork(plan: Plan, rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        save_all(plan, rank)
        code = 0
    except Exception:  # noqa: BLE001  the benchmark shows the last line
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _end(members: list[int]) -> None:
    for pid in members:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
