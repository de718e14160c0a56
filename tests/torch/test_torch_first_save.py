"""A job that looked for a checkpoint first has its staging memory ready when it first saves."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_spawned import run_ranks

import groupio
import groupio.torch as gt
from groupio import wire
from groupio.agent import process
from groupio.model import PAGE_BYTES
from groupio.protocol import messages as msg
from groupio.torch.matching import staged_bytes, template_of
from groupio.torch.saving import items_of

WORKER = Path(__file__).with_name("first_save_worker.py")
RANKS = 2
BYTES = 64 << 20


def memory() -> dict[str, int]:
    """The agent's memory, in bytes; none when there is no agent."""
    paths = process.runtime_paths(os.environ["GROUPIO_RUNTIME_DIR"], groupio.__version__)
    try:
        channel = wire.Channel(wire.connect(paths.socket, timeout_s=5), msg.ToRank)
    except (FileNotFoundError, ConnectionRefusedError):
        return {"free": 0, "leased": 0}
    try:
        channel.send(msg.Ask(1, "status"))
        found: dict[str, int] = channel.recv(10).message.body["agent"]["memory"]
        return found
    finally:
        channel.close()


def until(test: Callable[[dict[str, int]], bool]) -> None:
    end = time.monotonic() + 20
    while not test(memory()):
        assert time.monotonic() < end, memory()
        time.sleep(0.01)


def test_the_first_save_finds_mapped_memory(tmp_path: Path) -> None:
    for found in run_ranks(WORKER, tmp_path, RANKS, [0] * RANKS):
        assert found["right"]
        # The lease of the save is the range that was mapped before, and no page was touched first.
        assert found["leases"] == 1
        assert found["after"] == found["before"] >= BYTES
        assert found["faults"] < BYTES // PAGE_BYTES // 8


def test_what_was_expected_goes_with_the_client(store: str) -> None:
    gt.close()
    # Clients of other tests may still hold a little.
    until(lambda found: found["free"] < BYTES)
    with pytest.raises(groupio.NotFound):
        gt.load({"w": torch.zeros(BYTES // 4)}, store)
    until(lambda found: found["free"] > BYTES)
    assert memory()["leased"] == 0
    assert not os.path.exists(store)
    gt.close()
    until(lambda found: found["free"] < BYTES)


def test_a_state_that_grew_is_saved_as_ever(store: str) -> None:
    gt.close()
    state: dict[str, Any] = {"w": torch.arange(BYTES // 4, dtype=torch.float32)}
    with pytest.raises(groupio.NotFound):
        gt.load(state, store)
    until(lambda found: found["free"] > BYTES)
    state |= {"moments": [state["w"] * 2, state["w"] * 3]}
    gt.save(state, store, step=1).wait("durable", 60)
    # What was prepared did not fit, and is not kept beside what does.
    assert sum(memory()[use] for use in ("free", "leased")) < 3.2 * BYTES
    back = {"w": torch.zeros(BYTES // 4), "moments": None}
    gt.load(back, store)
    assert torch.equal(back["w"], state["w"])


def test_the_expectation_covers_what_a_save_stages() -> None:
    from groupio.client.outgoing import Packer

    states: list[dict[str, Any]] = [
        {},
        {"w": torch.zeros(5 << 20)},
        {f"tiny.{i}": torch.zeros(16) for i in range(2000)},
        {f"w{i}": torch.zeros(70_001 + i) for i in range(300)} | {"lr": 0.1, "names": ["a"] * 50},
    ]
    for state in states:
        needed = Packer().pack(items_of(state), ()).layout.total_bytes
        expected = staged_bytes(template_of(state))
        assert needed <= expected <= 1.1 * needed + (2 << 20)
