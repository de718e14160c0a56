"""The program's default device, dtype and modes of torch change nothing in what is saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch._subclasses.fake_tensor import FakeTensorMode

import groupio.torch as gt
from groupio.errors import InvalidInput

WAIT_S = 60.0

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "device": lambda: torch.device("meta"),
    "default device": default_device,
    "default dtype": default_dtype,
    "inference": torch.inference_mode,
    "no grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> Callable[[], AbstractContextManager[Any]]:
    """What the program has switched on."""
    return MODES[request.param]


def state() -> dict[str, Any]:
    made = torch.arange(600_000, dtype=torch.float32, device="cpu").reshape(600, 1000)
    weights = {"w": made, "t": made.t(), "half": made[:3].bfloat16(), "c": made[0].cfloat().conj()}
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.float32, device="cpu"))
    return {"m": weights, "p": parameter, "lr": 0.1, "n": [1, 2]}


def wiped(value: Any) -> Any:
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(torch.zeros_like(value, device="cpu"))
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape, dtype=value.dtype, device="cpu")
    return {key: wiped(one) for key, one in value.items()} if isinstance(value, dict) else None


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return other.device.type == "cpu" and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return bool(one == other)


def test_save_and_load_in_any_mode(
    store: str, mode: Callable[[], AbstractContextManager[Any]]
) -> None:
    saved, into = state(), wiped(state())
    own: dict[str, Any] = {"m": None, "p": None, "lr": None, "n": None}
    with mode():
        gt.save(saved, store, step=1).wait("durable", WAIT_S)
        gt.load(into, store)
        gt.load(own, store)
    assert equal(saved, into)
    assert equal(saved, own)


def test_the_dcp_classes_in_any_mode(
    store: str, mode: Callable[[], AbstractContextManager[Any]]
) -> None:
    saved = state()
    writer = gt.GroupStorageWriter(store)
    with mode():
        planner = gt.GroupSavePlanner()
        dcp.save(saved, checkpoint_id="1", storage_writer=writer, planner=planner, no_dist=True)
        dcp.async_save(saved, checkpoint_id="2", storage_writer=writer, no_dist=True).result()
        for step in ("1", "2"):
            into = wiped(state())
            reader = gt.GroupStorageReader(store)
            dcp.load(into, checkpoint_id=step, storage_reader=reader, no_dist=True)
            assert equal(saved, into)


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group, from which torch takes the device for meta tensors."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_dcp_loads_into_meta_tensors_as_with_the_reader_of_torch(
    store: str, one_rank: None
) -> None:
    saved = {"m": {"w": torch.ones(3, 2), "half": torch.ones(4).bfloat16()}}
    gt.save(saved, store, step=1).wait("durable", WAIT_S)
    readers = (gt.GroupStorageReader(store), None)
    for reader, step in zip(readers, ("1", f"{store}/dcp/1"), strict=True):
        with torch.device("meta"):
            into = {"m": {"w": torch.empty(3, 2), "half": torch.empty(4, dtype=torch.bfloat16)}}
        assert into["m"]["w"].is_meta
        dcp.load(into, checkpoint_id=step, storage_reader=reader)
        assert equal(saved, into)


def test_meta_and_fake_tensors_are_refused_by_load_and_save(store: str) -> None:
    gt.save({"w": torch.ones(2)}, store, step=1).wait("durable", WAIT_S)
    with pytest.raises(InvalidInput, match=r"\['w'\].*meta device.*memory"):
        gt.load({"w": torch.empty(2, device="meta")}, store)
    with pytest.raises(InvalidInput, match=r"\['w'\].*meta device"):
        gt.save({"w": torch.empty(2, device="meta")}, store, step=2)
    real = torch.zeros(2)
    fake = FakeTensorMode()
    with fake:
        made = torch.ones(2)
    with pytest.raises(InvalidInput, match="subclass"):
        gt.save({"w": made}, store, step=2)
    for call in (lambda: gt.save({"w": real}, store, step=2), lambda: gt.load({"w": real}, store)):
        with fake, pytest.raises(InvalidInput, match="FakeTensorMode is active"):
            call()
    gt.load({"w": real}, store)
    assert real.tolist() == [1, 1]
