"""A client of the user's own that says anything at all: it is turned away, and no other is hurt."""

from __future__ import annotations

import contextlib
import random
import sys
import time
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from e2e_help import data, save_all
from msgspec import inspect

from groupio import wire
from groupio.errors import InvalidInput, from_wire
from groupio.format.items import encode_items, items_id
from groupio.model import ItemKind, ItemSpec
from groupio.protocol import messages as msg

sys.path.append(str(Path(__file__).parents[1] / "fuzz"))
from mutations import Inventor, mutated

MESSAGES = 20
INTS = (-1, 0, 1, 2, 7, 4096, 1 << 31, 1 << 40, (1 << 63) - 1, -(1 << 63))
FLOATS = (0.0, -1.0, 1e300, float("nan"), float("inf"), float("-inf"))
TEXTS = ("", "\0", "x" * 5000, "../..", "/proc/self/mem", "\u0661")
BYTES = (b"", b"x", b"\xff" * 40)
TABLE = encode_items([ItemSpec("w", ItemKind.BYTES, "", (), (), (), 4096)])
SAID = [kind for kind in get_args(msg.ToAgent) if kind is not msg.Ask]


class Rank:
    """Says Hello properly, or almost, and then anything."""

    def __init__(self, chance: random.Random, node: Any, hello: msg.Hello) -> None:
        self.chance, self.saves = chance, 0
        self.channel = wire.Channel(connected(node), msg.ToRank)
        self.say(self.changed(hello) if chance.random() < 0.3 else hello)

    def say(self, message: Any) -> None:
        with contextlib.suppress(OverflowError, UnicodeError):
            self.channel.send(message, timeout_s=5)

    def changed(self, message: Any) -> Any:
        """``message`` with one field of the right type that no client sends."""
        fields = msgspec.structs.fields(message)
        if not fields:
            return message
        field = self.chance.choice(fields)
        choices: tuple[Any, ...]
        match getattr(message, field.name):
            case str():
                choices = TEXTS
            case bytes():
                choices = BYTES
            case float():
                choices = FLOATS
            case dict():
                choices = ({"a": mutated(self.chance, [1, "x", {"y": 2}])}, {})
            case int():
                choices = INTS
            case value:
                choices = (value,)
        return msgspec.structs.replace(message, **{field.name: self.chance.choice(choices)})

    def speak(self) -> None:
        """Say one thing."""
        if self.chance.random() < 0.4:
            self.saves += 1
            now = time.monotonic()
            size = len(TABLE), 4096
            message: Any = msg.OpenSave(
                self.saves, self.saves, now, 1.0, TABLE, items_id(TABLE), size[1], size[1]
            )
        else:
            kind = self.chance.choice(SAID)
            made = Inventor(self.chance, {}).make(inspect.type_info(kind))
            message = msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=kind)
        self.say(self.changed(message) if self.chance.random() < 0.6 else message)

    def end(self) -> None:
        """Leave in a way that gives memory back, or break off."""
        with contextlib.suppress(wire.ChannelClosed, TimeoutError):
            self.say(msg.Bye())
        self.channel.close()


def connected(node: Any) -> Any:
    """A connection, once the agent has come to those before it."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return wire.connect(node.paths.socket, timeout_s=5)
        except BlockingIOError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def hello_of(store: Path, name: str) -> msg.Hello:
    return msg.Hello(
        msg.PROTOCOL_VERSION, name, 1, 0, 1, str(store / name), job=name, launch_id=name
    )


@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [40, pytest.param(1000, marks=pytest.mark.proof)])
def test_an_agent_survives_whatever_a_rank_says(ranks: int, make_node: Any, tmp_path: Path) -> None:
    node = make_node(idle_s="30")
    good = node.world(2, tmp_path / "store")
    save_all(good, 1, lambda r: r)
    agent = node.agent_pid()
    for seed in range(ranks):
        rank = Rank(random.Random(seed), node, hello_of(tmp_path / "hostile", f"h{seed}"))
        try:
            for _ in range(MESSAGES):
                rank.speak()
        except (wire.ChannelClosed, TimeoutError):
            pass  # it was turned away
        finally:
            rank.end()
    save_all(good, 2, lambda r: r + 1)
    for one in good:
        one.ask("load", expect=data(one.rank + 1))
    assert node.agent_pid() == agent


def test_a_tool_that_is_gone_before_its_answer_ends_nothing(make_node: Any, tmp_path: Path) -> None:
    node = make_node(idle_s="30")
    one = node.rank(0, 1, tmp_path / "store")
    save_all([one], 1, lambda r: r)
    agent = node.agent_pid()
    for _ in range(20):
        tool = wire.Channel(wire.connect(node.paths.socket, timeout_s=5), msg.ToRank)
        tool.send(msg.Ask(1, "metrics"))
        tool.close()
    save_all([one], 2, lambda r: r)
    assert node.agent_pid() == agent


def test_a_store_that_is_no_path_is_refused(make_node: Any, tmp_path: Path) -> None:
    node = make_node(idle_s="30")
    one = node.rank(0, 1, tmp_path / "store")
    save_all([one], 1, lambda r: r)
    agent = node.agent_pid()
    proper = hello_of(tmp_path, "x")
    for change in ({"store": "/a\0b"}, {"store": "a"}, {"store": ""}, {"rest": "a\0b"}):
        channel = wire.Channel(wire.connect(node.paths.socket, timeout_s=5), msg.ToRank)
        channel.send(msgspec.structs.replace(proper, **change))
        answer = channel.recv(10).message
        channel.close()
        if "store" in change:
            assert isinstance(answer, msg.Refused), answer
            assert isinstance(from_wire(answer.error), InvalidInput)
    assert node.agent_pid() == agent
    save_all([one], 2, lambda r: r)
