"""Clients that come and go: nothing of them is held after their last close."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from groupio import wire
from groupio.protocol import messages as msg

SLACK_KIB = 16 << 10
"""What an allocator may keep; each leaked connection would take 256 KiB of it."""

Place = dict[str, Any]
ONE: Place = {"rank": 0, "world_size": 1}


def descriptors(pid: int) -> int:
    """Open descriptors, without that of a question about its status which it is just closing."""
    counts = []
    for _ in range(20):
        counts.append(len(os.listdir(f"/proc/{pid}/fd")))
        time.sleep(0.005)
    return min(counts)


def anonymous_kib(pid: int) -> int:
    """Memory of the process's own, without files and shared memory."""
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        lines = dict(line.split(":", 1) for line in file)
    return int(lines["RssAnon"].split()[0])


def settle(node: Any) -> int:
    """The agent's process, once it has no client and no store, and has closed the last one."""
    node.until(lambda s: not s["jobs"] and not s["clients"])
    pid: int | None = node.agent_pid()
    assert pid is not None
    assert becomes(lambda: in_stores(node, pid), 0) == 0
    return pid


def in_stores(node: Any, pid: int) -> int:
    """Descriptors that lead into stores, which all tests have beside the runtime directory."""
    count, runtime = 0, str(node.paths.directory)
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            link = os.readlink(f"/proc/{pid}/fd/{number}")
            count += link.startswith(os.path.dirname(runtime)) and not link.startswith(runtime)
    return count


def becomes(count: Callable[[], int], expected: int) -> int:
    """``count`` once it is ``expected``, or what it is at last."""
    deadline = time.monotonic() + 20
    while (now := count()) != expected and time.monotonic() < deadline:
        time.sleep(0.01)
    return now


def await_descriptors(pid: int, expected: int) -> int:
    """Stores are closed by a thread, a moment after they left the agent's status."""
    return becomes(lambda: descriptors(pid), expected)


def sizes(node: Any, rank: Any) -> tuple[int, int, int, int]:
    pid = settle(node)
    return (
        descriptors(pid),
        anonymous_kib(pid),
        rank.ask("fds")["fds"],
        anonymous_kib(rank.pid),
    )


@pytest.mark.parametrize("kind", ["probe", "save", "stores"])
def test_clients_of_a_process_that_lives_on_leave_nothing(
    kind: str, make_node: Any, tmp_path: Path
) -> None:
    node = make_node(idle_s="30")
    rank = node.start(0)
    command = {
        "store": str(tmp_path / "store"),
        "save": kind != "probe",
        "stores": 40 if kind == "stores" else 1,
        **ONE,
    }
    rank.ask("cycles", count=40, first=1, **command)
    agent = settle(node)
    before, held = sizes(node, rank), rank.ask("held")
    assert held["groupio.client.living._clients"] == 0
    assert "groupio.client.client.Client" not in held
    threads = len(os.listdir(f"/proc/{rank.pid}/task"))
    rank.ask("cycles", count=160, first=41, **command)
    assert settle(node) == agent
    assert await_descriptors(agent, before[0]) == before[0]
    assert rank.ask("fds")["fds"] == before[2]
    # One more may have been started since: that of calls that interrupt others, which stays.
    most = threads + 1
    assert becomes(lambda: max(len(os.listdir(f"/proc/{rank.pid}/task")), most), most) == most
    assert rank.ask("held") == held
    after = sizes(node, rank)
    assert after[1] - before[1] < SLACK_KIB
    assert after[3] - before[3] < SLACK_KIB
    memory = node.status()["agent"]["memory"]
    assert [memory[use] for use in ("leased", "quarantined", "free")] == [0, 0, 0]


def test_clients_leave_nothing_while_others_keep_the_store_open(
    make_node: Any, tmp_path: Path
) -> None:
    node = make_node(idle_s="30")
    stays, rank = node.rank(0, 1, tmp_path / "store0"), node.start(0)
    command = {"store": str(tmp_path / "store"), **ONE}
    rank.ask("cycles", count=20, first=1, save=True, **command)
    rank.ask("cycles", count=20, first=1, **command)
    agent = node.agent_pid()

    def one_left() -> int:
        node.until(lambda s: len(s["clients"]) == 1)
        return descriptors(agent)

    before, memory = one_left(), anonymous_kib(agent)
    rank.ask("cycles", count=150, first=21, save=True, **command)
    rank.ask("cycles", count=150, first=1, **command)
    assert becomes(one_left, before) == before
    assert anonymous_kib(agent) - memory < SLACK_KIB
    # The end of the process is noticed, and its descriptor goes too.
    rank.end()
    assert becomes(one_left, before - 1) == before - 1
    assert stays.ask("epochs")["epochs"] == list(range(1, 171))


def test_connections_that_are_refused_or_break_off_leave_nothing(
    make_node: Any, tmp_path: Path
) -> None:
    node = make_node(idle_s="30")
    node.start(0).ask("cycles", count=1, first=1, store=str(tmp_path / "store"), **ONE)
    agent = settle(node)
    before, memory = descriptors(agent), anonymous_kib(agent)
    for number in range(100):
        for version in (None, msg.PROTOCOL_VERSION + 1, msg.PROTOCOL_VERSION):
            channel = wire.Channel(wire.connect(node.paths.socket, timeout_s=5), msg.ToRank)
            if version is not None:
                name = f"{number}-{version}"
                channel.send(msg.Hello(version, name, os.getpid(), 0, 1, str(tmp_path / "store")))
                good = version == msg.PROTOCOL_VERSION
                assert isinstance(channel.recv(10).message, msg.Welcome if good else msg.Refused)
            channel.close()
    assert settle(node) == agent
    assert await_descriptors(agent, before) == before
    assert anonymous_kib(agent) - memory < SLACK_KIB


@pytest.mark.proof
@pytest.mark.timeout(3600)
def test_ten_thousand_clients_leave_nothing(
    make_node: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = make_node(idle_s="60")
    rank = node.start(0)
    rank.ask("cycles", store=str(tmp_path / "of1-"), count=1, first=0, **ONE)
    fresh = descriptors(settle(node))
    said: list[int] = []
    seen: list[tuple[int, int, int, int]] = []
    used: list[dict[str, int]] = []
    for upto in (100, 1_000, 10_000):
        first = said[-1] if said else 0
        count = (upto - first) // 4
        for save, stores in ((True, 1), (False, 1), (True, 20), (False, 20)):
            store = str(tmp_path / f"of{stores}-")
            rank.send(
                "cycles",
                store=store,
                count=count,
                first=first * 20 + 1,
                save=save,
                stores=stores,
                **ONE,
            ).answer(1800)
        agent = settle(node)
        await_descriptors(agent, fresh)
        said.append(upto)
        seen.append(sizes(node, rank))
        used.append(rank.ask("in_use"))
        with capsys.disabled():
            fds, anon, rank_fds, rank_anon = seen[-1]
            print(
                f"\n{upto} clients: agent {fds} descriptors, {anon} KiB; "
                f"rank {rank_fds} descriptors, {rank_anon} KiB, of that {used[-1]['used_kib']} in "
                f"use and {used[-1]['free_kib']} free in malloc, {used[-1]['blocks']} objects"
            )
    assert settle(node) == agent
    assert [one[0] for one in seen] == [fresh] * 3
    assert seen[0][2] == seen[1][2] == seen[2][2]
    assert seen[2][1] - seen[1][1] < SLACK_KIB
    # Not its resident memory: of lists of 2,500 epochs malloc keeps 15 MiB and more free.
    assert used[2]["used_kib"] - used[1]["used_kib"] < 1 << 10
    assert used[2]["blocks"] - used[1]["blocks"] < 2_000
