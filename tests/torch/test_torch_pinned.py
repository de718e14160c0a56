"""Staging memory is pinned once per mapping and unpinned before it goes."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
from typing import Any

import pytest
import torch

import groupio.torch as gt
from groupio.client.arena import Lease, lease_at
from groupio.client.sources import DEVICE_COPIES
from groupio.torch.pinned import CudaCopies, Pins

SIZE = 1 << 16


class Driver:
    """Notes the calls, and whether the memory was mapped at each of them."""

    def __init__(self, error: int = 0) -> None:
        self.calls: list[tuple[str, int]] = []
        self.error = error

    def register(self, address: int, size: int) -> int:
        assert size == SIZE
        self.calls.append(("pin", address))
        return self.error

    def unregister(self, address: int) -> int:
        ctypes.string_at(address, SIZE)  # a fault when it is unmapped already
        self.calls.append(("unpin", address))
        return self.error


def lease_of() -> Lease:
    return Lease(mmap.mmap(-1, SIZE), 0, SIZE)


def test_a_mapping_is_pinned_once_and_unpinned_before_it_is_unmapped() -> None:
    driver = Driver()
    pins = Pins(driver.register, driver.unregister)
    lease = lease_of()
    address = lease.address
    for _ in range(3):
        pins.pin(lease)
    assert driver.calls == [("pin", address)]
    del lease
    gc.collect()
    assert driver.calls == [("pin", address), ("unpin", address)]


def test_a_driver_that_refuses_costs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver(error=2)
    pins = Pins(driver.register, driver.unregister)
    lease = lease_of()
    pins.pin(lease)
    pins.pin(lease)
    del lease
    gc.collect()
    assert [name for name, _ in driver.calls] == ["pin"]
    assert caplog.text.count("does not pin") == 1


def test_a_forked_child_leaves_the_driver_alone() -> None:
    driver = Driver()
    pins = Pins(driver.register, driver.unregister)
    lease = lease_of()
    pins.pin(lease)
    pid = os.fork()
    if pid == 0:
        del lease
        gc.collect()
        os._exit(len(driver.calls))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


def test_leases_are_found_by_any_address_in_them() -> None:
    lease = lease_of()
    assert lease_at(lease.address) is lease
    assert lease_at(lease.address + SIZE - 1) is lease
    found = lease_at(lease.address + SIZE)
    assert found is not lease


def test_the_adapter_is_what_the_client_uses_for_cuda() -> None:
    assert isinstance(DEVICE_COPIES["cuda"], CudaCopies)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
def test_cuda_tensors_round_trip(store: str) -> None:
    state: dict[Any, Any] = {
        "big": torch.randn(5_000_000, device="cuda"),
        "strided": torch.randn(64, 96, device="cuda").t(),
        "bf16": torch.randn(1000, device="cuda").bfloat16(),
        "small": {n: torch.full((7,), float(n), device="cuda") for n in range(200)},
    }
    before = {"big": state["big"].cpu(), "strided": state["strided"].cpu()}
    for step in (1, 2):
        handle = gt.save(state, store, step=step)
        if step == 2:
            state["big"].zero_()  # the save is released: this may not change it
        handle.wait("durable", 60)
    into = {
        "big": torch.empty(5_000_000, device="cuda"),
        "strided": torch.empty(64, 96, device="cuda").t(),
        "bf16": torch.empty(1000, device="cuda", dtype=torch.bfloat16),
        "small": None,
    }
    gt.load(into, store)
    assert torch.equal(into["big"].cpu(), before["big"])  # type: ignore[union-attr]
    assert torch.equal(into["strided"].cpu(), before["strided"])  # type: ignore[union-attr]
    assert into["small"][7].tolist() == [7.0] * 7  # type: ignore[index]
