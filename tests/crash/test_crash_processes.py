"""Real ranks and agents: killed at each level, killed at random, and on a full disk."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from loopdev import run
from oracle import kept, look
from stracing import attached

from groupio.agent.identity import node_name
from groupio.errors import (
    AgentLost,
    GroupAborted,
    GroupIOError,
    GroupTimeout,
    StorageFull,
    from_wire,
)
from groupio.format.records import segment_name
from groupio.model import DecisionKey, Level
from groupio.testing import invariants
from groupio.testing.invariants import Ack

MIB = 1 << 20
WORLD = 2


def items(epoch: int, rank: int, size: int = 9 * MIB + 5) -> dict[str, Any]:
    return {
        "weights": {"seed": 10 * epoch + rank, "bytes": size},
        "frozen": {"seed": rank, "bytes": 3 * MIB},
        "step": epoch,
    }


def save_all(ranks: Sequence[Any], epoch: int, size: int = 9 * MIB + 5) -> None:
    """A save that works, to the end."""
    for one in ranks:
        one.send("save", epoch=epoch, items=items(epoch, one.rank, size), deadline_s=30)
    for one in ranks:
        answer = one.answer()
        assert answer["error"] is None, answer
    for one in ranks:
        one.ask("wait", epoch=epoch, timeout_s=30)


def failures(ranks: Sequence[Any], epoch: int, size: int) -> list[GroupIOError]:
    """The errors that a save ends with; one of each rank."""
    for one in ranks:
        one.send("save", epoch=epoch, items=items(epoch, one.rank, size), deadline_s=30)
    for one in ranks:
        one.answer()
    return [failure_of(one, epoch) for one in ranks]


def failure_of(rank: Any, epoch: int) -> GroupIOError:
    with pytest.raises(GroupIOError) as caught:
        rank.ask("wait", epoch=epoch, timeout_s=30)
    return caught.value


def check_loads(ranks: Sequence[Any], epoch: int, size: int = 9 * MIB + 5) -> None:
    for one in ranks:
        one.ask("load", epoch=epoch, expect=items(epoch, one.rank, size))


def check_store(store: Path, acked: Sequence[int]) -> set[int]:
    """Everything that holds of a store at rest; the committed epochs."""
    found = look(store)
    assert found is not None
    assert not found.damage
    assert not kept(found)
    acks = [
        Ack(1, epoch, rank, WORLD, 0, Level.DURABLE) for epoch in acked for rank in range(WORLD)
    ]
    assert not invariants.check_store(found.store, acks)
    return {key.epoch for key in found.store.committed}


# -- the agent killed at each level ---------------------------------------------------------------


def key(epoch: int) -> DecisionKey:
    return DecisionKey(1, epoch, 1)


def begin(ranks: Sequence[Any], epoch: int, **more: Any) -> None:
    for one in ranks:
        one.send("save", epoch=epoch, items=items(epoch, one.rank, 24 * MIB), **more)


def kill_while_gathering(node: Any, ranks: Sequence[Any], store: Path, epoch: int) -> None:
    begin(ranks[:1], epoch)
    node.until(lambda s: s["jobs"][0]["groups"])
    node.kill_agent()
    assert isinstance(from_wire(ranks[0].answer(20)["error"]), AgentLost)


def kill_while_copying(node: Any, ranks: Sequence[Any], store: Path, epoch: int) -> None:
    ranks[0].send("save", epoch=epoch, items=items(epoch, 0))
    ranks[1].send("save", epoch=epoch, items={"big": {"zeros": 600 * MIB}})
    node.until(lambda s: any(g["phase"] == "copying" for g in s["jobs"][0]["groups"]))
    ranks[1].signal(signal.SIGSTOP)
    node.kill_agent()
    ranks[1].signal(signal.SIGCONT)
    for one in ranks:
        one.answer(30)
        assert isinstance(failure_of(one, epoch), AgentLost)


def kill_when_staged(node: Any, ranks: Sequence[Any], store: Path, epoch: int) -> None:
    begin(ranks, epoch, wait_for="staged")
    for one in ranks:
        assert one.answer()["error"] is None
    node.kill_agent()


def kill_at(*options: str) -> Callable[..., None]:
    """Kill the agent at a system call; "{}" in the options is where the store is."""

    def kill(node: Any, ranks: Sequence[Any], store: Path, epoch: int) -> None:
        segment = segment_name(key(epoch), node_name(), 0)
        given = [o.format(store=store, key=key(epoch), segment=segment) for o in options]
        with attached(node.agent_pid(), store.parent / "strace.log", given):
            begin(ranks, epoch)
            for one in ranks:
                one.answer()
                assert isinstance(failure_of(one, epoch), AgentLost)
        node.wait_agent_gone()

    return kill


def kill_when_durable(node: Any, ranks: Sequence[Any], store: Path, epoch: int) -> None:
    begin(ranks, epoch)
    for one in ranks:
        one.answer()
    for one in ranks:
        one.ask("wait", epoch=epoch)
    node.kill_agent()


def at(call: str, path: str) -> Callable[..., None]:
    return kill_at(
        *("-e", f"trace={call}", "-P", path),
        *("-e", f"inject={call}:signal=SIGKILL:when=1"),
    )


SEGMENT = "{store}/segments/{segment}"

LEVELS: dict[str, tuple[Callable[..., None], bool | None]] = {
    "gathering": (kill_while_gathering, False),
    "copying": (kill_while_copying, False),
    "staged": (kill_when_staged, None),
    "flushing": (at("pwritev2", SEGMENT), False),
    "flushed": (at("fsync", SEGMENT), False),
    "prepared": (at("linkat", "{store}/epochs"), True),
    "decided": (at("fsync", "{store}/epochs"), True),
    "durable": (kill_when_durable, True),
}
"""How to kill the agent there, and whether the epoch is committed in the end (None: it may)."""


@pytest.fixture
def job(make_node: Any, tmp_path: Path) -> tuple[Any, list[Any], Path]:
    """A node, its two ranks with epoch 1 saved, and their store."""
    node = make_node(memory_bytes="2G")
    store = tmp_path / "store"
    ranks = node.world(WORLD, store)
    save_all(ranks, 1)
    return node, ranks, store


@pytest.mark.root  # attaching strace needs it on hardened kernels
def test_agent_killed_at_each_level(job: tuple[Any, list[Any], Path]) -> None:
    node, ranks, store = job
    epoch, acked = 1, [1]
    for level, (kill, committed) in LEVELS.items():
        epoch += 2
        kill(node, ranks, store, epoch - 1)
        save_all(ranks, epoch)
        found = check_store(store, [*acked, epoch])
        assert committed in (None, epoch - 1 in found), level
        if epoch - 1 in found:
            check_loads(ranks, epoch - 1, 24 * MIB)
        check_loads(ranks, acked[-1])
        check_loads(ranks, epoch)
        acked.append(epoch)
    assert ranks[0].ask("epochs")["epochs"] == sorted(found)


# -- any process killed at any moment --------------------------------------------------------------


LIVES = 4

DEADLINE_S = 6.0


def random_life(node: Any, ranks: list[Any], chance: random.Random, epoch: int) -> list[int]:
    """Save from ``epoch`` on until a process is killed; the epochs that were acknowledged."""
    last = epoch + chance.randrange(3)
    for number in range(epoch, last):
        save_all(ranks, number)
    for one in ranks:
        given = items(last, one.rank)
        one.send("save", epoch=last, items=given, wait_for="durable", deadline_s=DEADLINE_S)
    victim = chance.choice([*ranks, None])
    time.sleep(chance.expovariate(1 / 0.05))
    if victim is None:
        node.kill_agent()
    else:
        victim.kill()
    answers = {one.rank: one.answer(30)["error"] for one in ranks if one is not victim}
    errors = {rank: from_wire(error) for rank, error in answers.items() if error is not None}
    # A rank that came only after the death waits for the others, for nobody knows of their call.
    for error in errors.values():
        if isinstance(error, GroupTimeout):
            away = {victim.rank} if victim is not None else set(range(WORLD))
            assert error.missing
            assert set(error.missing) <= away
        elif victim is not None:
            assert isinstance(error, GroupAborted)
            assert error.members == (victim.rank,)
        else:
            # Who called after the others had lost the agent hears that they did not come again.
            assert isinstance(error, AgentLost | GroupAborted)
    return [*range(epoch, last), *([last] if len(errors) < len(answers) else [])]


def random_lives(make_node: Any, store: Path, seeds: range) -> None:
    node = make_node()
    ranks = node.world(WORLD, store)
    epoch, acked = 1, list[int]()
    for seed in seeds:
        acked += random_life(node, ranks, random.Random(seed), epoch)
        epoch += 4
        if any(one.process.poll() is not None for one in ranks):
            for one in ranks:
                one.kill()
            ranks = node.world(WORLD, store)
        save_all(ranks, epoch)
        acked.append(epoch)
        for number in check_store(store, acked):
            check_loads(ranks, number)
        epoch += 1


def test_processes_killed_at_random(make_node: Any, tmp_path: Path) -> None:
    random_lives(make_node, tmp_path / "store", range(LIVES))


@pytest.mark.proof
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(10))
def test_many_processes_killed_at_random(make_node: Any, tmp_path: Path, block: int) -> None:
    random_lives(make_node, tmp_path / "store", range(100 + 10 * block, 110 + 10 * block))


# -- a full disk -----------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 96 MiB."""
    where = tmp_path / "disk"
    where.mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=96m", "groupio-test", where)
    try:
        yield where
    finally:
        run("umount", "-l", where)


def fill(disk: Path, leave: int) -> Path:
    """Take all space but ``leave`` bytes."""
    ballast = disk / "ballast"
    status = os.statvfs(disk)
    with open(ballast, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, status.f_bavail * status.f_frsize - leave))
    return ballast


def check_full(errors: Sequence[GroupIOError], store: Path) -> None:
    assert len(errors) == WORLD
    for error in errors:
        assert isinstance(error, StorageFull)
        assert error.path is not None
        assert error.path.startswith(str(store))
        assert error.needed is not None
        assert error.needed > 0
        assert error.free is not None
        assert str(error.free) in error.message
        assert error.outcome == "not_committed"


@pytest.mark.root
@pytest.mark.parametrize("leave", [20 * MIB, 64 << 10, 0])
def test_full_disk(make_node: Any, small_disk: Path, leave: int) -> None:
    store = small_disk / "store"
    ranks = make_node().world(WORLD, store)
    save_all(ranks, 1)
    ballast = fill(small_disk, leave)
    for epoch in (2, 3):
        check_full(failures(ranks, epoch, 30 * MIB), store)
        check_loads(ranks, 1)
        assert check_store(store, [1]) == {1}
    ballast.unlink()
    for epoch in (3, 4):  # the failed epoch again, and the next one
        save_all(ranks, epoch)
        check_loads(ranks, epoch)
    assert check_store(store, [1, 3, 4]) == {1, 3, 4}
    check_loads(ranks, 1)
