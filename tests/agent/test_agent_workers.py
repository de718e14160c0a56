"""The worker threads: order, priority, giving way to copies, bounded bounce buffers."""

from __future__ import annotations

import os
import threading
import time

import pytest
from agent_tools import WAIT_S

from groupio.agent import workers
from groupio.agent.workers import BouncePool, WorkerPool


def run_in(submit: object, task: object) -> None:
    """Run ``task`` in a worker thread and wait."""
    done = threading.Event()

    def step() -> None:
        task()  # type: ignore[operator]
        done.set()

    submit(step)  # type: ignore[operator]
    assert done.wait(WAIT_S)


def test_work_is_done_in_order_below_the_priority_of_ranks(pool: WorkerPool) -> None:
    seen: list[int] = []
    for submit in (pool.submit_hash, pool.submit_write):
        run_in(
            submit,
            lambda: seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())),
        )
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    assert seen == [max(ours, workers.NICE), max(ours, workers.WRITER_NICE)]
    assert min(seen) > 0
    one = WorkerPool(hash_threads=1, write_threads=1)
    order: list[int] = []
    for number in range(100):
        one.submit_hash(lambda number=number: order.append(number))
    assert one.close(WAIT_S), "what was queued is done before the end"
    assert order == list(range(100))


def test_hashing_waits_while_ranks_copy_on_all_processors() -> None:
    copying = 2
    pool = WorkerPool(copies_active=lambda: copying, cpu_count=2)
    passed = threading.Event()
    pool.submit_hash(lambda: (pool.give_way(), passed.set()))  # type: ignore[func-returns-value]
    assert not passed.wait(0.1)
    copying = 1
    assert passed.wait(WAIT_S)
    assert pool.close(WAIT_S)


def test_a_copy_that_never_ends_delays_hashing_once_not_for_each_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers, "_PATIENCE_S", 0.05)
    pool = WorkerPool(copies_active=lambda: 8, cpu_count=2)
    run_in(pool.submit_hash, pool.give_way)
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    for _ in range(50):
        run_in(pool.submit_hash, pool.give_way)
    assert slept == []
    assert pool.close(WAIT_S)


def test_bounce_buffers_are_bounded_and_reused() -> None:
    pool = BouncePool(2)
    first, second = pool.take(lambda: False), pool.take(lambda: False)
    assert first is not None
    assert second is not None
    assert pool.take(iter([False, True]).__next__) is None, "a stop ends the wait"
    taken: list[object] = []
    waiter = threading.Thread(target=lambda: taken.append(pool.take(lambda: False)))
    waiter.start()
    pool.give_back(second)
    waiter.join(WAIT_S)
    assert taken == [second]


def test_close_says_when_a_thread_hangs() -> None:
    pool = WorkerPool(hash_threads=1, write_threads=1)
    leave = threading.Event()
    pool.submit_write(lambda: leave.wait(WAIT_S))  # type: ignore[arg-type,return-value]
    assert not pool.close(0.05)
    leave.set()
