"""Many stores in one process: clients of those used last stay connected, others come back."""

from __future__ import annotations

from pathlib import Path

import torch

import groupio.torch as gt
from groupio.torch import clients
from open_files import open_files


def state(number: int) -> dict[str, torch.Tensor]:
    return {"x": torch.full((100,), float(number))}


def connected() -> int:
    return sum(any(c.is_usable for c in one._connections) for one in clients.open_clients())


def test_a_store_for_each_checkpoint_does_not_gather_connections(tmp_path: Path) -> None:
    gt.close()
    sockets = len(open_files("socket:")), len(open_files("memfd:"))
    for number in range(12):
        handle = gt.save(state(number), str(tmp_path / f"s{number}"), step=1)
        handle.wait("durable", 60)
        assert connected() <= clients.STORES_KEPT
    for number in (0, 11):
        # A client that left connects again.
        gt.save(state(number + 50), str(tmp_path / f"s{number}"), step=2).wait("durable", 60)
        found = state(-1)
        assert gt.load(found, str(tmp_path / f"s{number}")).step == 2
        assert torch.equal(found["x"], state(number + 50)["x"])
    assert connected() <= clients.STORES_KEPT
    gt.close()
    assert (len(open_files("socket:")), len(open_files("memfd:"))) == sockets


def test_a_client_with_a_save_under_way_is_not_let_go(tmp_path: Path) -> None:
    gt.close()
    handles = [gt.save(state(n), str(tmp_path / f"s{n}"), step=1) for n in range(10)]
    for handle in handles:
        handle.wait("durable", 60)
    gt.close()
