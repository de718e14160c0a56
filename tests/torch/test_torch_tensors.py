"""What a rank holds of a tensor, and what is refused with its path."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from groupio.errors import InvalidInput
from groupio.format.structure import Step
from groupio.torch.tensors import STORED_DTYPES, local_part, overlaps_itself

PATH = (Step("a", False), Step(0, True))


@pytest.fixture
def fake_world(request: pytest.FixtureRequest) -> Iterator[int]:
    """This process as one rank of eight that never talk."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    rank = getattr(request, "param", 0)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
    yield rank
    dist.destroy_process_group()


def make(mesh: DeviceMesh, placements: list[Any], shape: tuple[int, ...]) -> DTensor:
    """A DTensor of zeros whose local part has the shape that torch gives it."""
    with torch.no_grad():
        return torch.distributed.tensor.zeros(*shape, device_mesh=mesh, placements=placements)


def test_plain_tensors_are_whole_and_shared() -> None:
    tensor = torch.nn.Parameter(torch.randn(3, 4))
    local = local_part(tensor, PATH)
    assert local.tensor.data_ptr() == tensor.data_ptr()
    assert not local.tensor.requires_grad
    assert (local.shape, local.global_shape, local.offsets) == ((3, 4), (3, 4), (0, 0))
    assert (local.dtype, local.note, local.replicated, local.sharded) == (
        "float32", "", False, False,
    )  # fmt: skip


@pytest.mark.parametrize("fake_world", [0, 1, 5], indirect=True)
def test_fsdp_shards_carry_their_place(fake_world: int) -> None:
    mesh = init_device_mesh("cpu", (8,))
    local = local_part(make(mesh, [Shard(0)], (20, 3)), PATH)
    first = min(3 * fake_world, 20)
    assert local.offsets == (first, 0)
    assert local.shape == (min(3, 20 - first), 3)
    assert local.global_shape == (20, 3)
    assert not local.replicated


@pytest.mark.parametrize("fake_world", [7], indirect=True)
def test_a_rank_without_rows_holds_an_empty_part_inside_the_tensor(fake_world: int) -> None:
    mesh = init_device_mesh("cpu", (8,))
    local = local_part(make(mesh, [Shard(0)], (5, 3)), PATH)
    assert (local.shape, local.offsets) == ((0, 3), (5, 0))


@pytest.mark.parametrize("fake_world", [0, 5], indirect=True)
def test_hsdp_shards_are_declared_replicas(fake_world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replica", "shard"))
    local = local_part(make(mesh, [Replicate(), Shard(1)], (3, 8)), PATH)
    assert local.replicated
    assert local.offsets == (0, 2 * (fake_world % 4))
    assert local.shape == (3, 2)


def test_replicate_declares_only_where_there_are_several(fake_world: int) -> None:
    assert local_part(make(init_device_mesh("cpu", (8,)), [Replicate()], (3,)), PATH).replicated
    mesh = init_device_mesh("cpu", (1, 8))
    assert not local_part(make(mesh, [Replicate(), Shard(0)], (8,)), PATH).replicated


@pytest.mark.parametrize("fake_world", [3], indirect=True)
def test_a_rank_outside_of_the_mesh_holds_nothing(fake_world: int) -> None:
    mesh = DeviceMesh("cpu", [0, 1], _init_backend=False)
    tensor = DTensor.from_local(torch.zeros(2, 4), mesh, [Shard(0)], run_check=False)
    local = local_part(tensor, PATH)
    assert local.shape[0] == 0
    assert local.tensor.numel() == 0


def test_placements_that_cannot_be_stored(fake_world: int) -> None:
    mesh = init_device_mesh("cpu", (8,))
    tensor = DTensor.from_local(torch.zeros(2, 4), mesh, [Partial()], run_check=False)
    with pytest.raises(InvalidInput, match=r"\['a'\]\[0\]") as caught:
        local_part(tensor, PATH)
    assert "Partial" in caught.value.message
    assert "redistribute" in caught.value.message


@pytest.mark.parametrize("fake_world", [3], indirect=True)
def test_strided_shards_are_several_boxes(fake_world: int) -> None:
    mesh = init_device_mesh("cpu", (4, 2))
    placements = [_StridedShard(0, split_factor=2), Replicate()]
    local = local_part(make(mesh, placements, (16, 3)), PATH)
    assert [box for _, box in local.boxes()] == [((2, 0), (2, 3)), ((10, 0), (2, 3))]
    assert [part.shape for part, _ in local.boxes()] == [(2, 3)] * 2
    assert local.replicated


def test_a_local_part_of_another_shape_is_refused(fake_world: int) -> None:
    mesh = init_device_mesh("cpu", (8,))
    tensor = DTensor.from_local(
        torch.zeros(2, 4), mesh, [Shard(0)], run_check=False, shape=torch.Size((80, 4)),
        stride=(4, 1),
    )  # fmt: skip
    with pytest.raises(InvalidInput, match="explicit shape"):
        local_part(tensor, PATH)


class Odd(torch.Tensor):
    """An unknown subclass."""


def quantised() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


def freed() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: torch.ones(2).to_sparse(), "sparse"),
        (lambda: torch.ones(2, 2).to_sparse_csr(), "sparse_csr"),
        (lambda: torch.ones(2, device="meta"), "meta device"),
        (quantised, "quantised"),
        (lambda: torch.ones(2).as_subclass(Odd), "subclass"),
        (lambda: torch.nn.parameter.UninitializedParameter(), "subclass"),
        (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "is nested"),
        (freed, "freed"),
    ],
)
def test_tensors_without_plain_memory_are_refused(build: Any, words: str) -> None:
    with pytest.raises(InvalidInput, match=words) as caught:
        local_part(build(), PATH)
    assert "['a'][0]" in caught.value.message
    assert "; " in caught.value.message  # and what to do


@pytest.mark.filterwarnings("ignore")
def test_every_dtype_of_torch_has_a_stored_form() -> None:
    dtypes = {d for d in vars(torch).values() if isinstance(d, torch.dtype)}
    for dtype in dtypes:
        if str(dtype).startswith(("torch.qint", "torch.quint")):
            continue
        tensor = torch.empty((2, 3), dtype=dtype)
        local = local_part(tensor.t(), PATH)
        assert local.shape == (3, 2)
        assert local.tensor.element_size() == tensor.element_size()
        assert local.tensor.data_ptr() == tensor.data_ptr()
        assert bool(local.note) == (dtype not in STORED_DTYPES)


def test_overlap_is_found() -> None:
    base = torch.zeros(4, 6)
    for fine in (base, base.t(), base[:, ::2], base[1:], torch.zeros(()), torch.zeros(0, 3)):
        assert not overlaps_itself(fine)
    for shared in (
        torch.zeros(1).expand(4),
        base[:1].expand(4, 6),
        base.as_strided((3, 3), (1, 1)),
    ):
        assert overlaps_itself(shared)
