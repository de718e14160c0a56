"""Members agree, or all of them raise; a member that does not answer is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from groupio.errors import (
    GroupAborted,
    GroupIOError,
    GroupTimeout,
    InvalidInput,
    NotFound,
    StateMismatch,
)
from groupio.protocol.members import FormedLaunch
from groupio.torch import members
from groupio.torch.members import Council, Members, find_members


class Group:
    """Stands for a process group of one rank."""


class Processes:
    """One instance for each thread, whose threads are the ranks."""

    def __init__(self) -> None:
        self.of_thread = threading.local()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.of_thread.instance, name)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.HashStore:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=5))
    monkeypatch.setattr(members, "_store_of", lambda group: store)
    monkeypatch.setattr(members, "_me", Processes())
    monkeypatch.setattr(members, "VERDICT_MARGIN_S", 3.0)
    return store


def meet_as(
    processes: Sequence[members._Instance],
    act: Callable[[Council, int], Any] = lambda council, rank: council.members.launch_id,
    absent: tuple[int, ...] = (),
    wait: float = 3.0,
) -> list[Any]:
    """What each of these processes got as a rank: a result or an error of groupio."""

    def one(rank: int) -> Any:
        members._me.of_thread.instance = processes[rank]  # type: ignore[attr-defined]
        try:
            place = Members(rank, len(processes), Group())
            return act(Council.meet(place, wait, "load"), rank)
        except GroupIOError as error:
            return error

    ranks = [rank for rank in range(len(processes)) if rank not in absent]
    with ThreadPoolExecutor(len(processes)) as pool:
        return list(pool.map(one, ranks))


def processes(count: int) -> list[members._Instance]:
    return [members._Instance() for _ in range(count)]


def together(
    world: int, act: Callable[[Council, int], Any], absent: tuple[int, ...] = (), wait: float = 3.0
) -> list[Any]:
    """What each rank of a new set of processes got."""
    return meet_as(processes(world), act, absent, wait)


def test_all_get_what_rank_0_decides(store: dist.HashStore) -> None:
    def act(council: Council, rank: int) -> Any:
        first = council.decide({"n": rank}, lambda all_: {"sum": sum(o["n"] for o in all_)})
        second = council.decide({"n": 1}, lambda all_: {"again": len(all_)})
        return first["sum"], second["again"]

    assert together(4, act) == [(6, 4)] * 4


def test_a_failure_of_one_is_raised_by_all_and_names_it(store: dist.HashStore) -> None:
    def act(council: Council, rank: int) -> Any:
        mine: Any = {"ok": 1}
        if rank == 2:
            mine = StateMismatch("3 differences", missing=["a", "b"])
        return council.decide(mine, lambda all_: {"fine": 1})

    errors = together(4, act)
    assert all(type(error) is StateMismatch for error in errors)
    assert errors[2].message == "3 differences"
    assert {e.message for i, e in enumerate(errors) if i != 2} == {"rank 2: 3 differences"}
    assert all(error.missing == ("a", "b") for error in errors)


def test_a_failure_of_rank_0_or_of_its_judgement_reaches_all(store: dist.HashStore) -> None:
    def judge(opinions: list[dict[str, Any]]) -> dict[str, Any]:
        raise NotFound("no epoch")

    assert [type(e) for e in together(3, lambda c, r: c.decide({}, judge))] == [NotFound] * 3

    def act(council: Council, rank: int) -> Any:
        return council.decide(NotFound("mine") if rank == 0 else {}, lambda all_: {})

    assert [e.message for e in together(3, act)] == ["mine", "rank 0: mine", "rank 0: mine"]


@pytest.mark.parametrize(("absent", "named"), [((1, 3), (1, 3)), ((0,), (0,))])
def test_absent_members_are_named(
    store: dist.HashStore, absent: tuple[int, ...], named: tuple[int, ...]
) -> None:
    errors = together(4, lambda c, r: c.decide({}, lambda all_: {}), absent, wait=0.5)
    assert len(errors) == 4 - len(absent)
    assert all(type(error) is GroupTimeout and error.missing == named for error in errors)


def test_a_late_member_is_awaited_in_silence(
    store: dist.HashStore, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks, stores = processes(3), [dist.PrefixStore("default", served)]
    stores += [
        dist.PrefixStore("default", dist.TCPStore("127.0.0.1", served.port)) for _ in ranks[1:]
    ]
    own = members._me.of_thread  # type: ignore[attr-defined]
    monkeypatch.setattr(members, "_store_of", lambda group: stores[ranks.index(own.instance)])
    monkeypatch.setattr(members, "_LOOK_S", 0.02)

    def act(council: Council, rank: int) -> Any:
        if rank == 1:
            time.sleep(10 * members._LOOK_S)
        return council.decide({"n": rank}, lambda all_: {"sum": sum(o["n"] for o in all_)})

    assert meet_as(ranks, act, wait=30) == [{"sum": 3}] * 3
    assert capfd.readouterr().err == ""


def test_alone_nobody_is_asked() -> None:
    council = Council.meet(Members(0, 1), 1.0, "load")
    assert council.decide({"n": 3}, lambda all_: {"got": all_}) == {"got": [{"n": 3}]}
    with pytest.raises(NotFound):
        council.decide(NotFound("x"), lambda all_: {})


def test_a_store_that_is_gone_is_an_error_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def set(self, key: str, value: bytes) -> None:
            raise RuntimeError("Broken pipe\nmore")

        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("Connection reset")

    monkeypatch.setattr(members, "_store_of", lambda group: Gone())
    for rank in (0, 1):
        with pytest.raises(GroupAborted, match="cannot be reached"):
            Council.meet(Members(rank, 2, Group()), 5.0, "load")


def test_the_place_comes_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert find_members(None) == Members(2, 3)
    with pytest.raises(InvalidInput, match="not initialised"):
        find_members(object())  # type: ignore[arg-type]


def test_the_same_processes_are_one_launch_each_time(store: dist.HashStore) -> None:
    ranks = processes(3)
    first = meet_as(ranks)
    assert len(set(first)) == 1
    assert meet_as(ranks) == first
    other_order = meet_as([ranks[1], ranks[0], ranks[2]])
    assert other_order != first
    assert meet_as(ranks) == first


def test_a_member_that_is_replaced_makes_a_later_launch(store: dist.HashStore) -> None:
    a, b, c, d, e = processes(5)
    old, new, newest = meet_as([a, b, c])[0], meet_as([a, b, d])[0], meet_as([e, b, d])[0]
    launches = [FormedLaunch.parse(launch) for launch in (old, new, newest)]
    assert [launch.number for launch in launches if launch is not None] == [1, 2, 3]
    assert len({launch.series for launch in launches if launch is not None}) == 1


def test_a_launch_that_a_member_left_is_made_again(store: dist.HashStore) -> None:
    a, b, c = processes(3)
    pair = meet_as([a, b])[0]
    meet_as([a, b, c])
    assert meet_as([a, b])[0] == pair
    a.leave(pair)
    again = FormedLaunch.parse(meet_as([a, b])[0])
    assert again is not None
    assert again.number == 3
    assert meet_as([a, b])[0] == again.launch_id


def test_sub_groups_do_not_touch_each_other(store: dist.HashStore) -> None:
    ranks = processes(4)
    sets = [ranks, ranks[:2], ranks[1:3], ranks[2:]]
    assert [meet_as(one) for one in sets] == [meet_as(one) for one in sets]


@pytest.mark.parametrize("alone", [0, 1, 2])
def test_a_call_that_a_member_made_alone_is_over(store: dist.HashStore, alone: int) -> None:
    ranks = processes(3)
    absent = tuple(rank for rank in range(3) if rank != alone)
    (error,) = meet_as(ranks, absent=absent, wait=0.1)
    assert isinstance(error, GroupTimeout)

    def act(council: Council, rank: int) -> Any:
        return council.decide({"n": rank}, lambda all_: {"n": len(all_)})["n"]

    assert meet_as(ranks, act) == [3, 3, 3]


def test_what_dead_processes_left_in_the_store_is_no_answer(
    store: dist.HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but rank 1 have come before, in another set; its successor comes late."""
    a, b, c = processes(3)
    old = meet_as([a, b, c])
    d = members._Instance()

    answered = threading.Event()

    def one(rank: int) -> Any:
        if rank == 1:
            answered.wait(5.0)  # rank 0 has answered the call that the dead one left
        members._me.of_thread.instance = [a, d, c][rank]  # type: ignore[attr-defined]
        return Council.meet(Members(rank, 3, Group()), 5.0, "load").members.launch_id

    def answer(self: Council, key: str, value: Any) -> None:
        original(self, key, value)
        if key.endswith("/answer"):
            answered.set()

    original = Council._set
    monkeypatch.setattr(Council, "_set", answer)
    with ThreadPoolExecutor(3) as pool:
        new = list(pool.map(one, range(3)))
    assert len(set(new)) == 1
    assert new[0] not in old


def test_a_group_that_met_need_not_meet_again(store: dist.HashStore) -> None:
    group = Group()
    members._me.of_thread.instance = members._Instance()  # type: ignore[attr-defined]
    first = members.met(Members(0, 1, group), 1.0, "save")
    assert members.is_living(first.launch_id)
    place = Members(0, 1, group, members._met.get(group))
    assert members.met(place, 1.0, "save") is place
    members.leave(str(first.launch_id), refused=True)
    assert not members.is_living(first.launch_id)
    second = members.met(Members(0, 1, group, members._met.get(group)), 1.0, "save")
    assert second.launch_id != first.launch_id


def test_the_sets_of_a_process_are_not_remembered_without_end(store: dist.HashStore) -> None:
    one = members._Instance()
    for number in range(members.SETS_REMEMBERED + 5):
        one.join(FormedLaunch("s", number, f"m{number}"))
    assert len(one.introduction()["launches"]) == members.SETS_REMEMBERED


def test_a_forked_child_is_another_process() -> None:
    before = members.introduction()["id"]
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, members.introduction()["id"].encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reader, 100).decode() not in ("", before)
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("on_error", ["log", "raise"])
def test_a_handler_in_the_first_meeting_does_not_disturb_it(tmp_path: Path, on_error: str) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    worker = Path(__file__).with_name("first_meeting_worker.py")
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                str(worker),
                str(n),
                str(tmp_path / "store"),
                str(server.port),
                on_error,
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for n in range(2)
    ]
    try:
        said = [rank.communicate(timeout=100)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    zero, one = (json.loads(text) for text in said)
    assert zero["first"] == one["first"] == "durable"
    ((took_s, nested),) = zero["nested"]
    assert took_s < 30  # a meeting in the meeting would take its deadline, 600 s
    assert nested.startswith("GroupAborted: save was called in a signal handler")
    assert zero["third"] == one["third"] == "durable"
