"""An agent as ``groupio bench coordination`` starts it: a real one that says when each step was.

``python -m groupio.bench.coordination_agent FOLDER NODE``. Besides the readings one thing differs
from any other agent: when the chunks of its members are named it waits for a common start before
it makes its report.
"""

from __future__ import annotations

import sys
import time
from typing import Any
from unittest.mock import patch

import msgspec

from groupio.agent import __main__ as agent
from groupio.agent.driver import Driver
from groupio.agent.pipeline import FlushJob
from groupio.bench.board import Board, Plan
from groupio.controller.host import Host
from groupio.controller.store import JobStore
from groupio.model import DecisionKey
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.settings import Settings

MEMORY_BYTES = 256 << 20


class Taps:
    """What is put around steps of the agent to note their times."""

    def __init__(self, board: Board, node: int) -> None:
        self._board = board
        self._node = node
        self._epochs: dict[int, int] = {}
        """The epoch of each group, by its number."""

    def install(self) -> None:
        """Wrap the steps, for as long as this process lives."""
        obey, complete, handle, plan = Driver.obey, FlushJob._complete, Host._handle, Host._plan
        send, learn = Host._send, JobStore.learn

        def on_obey(driver: Driver, job: Any, effect: fx.Effect) -> None:
            if isinstance(effect, fx.AdmitGroup):
                self._epochs[effect.group] = effect.key.epoch
            elif isinstance(effect, fx.StartCopy):
                self._board.say_node(self._epochs[effect.group], self._node, "start_copy")
            elif isinstance(effect, fx.StoreChunks):
                epoch = self._epochs[effect.group]
                self._board.say_node(epoch, self._node, "cpu_end", time.process_time())
                self._board.say_node(epoch, self._node, "ordered")
            obey(driver, job, effect)

        def on_complete(job: FlushJob) -> Any:
            epoch = job._key.epoch
            self._board.say_node(epoch, self._node, "held")
            self._board.await_start(epoch, "plan")
            self._board.say_node(epoch, self._node, "cpu_start", time.process_time())
            self._board.say_node(epoch, self._node, "complete")
            report = complete(job)
            self._board.say_node(epoch, self._node, "hashed")
            return report

        def on_handle(host: Host, event: Any) -> None:
            if isinstance(event, ev.NodeHashed):
                self._board.say(self._epochs[event.group], "last_hashed")
            handle(host, event)

        def on_plan(host: Host, effect: fx.MakePlan, *more: Any) -> ev.Planned:
            self._board.say(self._epochs[effect.group], "plan_begun")
            planned = plan(host, effect, *more)
            self._board.say(self._epochs[effect.group], "planned")
            return planned

        def on_send(host: Host, effect: fx.Effect) -> None:
            send(host, effect)
            if isinstance(effect, fx.StoreChunks):
                self._board.say(self._epochs[effect.group], "orders_sent")

        def on_learn(store: JobStore, key: DecisionKey) -> None:
            learn(store, key)
            self._board.say_node(key.epoch, self._node, "learnt")

        patch.object(Driver, "obey", on_obey).start()
        patch.object(FlushJob, "_complete", on_complete).start()
        patch.object(Host, "_handle", on_handle).start()
        patch.object(Host, "_plan", on_plan).start()
        patch.object(Host, "_send", on_send).start()
        patch.object(JobStore, "learn", on_learn).start()


def settings_of(plan: Plan, node: int) -> Settings:
    """The settings of a node's agent and of its members."""
    return Settings(
        node=f"n{node}",
        runtime_dir=str(plan.runtime_dir(node)),
        controller="store",
        memory_bytes=MEMORY_BYTES,
        connect_timeout_s=plan.timeout_s,
    )


def main(arguments: list[str]) -> int:
    """Serve in the foreground until drained or idle."""
    folder, number = arguments
    plan, node = Plan.load(folder), int(number)
    Taps(Board(plan), node).install()
    settings = msgspec.json.encode(settings_of(plan, node)).decode()
    return agent.main(["--foreground", "--settings", settings])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
