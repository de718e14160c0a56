"""Marking communication from torch: all clients of the process, and a hook of DDP."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import groupio
import groupio.torch as gt
from groupio.client.connection import Connection
from groupio.protocol import messages as msg


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, store: str) -> list[float | None]:
    """What the agent of ``store`` hears of intervals."""
    gt.save({"x": torch.zeros(4)}, store, step=1, dcp_door=False).wait("durable", 60)
    shares: list[float | None] = []
    send = Connection.send

    def recorded(self: Connection, message: Any, *rest: Any, **more: Any) -> None:
        if isinstance(message, msg.Foreground):
            shares.append(message.share)
        send(self, message, *rest, **more)

    monkeypatch.setattr(Connection, "send", recorded)
    return shares


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_context_and_decorator(told: list[float | None]) -> None:
    with gt.foreground():
        assert told == [0.1]

    @gt.foreground(share=0)
    def step() -> None:
        assert told[-1] == 0

    step()
    step()
    assert told == [0.1, None, 0, None, 0, None]


def test_without_a_client_it_does_nothing() -> None:
    gt.close()
    with gt.foreground():
        pass


def test_wrong_share_is_invalid(told: list[float | None]) -> None:
    with pytest.raises(groupio.InvalidInput), gt.foreground(2):
        pass
    assert told == []


def test_hook_marks_the_communication_of_a_backward_pass(
    told: list[float | None], group: None
) -> None:
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    model.register_comm_hook(None, gt.foreground_hook(allreduce_hook, share=0.25))
    model(torch.ones(2, 4)).sum().backward()
    deadline = time.monotonic() + 30
    while len(told) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)  # the end comes from the thread of the collective
    assert told == [0.25, None]
    assert model.module.weight.grad is not None


def test_hook_that_fails_leaves_no_interval(told: list[float | None]) -> None:
    def broken(state: object, bucket: object) -> torch.futures.Future[torch.Tensor]:
        raise RuntimeError("no network")

    with pytest.raises(RuntimeError, match="no network"):
        gt.foreground_hook(broken)(None, None)
    assert told == [0.1, None]
