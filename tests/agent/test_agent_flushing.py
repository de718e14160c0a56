"""The flush jobs of an agent, and that nothing of them stays when their groups are over."""

from __future__ import annotations

import gc
import queue
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from agent_tools import WAIT_S

from groupio.agent.eager import EagerFlush
from groupio.agent.flushing import Flushing
from groupio.agent.known import KnownChunks
from groupio.agent.metrics import Metrics
from groupio.agent.workers import WorkerPool
from groupio.model import DecisionKey
from groupio.protocol import effects as fx
from groupio.protocol import events as ev

KEY = DecisionKey(1, 5, 1)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Memory is freed by reference counts alone."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def a_flushing(pool: WorkerPool, told: queue.SimpleQueue[Any]) -> Flushing:
    """The jobs of an agent that has one job, whose store's thread is this one."""
    store = MagicMock(store_id="5" * 32, known=KnownChunks())
    job = SimpleNamespace(store=store, run=lambda step: step())

    def post(step: Callable[[], None]) -> None:
        step()

    driver = SimpleNamespace(
        node="n0",
        network=MagicMock(),
        workers=pool,
        metrics=Metrics(),
        job_of_group=lambda group: job,
        post=post,
        tell_machine=told.put,
    )
    return Flushing(driver)  # type: ignore[arg-type]


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("planned", [False, True])
def test_a_job_is_gone_with_its_group(planned: bool, pool: WorkerPool) -> None:
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    flushing = a_flushing(pool, told)
    flushing.execute(fx.StartJob(group=1, key=KEY, store=True, planned=planned))
    base = flushing._jobs[1][0]
    parts = [weakref.ref(base)]
    inner = base._base if planned else base._job  # type: ignore[union-attr]
    parts.append(weakref.ref(inner))  # type: ignore[arg-type]
    del inner
    del base
    flushing.execute(fx.FinishJob(1))
    answer = told.get(timeout=WAIT_S)
    assert isinstance(answer, ev.JobHashed if planned else ev.JobStored)
    flushing.execute(fx.EndJob(1, delete_segments=False))
    pool.close(timeout_s=WAIT_S)  # its threads are done with the job's last step
    assert [part() for part in parts] == [None] * len(parts)


@pytest.mark.parametrize("delete", [False, True])
def test_what_failed_jobs_left_goes_with_the_group(delete: bool, pool: WorkerPool) -> None:
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    flushing = a_flushing(pool, told)
    flushing.execute(fx.StartJob(group=1, key=KEY, store=True, planned=False))
    flushing.execute(fx.FinishJob(1))
    assert isinstance(told.get(timeout=WAIT_S), ev.JobStored)
    flush = flushing._jobs[1][0]
    assert isinstance(flush, EagerFlush)
    spent = MagicMock()
    flush._spent.append(spent)
    flushing.execute(fx.EndJob(1, delete_segments=delete))
    spent.delete_segments.assert_called_once_with()
    assert flush.swept
