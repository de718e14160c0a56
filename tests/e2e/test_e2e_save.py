"""A job of real processes saves as a group and gets back what it saved."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from e2e_help import MIB, data, save_all

from groupio.errors import (
    EpochConflict,
    GroupAborted,
    GroupTimeout,
    InvalidInput,
    LateMember,
    NotFound,
    ReplicaDivergence,
    StagingFull,
    StaleEpoch,
    from_wire,
)


def test_save_and_load_all_different(node: Any, tmp_path: Path) -> None:
    ranks = node.world(4, tmp_path / "store")
    save_all(ranks, 1, lambda r: r)
    save_all(ranks, 2, lambda r: 10 + r)
    for one in ranks:
        one.ask("load", expect=data(10 + one.rank))
        one.ask("load", expect=data(one.rank), epoch=1)
        one.ask("load", expect=data(10 + (one.rank + 1) % 4), member=(one.rank + 1) % 4)
    assert ranks[0].ask("epochs")["epochs"] == [1, 2]


def stored(store: Path) -> int:
    """Bytes of all files, once the in-flight records are forgotten: after DURABLE, at leisure."""
    deadline = time.monotonic() + 20
    while os.listdir(store / "inflight"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return sum(p.stat().st_size for p in store.rglob("*") if p.is_file())


def test_equal_ranks_store_one_copy_and_an_unchanged_epoch_almost_nothing(
    node: Any, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    ranks = node.world(4, store)
    save_all(ranks, 1, lambda r: 7)
    one_copy = 9 * MIB + 5
    first = stored(store)
    assert first <= 1.01 * one_copy + 8192
    save_all(ranks, 2, lambda r: 7)
    assert stored(store) - first <= 64 << 10
    for one in ranks:
        one.ask("load", expect=data(7))


def test_small_and_empty_states(node: Any, tmp_path: Path) -> None:
    ranks = node.world(2, tmp_path / "store")
    for epoch, items in ((1, {}), (2, {"a": None}), (3, {"a": {"seed": 1, "bytes": 0}})):
        for one in ranks:
            one.send("save", epoch=epoch, items=items)
        for one in ranks:
            assert one.answer()["error"] is None
            one.ask("wait", epoch=epoch, timeout_s=30)
            one.ask("load", expect=items)


def test_20000_tensors_with_256_descriptors(make_node: Any, tmp_path: Path) -> None:
    node = make_node()
    ranks = [node.start(r, ("prlimit", "--nofile=256:256")) for r in range(2)]
    for r, one in enumerate(ranks):
        one.send("connect", store=str(tmp_path / "store"), rank=r, world_size=2)
        one.answer()
    for one in ranks:
        one.send("save", epoch=1, items={"__many__": 20_000})
    for one in ranks:
        assert one.answer()["error"] is None
        one.ask("wait", epoch=1, timeout_s=60)
        one.ask("load", expect={"__many__": 20_000})
        assert one.ask("fds")["fds"] < 64


def test_state_larger_than_the_budget_goes_in_waves(make_node: Any, tmp_path: Path) -> None:
    node = make_node(memory_bytes="48M")
    ranks = node.world(2, tmp_path / "store")
    items = {"big": {"seed": 1, "bytes": 70 * MIB}, "small": {"seed": 2, "bytes": 1000}}
    for one in ranks:
        one.send("save", epoch=1, items={**items, "rank": one.rank})
    for one in ranks:
        assert one.answer()["error"] is None
        answer = one.ask("wait", epoch=1, timeout_s=60)
        assert any("waves" in note for note in answer["notes"])
        one.ask("load", expect={**items, "rank": one.rank})
    memory = node.status()["agent"]["memory"]
    assert memory["leased"] == memory["quarantined"] == 0
    assert memory["free"] <= 48 * MIB


@pytest.mark.parametrize("when_full", ["fail", "skip"])
def test_full_arena_fails_or_skips(make_node: Any, tmp_path: Path, when_full: str) -> None:
    node = make_node(memory_bytes="48M")
    one = node.rank(0, 1, tmp_path / "store")
    items = {"big": {"seed": 1, "bytes": 70 * MIB}}
    answer = one.ask("save", epoch=1, items=items, when_full=when_full)
    assert (answer["error"] is None) == (when_full == "skip")
    with pytest.raises(StagingFull) as caught:
        one.ask("wait", epoch=1, timeout_s=10)
    assert caught.value.skipped == (when_full == "skip")
    assert one.ask("epochs")["epochs"] == []


def test_missing_rank_is_named_within_the_deadline(node: Any, tmp_path: Path) -> None:
    ranks = node.world(3, tmp_path / "store")
    started = time.monotonic()
    for one in ranks[:2]:
        one.send("save", epoch=1, items=data(1), deadline_s=1.0)
    for one in ranks[:2]:
        error = from_wire(one.answer(10)["error"])
        assert isinstance(error, GroupTimeout)
        assert error.missing == (2,)
        assert error.outcome == "not_committed"
    assert time.monotonic() - started < 5
    save_all(ranks, 2, lambda r: r)


def test_rank_killed_while_others_wait_is_named(node: Any, tmp_path: Path) -> None:
    ranks = node.world(3, tmp_path / "store")
    save_all(ranks, 1, lambda r: r)
    for one in ranks[:2]:
        one.send("save", epoch=2, items=data(1))
    node.until(lambda s: s["jobs"][0]["groups"] and s["jobs"][0]["groups"][0]["missing"] == [2])
    ranks[2].kill()
    for one in ranks[:2]:
        error = from_wire(one.answer(10)["error"])
        assert isinstance(error, GroupAborted)
        assert error.members == (2,)
    ranks[0].ask("load", expect=data(0))


def in_copy(node: Any) -> None:
    node.until(lambda s: any(g["phase"] == "copying" for job in s["jobs"] for g in job["groups"]))


def test_rank_killed_in_its_copy(make_node: Any, tmp_path: Path) -> None:
    node = make_node(memory_bytes="2G")
    ranks = node.world(2, tmp_path / "store")
    save_all(ranks, 1, lambda r: r)
    big = {"w": {"zeros": 600 * MIB}}
    small = {"w": {"seed": 1, "bytes": MIB}}
    ranks[0].send("save", epoch=2, items=small, wait_for="staged")
    ranks[1].send("save", epoch=2, items=big)
    in_copy(node)
    ranks[1].kill()
    error = from_wire(ranks[0].answer(20)["error"])
    assert isinstance(error, GroupAborted)
    assert error.members == (1,)
    node.until(lambda s: s["agent"]["memory"]["leased"] == 0)
    assert node.status()["agent"]["memory"]["quarantined"] == 0
    ranks[0].ask("load", expect=data(0))


def test_rank_stopped_in_its_copy_is_fenced(make_node: Any, tmp_path: Path) -> None:
    node = make_node(memory_bytes="2G")
    ranks = node.world(2, tmp_path / "store")
    ranks[0].send("save", epoch=1, items=data(1), deadline_s=4, wait_for="staged")
    ranks[1].send("save", epoch=1, items={"w": {"zeros": 600 * MIB}}, deadline_s=4)
    in_copy(node)
    ranks[1].signal(signal.SIGSTOP)
    error = from_wire(ranks[0].answer(20)["error"])
    assert isinstance(error, GroupTimeout)
    assert error.missing == (1,)
    # Its memory is not used again while it could still write to it.
    assert node.until(lambda s: s["agent"]["memory"]["quarantined"]) >= 600 * MIB
    ranks[1].signal(signal.SIGCONT)
    error = from_wire(ranks[1].answer(20)["error"])
    assert isinstance(error, GroupTimeout)
    node.until(lambda s: s["agent"]["memory"]["quarantined"] == 0)
    save_all(ranks, 2, lambda r: r)


def test_staged_epoch_is_committed_after_all_ranks_are_killed(node: Any, tmp_path: Path) -> None:
    store = tmp_path / "store"
    ranks = node.world(4, store)
    for one in ranks:
        one.send("save", epoch=5, items=data(one.rank, 20 * MIB), wait_for="staged")
    for one in ranks:
        assert one.answer()["error"] is None
    for one in ranks:
        one.kill()
    again = node.world(4, store)
    for one in again:
        one.ask("load", expect=data(one.rank, 20 * MIB))
    save_all(again, 6, lambda r: r)
    assert again[0].ask("epochs")["epochs"] == [5, 6]


def test_sigterm_of_ranks_loses_no_staged_epoch(node: Any, tmp_path: Path) -> None:
    ranks = node.world(2, tmp_path / "store")
    for one in ranks:
        one.send("save", epoch=1, items=data(one.rank), wait_for="staged")
    for one in ranks:
        one.answer()
        one.signal(signal.SIGTERM)
    again = node.world(2, tmp_path / "store")
    again[1].ask("load", expect=data(1))


def test_same_epoch_again(node: Any, tmp_path: Path) -> None:
    ranks = node.world(2, tmp_path / "store")
    save_all(ranks, 3, lambda r: r)
    size = stored(tmp_path / "store")
    save_all(ranks, 3, lambda r: r)
    assert stored(tmp_path / "store") == size
    for one in ranks:
        one.send("save", epoch=3, items=data(50 + one.rank), wait_for="durable")
    for one in ranks:
        error = from_wire(one.answer()["error"])
        assert isinstance(error, EpochConflict)
        assert error.epoch == 3
        assert error.outcome == "committed"
    ranks[0].ask("load", expect=data(0))


def test_older_epoch_and_rewind(node: Any, tmp_path: Path) -> None:
    store = tmp_path / "store"
    ranks = node.world(2, store)
    for epoch in (1, 2, 3):
        save_all(ranks, epoch, lambda r, e=epoch: 10 * e + r)
    ranks[1].send("save", epoch=0, items=data(0))
    error = from_wire(ranks[0].ask("save", epoch=0, items=data(0))["error"])
    assert isinstance(error, StaleEpoch)
    assert error.latest == 3
    ranks[1].answer()
    for one in ranks:
        one.ask("close")
    again = node.world(2, store, rewind_to=1)
    for one in again:
        one.ask("load", expect=data(10 + one.rank))
    save_all(again, 2, lambda r: 70 + r)
    for one in again:
        one.ask("load", expect=data(70 + one.rank))
        one.ask("load", expect=data(30 + one.rank), epoch=3)
    assert again[0].ask("epochs")["epochs"] == [1, 2, 2, 3]


def test_going_on_from_an_older_epoch(node: Any, tmp_path: Path) -> None:
    store = tmp_path / "store"
    ranks = node.world(2, store)
    for epoch in (1, 2, 4, 6):
        save_all(ranks, epoch, lambda r, e=epoch: 10 * e + r)
    ranks[0].kill()
    again = node.rank(0, 1, store)
    again.ask("load", expect=data(20), epoch=2)
    # Rank 1 of the incarnation before still runs: its line is not taken from it.
    error = from_wire(again.ask("save", epoch=3, items=data(0), deadline_s=30)["error"])
    assert isinstance(error, StaleEpoch)
    assert f"pid {ranks[1].pid}" in error.message
    assert "connect(rewind_to=2)" in error.message
    ranks[1].kill()
    node.until(lambda s: len(s["clients"]) == 1)
    # The save failed for certain, so the rank still goes on after what it loaded.
    save_all([again], 4, lambda r: 90 + r)
    again.ask("load", expect=data(90))
    again.ask("load", expect=data(60), epoch=6)
    save_all([again], 5, lambda r: 50 + r)
    assert again.ask("epochs")["epochs"] == [1, 2, 4, 4, 5, 6]


def test_ranks_that_loaded_different_epochs(node: Any, tmp_path: Path) -> None:
    store = tmp_path / "store"
    ranks = node.world(2, store)
    for epoch in (1, 2, 6):
        save_all(ranks, epoch, lambda r, e=epoch: 10 * e + r)
    for one in ranks:
        one.ask("close")
    again = node.world(2, store)
    again[0].ask("load", expect=data(10), epoch=1)
    again[1].ask("load", expect=data(21), epoch=2)
    again[0].send("save", epoch=3, items=data(0), deadline_s=30)
    for answer in (again[1].ask("save", epoch=3, items=data(1), deadline_s=30), again[0].answer()):
        error = from_wire(answer["error"])
        assert isinstance(error, InvalidInput)
        assert "rank 0 goes on after epoch 1" in error.message
        assert "rank 1 goes on after epoch 2" in error.message
    # A newer epoch goes on in the old line.
    save_all(again, 7, lambda r: 70 + r)
    assert again[0].ask("epochs")["epochs"] == [1, 2, 6, 7]


def test_two_ranks_with_one_number(node: Any, tmp_path: Path) -> None:
    ranks = [node.rank(r, 2, tmp_path / "store") for r in (0, 1, 1)]
    for one in ranks[:2]:
        one.send("save", epoch=1, items=data(one.rank))
    for one in ranks[:2]:
        assert one.answer()["error"] is None
    error = from_wire(ranks[2].ask("save", epoch=2, items=data(1))["error"])
    assert isinstance(error, InvalidInput)
    assert str(ranks[1].pid) in error.message
    assert str(ranks[2].pid) in error.message


def test_members_disagree(node: Any, tmp_path: Path) -> None:
    ranks = [node.rank(0, 2, tmp_path / "store"), node.rank(1, 3, tmp_path / "store")]
    for one in ranks:
        one.send("save", epoch=1, items=data(one.rank), deadline_s=30)
    for one in ranks:
        error = from_wire(one.answer(20)["error"])
        assert isinstance(error, InvalidInput)
        assert "2" in error.message
        assert "3" in error.message


def test_restart_with_another_world_size(node: Any, tmp_path: Path) -> None:
    store = tmp_path / "store"
    ranks = node.world(4, store)
    save_all(ranks, 1, lambda r: r)
    for one in ranks:
        one.kill()
    again = node.world(2, store)
    again[1].ask("load", expect=data(1))
    save_all(again, 2, lambda r: 20 + r)
    bigger = node.world(3, store, rewind_to=None)
    with pytest.raises(NotFound):
        bigger[2].ask("load", expect={})


def test_old_process_after_a_restart_is_late(node: Any, tmp_path: Path) -> None:
    ranks = node.world(2, tmp_path / "store")
    save_all(ranks, 1, lambda r: r)
    ranks[0].kill()
    again = node.rank(0, 2, tmp_path / "store")
    again.send("save", epoch=2, items=data(0), deadline_s=30)
    node.until(lambda s: s["jobs"][0]["incarnation"] == 2)
    ranks[1].send("save", epoch=2, items=data(1), deadline_s=30)
    error = from_wire(ranks[1].answer(20)["error"])
    assert isinstance(error, LateMember)
    new = node.rank(1, 2, tmp_path / "store")
    assert new.ask("save", epoch=2, items=data(1), deadline_s=30)["error"] is None
    assert again.answer(20)["error"] is None


def test_false_replica_is_named(node: Any, tmp_path: Path) -> None:
    ranks = node.world(3, tmp_path / "store")
    for one in ranks:
        items = {"emb": {"seed": 9 if one.rank == 2 else 1, "bytes": MIB}, "own": one.rank}
        one.send("save", epoch=1, items=items, replicated=["emb"], wait_for="durable")
    for one in ranks:
        error = from_wire(one.answer()["error"])
        assert isinstance(error, ReplicaDivergence)
        assert error.items == ("emb",)
        assert error.members == (2,)
        assert error.first_byte == 0
        assert error.outcome == "not_committed"
    save_all(ranks, 2, lambda r: r)


def test_false_replica_of_a_state_in_waves(make_node: Any, tmp_path: Path) -> None:
    """To the byte in the last wave, which is still in memory; before that, to the chunk."""
    node = make_node(memory_bytes="48M")
    ranks = node.world(2, tmp_path / "store")
    for epoch, byte, known in ((1, 70 * MIB - 3, True), (2, 5 * MIB, False)):
        for one in ranks:
            big = {"seed": 1, "bytes": 70 * MIB, **({"flip": byte} if one.rank else {})}
            one.send("save", epoch=epoch, items={"big": big}, replicated=["big"])
        for one in ranks:
            one.answer()  # it may have been found out already
            with pytest.raises(ReplicaDivergence) as caught:
                one.ask("wait", epoch=epoch, timeout_s=60)
            assert caught.value.items == ("big",)
            assert caught.value.first_byte == (byte if known else None)
            where = f"at byte {byte}" if known else f"within bytes {4 * MIB} to {8 * MIB - 1}"
            assert f"rank 0 and rank(s) 1 first differ {where}" in caught.value.message
    assert ranks[0].ask("epochs")["epochs"] == []


def test_agent_killed_in_flight_and_a_new_one_goes_on(node: Any, tmp_path: Path) -> None:
    ranks = node.world(2, tmp_path / "store")
    save_all(ranks, 1, lambda r: r)
    for one in ranks:
        one.send("save", epoch=2, items=data(one.rank, 100 * MIB), wait_for="staged")
    for one in ranks:
        assert one.answer()["error"] is None
    node.kill_agent()
    for one in ranks:
        # The epoch may have been committed before the agent was killed.
        error = one.ask("wait", epoch=2, timeout_s=10, catch=True).get("lost")
        assert error is None or str(node.paths.log) in error["message"]
    save_all(ranks, 3, lambda r: 30 + r)
    for one in ranks:
        one.ask("load", expect=data(30 + one.rank))
    stored(tmp_path / "store")  # no in-flight record stays


def test_two_jobs_on_one_agent(node: Any, tmp_path: Path) -> None:
    a, b = node.world(2, tmp_path / "a"), node.world(2, tmp_path / "b")
    for epoch in (1, 2):
        for one in a + b:
            one.send("save", epoch=epoch, items=data(one.rank + (100 if one in b else 0)))
        for one in a + b:
            assert one.answer()["error"] is None
    for one in a + b:
        one.ask("wait", epoch=2, timeout_s=30)
        one.ask("load", expect=data(one.rank + (100 if one in b else 0)))
    assert len(node.status()["jobs"]) == 2


def test_agent_ends_when_idle(node: Any, tmp_path: Path) -> None:
    one = node.rank(0, 1, tmp_path / "store")
    save_all([one], 1, lambda r: r)
    assert node.agent_pid() is not None
    one.ask("close")
    one.end()
    node.wait_agent_gone(10)
    assert not node.paths.socket.exists()
