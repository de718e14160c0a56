"""An agent proves over real sockets and real files that it sees the store of its controller."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from test_controller_gate import Agent, World, world
from test_controller_lines import opened
from transport_tools import until

from groupio.agent.identity import Writer
from groupio.backend.posix import PosixBackend
from groupio.controller import messages as cm
from groupio.controller.store import JobStore
from groupio.errors import GroupIOError, InvalidInput, Outcome, StorageError, from_wire
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol import proving
from groupio.protocol.reasons import is_away

LATER = fx.ForgetInflight(9, fx.DecisionKey(1, 9, 1))
"""Something that the controller's thread has to do in the store."""

Play = Callable[[World, "Node"], Any]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proving, "PROOF_S", 0.3)
    monkeypatch.setattr(proving, "AWAY_S", 0.05)


def save(save_id: int) -> ev.MemberOpened:
    return replace(opened("c1", "n1"), save_id=save_id, deadline_s=60.0)


class Node:
    """The agent of n1, which joined with one save, and the store that it sees."""

    def __init__(self, agent: Agent, store: JobStore) -> None:
        self.agent = agent
        self.store = store

    async def order(self) -> Any:
        """The next order, which asks for a proof as often as the controller wants it."""
        while True:
            order = await self.agent.answer()
            if not isinstance(order, fx.ShowStore):
                return order
            self.agent.say(await asyncio.to_thread(self.show, order))

    def show(self, order: fx.ShowStore) -> ev.StoreShown:
        try:
            return self.store.show(order)
        except GroupIOError as error:
            return ev.StoreShown(order.node, order.name, error=error)

    async def failure(self) -> GroupIOError:
        told = await self.order()
        assert isinstance(told, fx.TellFailed)
        return told.error


def play(path: Path, script: Play, seen: Path | None = None) -> None:
    """Run ``script`` with a node that sees the store at ``seen``; as a rule the controller's."""

    async def main(it: World) -> None:
        if seen is not None:
            shutil.copytree(path, seen)
        store = JobStore(str(seen or path), "job", "n1", Writer.of_this_process())
        store.follow(create=False)
        agent = it.agent()
        agent.say(it.hello(store=store.path))
        assert await agent.answer() == cm.NodeWelcome(3, "n0")
        agent.say(replace(it.join(opens=(save(1),)), path=store.path))
        try:
            await script(it, Node(agent, store))
        finally:
            store.close()

    world(path, main)


def marks(path: Path) -> list[str]:
    return [n for f in ("epochs", "segments") for n in os.listdir(path / f) if n[0] == "."]


def test_a_node_with_the_same_store_takes_part_and_no_mark_is_left(tmp_path: Path) -> None:
    async def script(it: World, node: Node) -> None:
        assert isinstance(await node.order(), fx.AdmitGroup)
        await until(lambda: not marks(tmp_path))

    play(tmp_path, script)


def test_a_copy_is_refused_with_both_paths(tmp_path: Path) -> None:
    original, copy = tmp_path / "store", tmp_path / "copy"

    async def script(it: World, node: Node) -> None:
        error = await node.failure()
        assert isinstance(error, StorageError)
        assert error.outcome is Outcome.NOT_COMMITTED
        for told in ("n1", str(original), str(copy), "the same file system"):
            assert told in error.message
        refused = await node.order()
        assert from_wire(refused.error).message == error.message
        assert it.alive == ()
        await until(lambda: not marks(original))
        assert marks(copy) == []

    play(original, script, seen=copy)


def test_a_view_that_only_reads_through_is_refused(tmp_path: Path) -> None:
    """As an overlay: what the controller writes is seen, what the node writes stays in it."""
    original, upper = tmp_path / "store", tmp_path / "upper"

    async def script(it: World, node: Node) -> None:
        lower = PosixBackend.open(original, create=False)
        node.store.backend.find_mark = lower.find_mark  # type: ignore[method-assign]
        assert "is not the store" in (await node.failure()).message
        assert isinstance(await node.order(), cm.NodeRefused)
        lower.close()
        await asyncio.to_thread(node.store.hide)
        assert marks(upper) == []

    play(original, script, seen=upper)


def test_caches_that_show_new_files_late_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proving, "PROOF_S", 20.0)
    looks: dict[str, int] = {}
    find = PosixBackend.find_mark

    def late(self: PosixBackend, folder: str, name: str) -> bytes | None:
        looks[name] = looks.get(name, 0) + 1
        return find(self, folder, name) if looks[name] > 3 else None

    monkeypatch.setattr(PosixBackend, "find_mark", late)

    async def script(it: World, node: Node) -> None:
        assert isinstance(await node.order(), fx.AdmitGroup)
        assert sorted(looks.values()) == [4, 4]

    play(tmp_path, script)


@pytest.mark.parametrize("side", ["epochs", "segments"])
def test_a_mark_with_other_content_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    monkeypatch.setattr(proving, "PROOF_S", 600.0)
    find = PosixBackend.find_mark

    def forged(self: PosixBackend, folder: str, name: str) -> bytes | None:
        return b"x" * 32 if folder == side else find(self, folder, name)

    monkeypatch.setattr(PosixBackend, "find_mark", forged)

    async def script(it: World, node: Node) -> None:
        assert "differs" in (await node.failure()).message

    play(tmp_path, script)


def test_a_store_that_is_read_only_on_a_node_is_said_to_be_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node stays, to read; its next save tries again."""
    leave = PosixBackend.leave_mark
    frozen = StorageError("read-only file system", path="/store", errno=errno.EROFS)

    def refuse(self: PosixBackend, folder: str, data: bytes) -> str:
        if folder == "segments":
            raise frozen
        return leave(self, folder, data)

    monkeypatch.setattr(PosixBackend, "leave_mark", refuse)

    async def script(it: World, node: Node) -> None:
        error = await node.failure()
        assert isinstance(error, StorageError)
        assert (error.errno, error.outcome) == (errno.EROFS, Outcome.NOT_COMMITTED)
        assert it.alive == ("n1",)
        monkeypatch.setattr(PosixBackend, "leave_mark", leave)
        node.agent.say(save(2))
        assert isinstance(await node.order(), fx.AdmitGroup)

    play(tmp_path, script)


@pytest.mark.parametrize("side", ["epochs", "segments"])
def test_a_store_that_is_away_during_the_proof_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    leave = PosixBackend.leave_mark
    tries: list[str] = []

    def away(self: PosixBackend, folder: str, data: bytes) -> str:
        if folder == side and len(tries) < 3:
            tries.append(folder)
            raise StorageError("the server is gone", path="/store", errno=errno.ENOTCONN)
        return leave(self, folder, data)

    monkeypatch.setattr(PosixBackend, "leave_mark", away)

    async def script(it: World, node: Node) -> None:
        assert isinstance(await node.order(), fx.AdmitGroup)
        assert len(tries) == 3

    play(tmp_path, script)


def test_a_store_that_was_opened_anew_has_to_be_proved_again(tmp_path: Path) -> None:
    async def script(it: World, node: Node) -> None:
        assert isinstance(await node.order(), fx.AdmitGroup)
        for reopen in ("node", "controller"):
            if reopen == "node":
                node.agent.say(ev.NodeReopened("n1"))
            else:
                it.host.store.doubt(StorageError("gone", errno=errno.ENOTCONN))
                it.host.around.do(partial(it.host._execute, LATER))
            order = await node.agent.answer()
            assert isinstance(order, fx.ShowStore)
            assert it.host.controller.nodes.unproved == {"n1"}
            node.agent.say(await asyncio.to_thread(node.show, order))
            await until(lambda: not it.host.controller.nodes.unproved)
        await until(lambda: not marks(tmp_path))

    play(tmp_path, script)


def test_nothing_is_decided_in_a_store_that_nobody_has_proved(tmp_path: Path) -> None:
    """The controller's thread notices itself that the store was opened anew."""
    store = JobStore(str(tmp_path), "job", "n0", Writer.of_this_process())
    store.open(())
    known = store.views
    store.doubt(StorageError("gone", errno=errno.ENOTCONN))
    with pytest.raises(StorageError, match="opened anew") as caught:
        store.decide(fx.Decide(1, fx.DecisionKey(1, 1, 1), True, 1), known)
    assert is_away(caught.value)
    store.close()


@pytest.mark.parametrize("name", ["", "x", "../groupio.json", ".tmp-" + "0" * 25, "groupio.json"])
def test_no_other_file_is_read_or_removed_as_a_mark(tmp_path: Path, name: str) -> None:
    with PosixBackend.open(tmp_path, create=True) as store:
        with pytest.raises(InvalidInput):
            store.find_mark("segments", name)
        with pytest.raises(InvalidInput):
            store.remove_mark("segments", name)
