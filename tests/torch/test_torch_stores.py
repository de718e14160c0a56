"""Many stores in one process: clients of those used last stay connected, others come back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import groupio.torch as gt
from groupio.torch import clients
from groupio.torch.members import find_members
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


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_path_that_is_re_pointed_means_another_store_to_save_and_load_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "a")
    gt.save(state(1), str(link), step=1).wait("durable", 60)
    writer, reader = gt.GroupStorageWriter(str(link)), gt.GroupStorageReader(str(link))
    link.unlink()
    link.symlink_to(tmp_path / "b")
    gt.save(state(2), str(link), step=2).wait("durable", 60)
    found = state(-1)
    assert gt.load(found, str(link)).step == 2
    assert gt.load(found, str(tmp_path / "a")).step == 1
    # An object stays with what it was made for, also when the directory changes.
    monkeypatch.chdir(tmp_path / "b")
    relative = gt.GroupStorageReader("../a")
    monkeypatch.chdir(tmp_path)
    dcp.save(state(3), storage_writer=writer, checkpoint_id="3")
    for one in (reader, relative):
        dcp.load(found, storage_reader=one, checkpoint_id="3")
        assert torch.equal(found["x"], state(3)["x"])
    # The same store by two names has one client.
    one, two = (clients.client_for(p, find_members(None)) for p in (str(link), tmp_path / "b"))
    assert one is two
