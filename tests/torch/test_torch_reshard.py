"""From any placement to any other: every element comes back, and few chunks are read for it."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from itertools import product
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_torch_placing import cases
from torch.distributed.tensor import Shard
from torch_epochs import saved_by

from groupio.client.parts import Catalogue
from groupio.client.values import Part
from groupio.client.wants import Collector
from groupio.errors import InvalidInput
from groupio.format.items import decode_stored_columns, encode_items
from groupio.format.structure import Leaf, part_name
from groupio.model import ItemKind, ItemSpec, MemberTable
from groupio.plan import chunks, layout
from groupio.plan.read import Box, overlap
from groupio.torch.placing import pieces_of, replicates, whole_piece
from groupio.torch.sourcing import Fill, Missing, fill_of, take_of
from groupio.torch.taking import collect_fills, collect_take
from groupio.torch.tensors import Local, as_integers

LEAF = Leaf((), name="w")


@pytest.fixture(params=[16, 200, 4 << 20])
def chunk_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Small chunks, so that small tensors have many."""
    for module in (chunks, layout):
        monkeypatch.setattr(module, "CHUNK_BYTES", request.param)
    return int(request.param)


def parts_of(full: torch.Tensor, mesh: Any, placements: list[Any]) -> Iterator[Local]:
    """What each rank of the mesh holds."""
    shape = tuple(full.shape)
    for coordinate in product(*map(range, mesh)):
        local_shape, pieces = pieces_of(shape, mesh, tuple(placements), coordinate)
        local = torch.empty(local_shape, dtype=full.dtype)
        for piece in pieces:
            corner = tuple(slice(a, a + n) for a, n in zip(*piece.box, strict=True))
            local[piece.local] = full[corner]
        yield Local(local, shape, pieces, replicates(mesh, placements))


def items(local: Local) -> dict[str, Any]:
    return {
        part_name("w", number): Part(part, local.global_shape, box.offsets, local.replicated)
        for number, (part, box) in enumerate(local.boxes())
    }


def load(epoch: Any, rank: int, local: Local) -> None:
    catalogue = Catalogue(epoch, rank)
    fill = fill_of(local, LEAF, catalogue)
    assert isinstance(fill, Fill), fill
    wants = Collector()
    finishes = collect_fills([fill], catalogue, wants)
    epoch.fetch(None, (), None, wants.finish(), deadline=0, threads=1, epoch=1)
    for finish in finishes:
        finish()


def blank(local: Local, turned: bool) -> Local:
    """Memory for it, contiguous or not."""
    shape = local.shape[::-1] if turned else local.shape
    tensor = torch.full(shape, 77, dtype=local.tensor.dtype)
    tensor = tensor.permute(*range(tensor.ndim)[::-1]) if turned else tensor
    return Local(tensor, local.global_shape, local.pieces)


def bits(tensor: torch.Tensor) -> bytes:
    return as_integers(tensor).contiguous().numpy().tobytes()


def test_any_placement_to_any_other(chunk_bytes: int) -> None:
    choose = random.Random(chunk_bytes)
    targets = list(cases(8, 40))
    dtypes = [torch.float32, torch.bfloat16, torch.complex128, torch.bool]
    for mesh, placements, shape in cases(7, 40):
        full = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        dtype = choose.choice(dtypes)
        full = (full & 1).bool()[..., 0] if dtype is torch.bool else full.view(dtype)[..., 0]
        full = full.contiguous()
        epoch = saved_by(*map(items, parts_of(full, mesh, placements)))
        same = [(mesh, placements)]
        others = [(m, p) for m, p, s in targets if len(s) == len(shape)][:3]
        for to_mesh, to_placements in same + others:
            for rank, local in enumerate(parts_of(full, to_mesh, to_placements)):
                into = blank(local, choose.random() < 0.3)
                load(epoch, rank, into)
                place = (mesh, placements, to_mesh, to_placements, shape, rank)
                assert bits(into.tensor) == bits(local.tensor), place
        take = take_of(LEAF, Catalogue(epoch, 99))
        wants = Collector()
        get = collect_take(take, Catalogue(epoch, 99), wants)  # type: ignore[arg-type]
        epoch.fetch(None, (), None, wants.finish(), deadline=0, threads=1, epoch=1)
        whole = get()
        assert (whole.dtype, whole.shape) == (full.dtype, full.shape)
        assert bits(whole) == bits(full)


def test_a_rank_reads_only_the_chunks_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (chunks, layout):
        monkeypatch.setattr(module, "CHUNK_BYTES", 64)
    full = torch.arange(32 * 16, dtype=torch.float32).reshape(32, 16)
    shards = list(parts_of(full, (4,), [Shard(0)]))
    epoch = saved_by(*map(items, shards))
    assert len(epoch.contents) == 32  # one per row
    for world in (1, 2, 3, 8):
        read = []
        for rank, local in enumerate(parts_of(full, (world,), [Shard(0)])):
            load(epoch, rank, blank(local, False))
            assert len(epoch.fetched) == local.shape[0]
            read += epoch.fetched
        assert sorted(read) == list(range(32))
    # Columns need a part of every chunk.
    for rank, local in enumerate(parts_of(full, (2,), [Shard(1)])):
        load(epoch, rank, blank(local, False))
        assert epoch.fetched == list(range(32))


def test_own_items_are_preferred_and_nothing_else_is_decoded() -> None:
    full = torch.arange(64.0).reshape(8, 8)
    epoch = saved_by(*map(items, parts_of(full, (4,), [Shard(0)])))
    asked: list[int] = []
    columns = epoch.columns
    epoch.columns = lambda rank: (asked.append(rank), columns(rank))[1]
    local = list(parts_of(full, (4,), [Shard(0)]))[2]
    load(epoch, 2, blank(local, False))
    assert set(asked) == {2}


def plain(value: Any) -> Local:
    tensor = torch.as_tensor(value)
    return Local(tensor, tuple(tensor.shape), (whole_piece(tuple(tensor.shape)),))


def test_values_that_differ_belong_to_their_ranks() -> None:
    epoch = saved_by(*({"w": torch.full((3,), float(r)), "same": 1, "v": r} for r in range(3)))
    for rank in range(3):
        into = plain(torch.zeros(3))
        load(epoch, rank, into)
        assert into.tensor.tolist() == [rank] * 3
    late = Catalogue(epoch, 7)
    missing = fill_of(plain(torch.zeros(3)), LEAF, late)
    assert isinstance(missing, Missing)
    assert "different values" in missing.reason
    assert isinstance(take_of(Leaf((), name="v"), late), Missing)
    assert not isinstance(take_of(Leaf((), name="same"), late), Missing | str)
    assert take_of(Leaf((), name="nobody"), late) == Missing()
    # Equal values of all ranks, with another value beside that makes their tables differ.
    agreed = saved_by(*({"w": torch.ones(3), "own": torch.zeros(r + 1)} for r in range(3)))
    into = plain(torch.zeros(3))
    load(agreed, 7, into)
    assert into.tensor.tolist() == [1, 1, 1]
    # Another shape on each rank.
    shapes = Catalogue(agreed, 7)
    assert isinstance(fill_of(plain(torch.zeros(1)), Leaf((), name="own"), shapes), Missing)
    assert fill_of(plain(torch.zeros(1)), Leaf((), name="own"), Catalogue(agreed, 2)) == (
        "float32 [1] here, float32 [3] saved"
    )


def test_a_hole_names_its_place() -> None:
    full = torch.arange(64.0).reshape(8, 8)
    shards = list(parts_of(full, (4,), [Shard(0)]))
    epoch = saved_by(items(shards[0]), items(shards[1]), {"x": 1}, items(shards[3]))
    why = fill_of(plain(full), LEAF, Catalogue(epoch, 0))
    assert isinstance(why, str)
    assert "does not cover" in why
    assert "[2, 8] at [4, 0]" in why
    assert take_of(LEAF, Catalogue(epoch, 0)) == why
    assert isinstance(fill_of(shards[1], LEAF, Catalogue(epoch, 9)), Fill)


@pytest.mark.parametrize("kind", ["replicas", "shards"])
def test_many_members_and_items_are_looked_up_quickly(kind: str) -> None:
    """A rank of eight looks for its part of all that 64 members saved."""
    items_each = 20_000 if kind == "replicas" else 3000
    known: dict[Any, Any] = {}
    columns = []
    for rank in range(64 if kind == "shards" else 1):
        specs = [
            ItemSpec(f"layers.{n}", ItemKind.TENSOR, "uint8", (2,), (128,), (2 * rank,), 2)
            if kind == "shards"
            else ItemSpec(f"layers.{n}", ItemKind.TENSOR, "uint8", (2,), (2,), (0,), 2)
            for n in range(items_each)
        ]
        columns.append(decode_stored_columns(encode_items(specs), "a table", known))
    refs = np.zeros(items_each, np.int64)
    epoch = saved_by()
    epoch.ranks = tuple(range(64))
    epoch.columns = lambda rank: columns[rank % len(columns)]
    epoch.member = lambda rank: MemberTable(rank, tuple(specs), b"", refs, 0)
    epoch.chunks = SimpleNamespace(lengths=np.full(1, 2))
    box = Box((16,), (16,)) if kind == "shards" else Box((0,), (2,))
    begin = time.process_time()
    catalogue = Catalogue(epoch, 64)
    count = 8 if kind == "shards" else 1
    for name in catalogue.names_of(0):
        assert len(catalogue.everyone(name, [box]).saved) == count
    assert time.process_time() - begin < 1.5


def test_elements_larger_than_a_chunk_are_read_whole_only(chunk_bytes: int) -> None:
    epoch = saved_by({"w": np.array(["a" * 300, "b"])})
    saved = Catalogue(epoch, 0).own("w")[0]
    if chunk_bytes < 1200:
        with pytest.raises(InvalidInput, match="whole"):
            overlap(saved.spec, Box((0,), (1,)))
    take = take_of(LEAF, Catalogue(epoch, 3))
    wants = Collector()
    get = collect_take(take, Catalogue(epoch, 3), wants)  # type: ignore[arg-type]
    epoch.fetch(None, (), None, wants.finish(), deadline=0, threads=1, epoch=1)
    assert get().tolist() == ["a" * 300, "b"]
    assert prod(get().shape) == 2
