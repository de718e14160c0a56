"""Where the elements of a local part lie, compared with how torch itself distributes a tensor."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from groupio.format.structure import Step
from groupio.torch.placing import pieces_of, replicates
from groupio.torch.tensors import local_part

MESHES = [(4,), (3,), (2, 2), (2, 3), (3, 2), (2, 2, 2)]


def cases(seed: int, count: int) -> Iterator[tuple[tuple[int, ...], list[Any], tuple[int, ...]]]:
    """Meshes, placements and shapes, with empty and uneven shards among them."""
    choose = random.Random(seed)
    for _ in range(count):
        mesh = choose.choice(MESHES)
        shape = tuple(choose.randint(0, 13) for _ in range(choose.randint(1, 3)))
        placements: list[Any] = []
        for axis in range(len(mesh)):
            dim = choose.randrange(len(shape))
            later = prod(mesh[axis + 1 :])
            if later > 1 and choose.random() < 0.4:
                placements.append(_StridedShard(dim, split_factor=later))
            else:
                placements.append(choose.choice([Shard(dim), Shard(dim), Replicate()]))
        yield mesh, placements, shape


@pytest.mark.parametrize("rank", range(8))
def test_the_local_part_is_the_elements_of_its_boxes(rank: int) -> None:
    seen = 0
    for mesh_shape, placements, shape in cases(5, 90):
        world = prod(mesh_shape)
        if rank >= world:
            continue
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        try:
            mesh = init_device_mesh("cpu", mesh_shape)
            full = torch.arange(prod(shape)).reshape(shape)
            tensor = distribute_tensor(full, mesh, placements, src_data_rank=None)
            local = local_part(tensor, (Step("a", False),))
        finally:
            dist.destroy_process_group()
        assert local.global_shape == shape
        assert local.replicated == replicates(mesh_shape, placements)
        elements = 0
        for part, box in local.boxes():
            elements += part.numel()
            for lo, size, extent in zip(*box, shape, strict=True):
                assert 0 <= lo <= lo + size <= extent
            assert torch.equal(
                part, full[tuple(slice(a, a + n) for a, n in zip(*box, strict=True))]
            )
        assert elements == local.tensor.numel()
        seen += len(local.pieces) > 1
    assert seen  # strided shards of several boxes were among them


def test_shards_of_all_ranks_are_the_tensor() -> None:
    for mesh, placements, shape in cases(6, 60):
        taken = torch.zeros(shape, dtype=torch.int64)
        copies = prod(n for n, p in zip(mesh, placements, strict=True) if isinstance(p, Replicate))
        for coordinate in product(*map(range, mesh)):
            _, pieces = pieces_of(shape, mesh, tuple(placements), coordinate)
            for piece in pieces:
                corner = zip(*piece.box, strict=True)
                taken[tuple(slice(a, a + n) for a, n in corner)] += 1
        assert bool((taken == copies).all())


def test_fsdp_over_tensor_parallelism_leaves_several_boxes() -> None:
    placements = (_StridedShard(0, split_factor=2), Replicate())
    shape, pieces = pieces_of((13, 3), (2, 2), placements, (1, 0))
    assert shape == (6, 3)
    assert [piece.box for piece in pieces] == [((4, 0), (3, 3)), ((10, 0), (3, 3))]
    assert [piece.local[0] for piece in pieces] == [slice(0, 3), slice(3, 6)]


def test_a_large_dimension_costs_no_memory() -> None:
    shape, pieces = pieces_of((1 << 40,), (8,), (Shard(0),), (7,))
    assert (shape, pieces[0].box.offsets) == ((1 << 37,), (7 << 37,))
