"""Limits of the system: what lacks something fails typed and names the limit, the rest goes on."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_help import MIB, data, save_all

from groupio.errors import (
    AgentLost,
    GroupAborted,
    GroupIOError,
    StagingFull,
    StorageError,
    from_wire,
)

SCRIPT = Path(__file__).with_name("exhausted_agent.py")


@contextlib.contextmanager
def limited(pid: int, which: int, soft: int) -> Iterator[None]:
    """The process has this limit meanwhile."""
    before = resource.prlimit(pid, which)
    resource.prlimit(pid, which, (soft, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, which, before)


def address_space(pid: int) -> int:
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        lines = dict(line.split(":", 1) for line in file)
    return int(lines["VmSize"].split()[0]) << 10


def failed(answer: dict[str, Any]) -> GroupIOError:
    assert answer["error"] is not None
    return from_wire(answer["error"])


def save(ranks: list[Any], epoch: int, size: int) -> list[dict[str, Any]]:
    for one in ranks:
        one.send("save", epoch=epoch, items=data(one.rank, size), deadline_s=30)
    return [one.answer() for one in ranks]


@pytest.mark.parametrize("name", ["file size", "address space"])
def test_an_arena_that_cannot_grow_fails_its_save_only(
    name: str, make_node: Any, tmp_path: Path
) -> None:
    node = make_node(idle_s="30")
    other = node.rank(0, 1, tmp_path / "other", job="other")
    ranks = node.world(2, tmp_path / "store")
    save_all([other], 1, lambda r: 5)
    save_all(ranks, 1, lambda r: r)
    agent = node.agent_pid()
    which, soft, word = {
        "file size": (resource.RLIMIT_FSIZE, 40 * MIB, "ulimit -f"),
        "address space": (resource.RLIMIT_AS, address_space(agent) + 4 * MIB, "ulimit -v"),
    }[name]
    with limited(agent, which, soft):
        for answer in save(ranks, 2, 60 * MIB):
            error = failed(answer)
            assert isinstance(error, StagingFull)
            assert word in error.message
            assert str(soft) in error.message
        # What fits is saved, of this job and of others.
        save_all(ranks, 3, lambda r: r + 3)
        save_all([other], 3, lambda r: 7)
    assert node.agent_pid() == agent
    save_all(ranks, 4, lambda r: r)
    for answer in save(ranks, 5, 60 * MIB):
        assert answer["error"] is None
    for one in ranks:
        one.ask("wait", epoch=5, timeout_s=60)
        one.ask("load", expect=data(one.rank, 60 * MIB), epoch=5)
    assert ranks[0].ask("epochs")["epochs"] == [1, 3, 4, 5]


def test_an_agent_without_descriptors_refuses_clients_and_says_why(
    make_node: Any, tmp_path: Path
) -> None:
    node = make_node(idle_s="30")
    first = node.rank(0, 1, tmp_path / "store")
    save_all([first], 1, lambda r: 1)
    agent = node.agent_pid()
    held = max(int(name) for name in os.listdir(f"/proc/{agent}/fd")) + 1
    with limited(agent, resource.RLIMIT_NOFILE, held):
        error = failed(node.rank(0, 1, tmp_path / "two").ask("save", epoch=1, items=data(2)))
        assert isinstance(error, AgentLost)
        assert "ulimit -n" in error.message
        assert f"its limit is {held}" in error.message
        # Those that it serves already get a typed error at worst, which blames no store.
        answer = first.ask("save", epoch=2, items=data(2), wait_for="durable")
        if answer["error"] is not None:
            assert "ulimit -n" in failed(answer).message
            assert not isinstance(failed(answer), StorageError) or "not the store's" in str(
                failed(answer)
            )
        before = ticks(agent)
        waiting = [node.start(0) for _ in range(3)]
        for one in waiting:
            one.ask("connect", store=str(tmp_path / "two"), rank=0, world_size=1)
        assert ticks(agent) - before < 100, "it spins"
    assert node.agent_pid() == agent
    for number, one in enumerate([first, *waiting[:1]]):
        answer = one.ask("save", epoch=10 + number, items=data(3), wait_for="durable")
        assert answer["error"] is None, answer


def ticks(pid: int) -> int:
    """The processor time of a process, in hundredths of a second."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_a_rank_that_cannot_map_its_lease_tells_its_group(make_node: Any, tmp_path: Path) -> None:
    node = make_node(idle_s="30")
    ranks = node.world(2, tmp_path / "store")
    save_all(ranks, 1, lambda r: r)
    # The items are there before the limit is: only the mapping is too large for it.
    for one in ranks:
        one.ask("make", name="big", items={"big": {"zeros": 60 * MIB}})
    with limited(ranks[1].pid, resource.RLIMIT_AS, address_space(ranks[1].pid) + 8 * MIB):
        for one in ranks:
            one.send("save", epoch=2, items="big", deadline_s=60)
        errors = [failed(one.answer()) for one in ranks]
    assert isinstance(errors[1], StagingFull)
    assert "ulimit -v" in errors[1].message
    assert "ulimit -v" in errors[0].message
    save_all(ranks, 3, lambda r: r)
    for one in ranks:
        one.ask("load", expect=data(one.rank))


def test_a_rank_without_descriptors_gets_a_typed_error(make_node: Any, tmp_path: Path) -> None:
    node = make_node(idle_s="30")
    late = node.rank(0, 1, tmp_path / "store")
    save_all([late], 1, lambda r: 1)
    late.ask("close")  # but all that it needs is imported
    held = max(int(name) for name in os.listdir(f"/proc/{late.pid}/fd")) + 1
    with limited(late.pid, resource.RLIMIT_NOFILE, held):
        late.ask("connect", store=str(tmp_path / "store"), rank=0, world_size=1)
        error = failed(late.ask("save", epoch=2, items=data(2)))
        assert isinstance(error, AgentLost)
        assert "ulimit -n" in error.message
    assert late.ask("save", epoch=2, items=data(2), wait_for="durable")["error"] is None


CALLS = {
    "memfd_create": errno.EMFILE,
    "ftruncate": errno.EFBIG,
    "pidfd_open": errno.EMFILE,
    "dup": errno.EMFILE,
    "map_shared": errno.ENOMEM,
    "punch": errno.ENOMEM,
    "thread": None,
    "register": errno.ENOSPC,
    "sendmsg": errno.ENOBUFS,
    "recvmsg_into": errno.ENOMEM,
}
CUT_OFF = ("sendmsg", "recvmsg_into")
"""Without these an agent cannot say why."""


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_fails_in_the_agent_fails_one_save_at_most(
    call: str, make_node: Any, tmp_path: Path
) -> None:
    holds = tmp_path / "holds"
    holds.mkdir()
    # Too small for all, so that memory is taken from one client for another.
    node = make_node(idle_s="30", memory_bytes="64M")
    environ = {**node.environ, "TEST_HOLDS": str(holds)}
    agent = subprocess.Popen([sys.executable, str(SCRIPT)], env=environ)
    try:
        deadline = time.monotonic() + 20
        while not node.paths.socket.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        old = node.rank(0, 1, tmp_path / "old")
        save_all([old], 1, lambda r: 1)
        number = CALLS[call]
        (holds / call).write_text("thread" if number is None else str(number))
        new = node.rank(0, 1, tmp_path / "new")
        for epoch, one in ((2, new), (3, new), (2, old)):
            answer = one.ask(
                "save", epoch=epoch, items=data(epoch, 30 * MIB), deadline_s=30, wait_for="durable"
            )
            if answer["error"] is not None:
                error = failed(answer)
                assert isinstance(error, (AgentLost, GroupAborted, StagingFull)), error
                assert "ulimit" in error.message or call in CUT_OFF
                assert "a defect" not in node.log()
        (holds / call).unlink()
        for one in (old, new):
            answer = one.ask("save", epoch=9, items=data(9), deadline_s=30, wait_for="durable")
            assert answer["error"] is None, answer
        assert (holds / f"{call}.failed").exists(), "the call did not come"
        assert node.agent_pid() == agent.pid
    finally:
        for one in node.ranks:
            one.end()
        agent.terminate()
        assert agent.wait(20) == 0
