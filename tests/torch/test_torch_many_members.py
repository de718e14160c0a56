"""Many members and many alike tensors: what is found is what a search one by one finds."""

from __future__ import annotations

import gc
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch_epochs import saved_by

from groupio.client import parts
from groupio.client.collection import collection_paused
from groupio.client.parts import Catalogue
from groupio.client.values import Part
from groupio.client.wants import Collector
from groupio.format.structure import Leaf
from groupio.plan.read import Box, common
from groupio.torch.placing import Piece
from groupio.torch.sourcing import Fill, fill_of
from groupio.torch.taking import collect_fills
from groupio.torch.tensors import Local

MEMBERS = 10
SHAPES = ((20, 3), (20, 3), (40,), (3, 20), (10, 2, 2))


def _items(rank: int) -> dict[str, Any]:
    """Shards along the dimension that divides, of several shapes and dtypes, and other values."""
    items: dict[str, Any] = {"scalar": np.float32(7), "text": "x" * (rank + 1)}
    for number in range(40):
        shape = SHAPES[number % len(SHAPES)]
        dtype = (np.float32, np.int16)[number % 3 == 0]
        whole = np.arange(np.prod(shape)).reshape(shape).astype(dtype) + number
        dim = next(d for d, n in enumerate(shape) if n % MEMBERS == 0)
        size = shape[dim] // MEMBERS
        at = tuple(
            slice(rank * size, (rank + 1) * size) if d == dim else slice(None)
            for d in range(len(shape))
        )
        corner = tuple(rank * size if d == dim else 0 for d in range(len(shape)))
        items[f"layer.{number}.w"] = Part(np.ascontiguousarray(whole[at]), shape, corner)
    return items


@pytest.fixture(scope="module")
def epoch() -> Any:
    return saved_by(*map(_items, range(MEMBERS)))


def _boxes(shape: tuple[int, ...], chance: random.Random) -> list[Box]:
    lo = [chance.randrange(n) for n in shape]
    return [Box(tuple(lo), tuple(chance.randint(1, n - a) for a, n in zip(lo, shape, strict=True)))]


def test_the_members_that_have_a_box_are_found(epoch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_KEYS", 7)
    chance = random.Random(5)
    catalogue = Catalogue(epoch, 3)
    for _ in range(8):
        for number in range(40):
            name = f"layer.{number}.w"
            boxes = _boxes(SHAPES[number % len(SHAPES)], chance)
            found = catalogue.everyone(name, boxes)
            assert not found.differs
            expected = {}
            for rank in range(MEMBERS):
                spec = next(s for s in epoch.member(rank).items if s.name == name)
                if common(Box(spec.offsets, spec.shape), boxes[0]):
                    expected[rank] = spec
            assert {one.rank: one.spec for one in found.saved} == expected


def test_values_that_differ_are_seen_among_many_members(epoch: Any) -> None:
    assert Catalogue(epoch, MEMBERS).everyone("text").differs
    assert not Catalogue(epoch, MEMBERS).everyone("scalar").differs
    assert Catalogue(epoch, 2).own("text")[0].spec.nbytes > 0
    assert Catalogue(epoch, MEMBERS).own("text") == ()


def test_parts_of_many_members_are_put_together(epoch: Any) -> None:
    chance = random.Random(6)
    catalogue, wants, fills, expected = Catalogue(epoch, 4), Collector(), [], []
    for number in range(40):
        shape = SHAPES[number % len(SHAPES)]
        dtype = (torch.float32, torch.int16)[number % 3 == 0]
        box = _boxes(shape, chance)[0]
        local = Local(torch.zeros(box.shape, dtype=dtype), shape, (Piece(box, ()),))
        fill = fill_of(local, Leaf((), name=f"layer.{number}.w"), catalogue)
        assert isinstance(fill, Fill)
        fills.append(fill)
        whole = np.arange(np.prod(shape)).reshape(shape) + number
        at = tuple(slice(a, a + n) for a, n in zip(*box, strict=True))
        expected.append(torch.from_numpy(whole[at].copy()).to(dtype))
    assert collect_fills(fills, catalogue, wants) == []
    epoch.fetch(None, (), epoch.chunks, wants.finish(), deadline=0, threads=1, epoch=1)
    for fill, content in zip(fills, expected, strict=True):
        assert torch.equal(fill.local.tensor, content)


def test_the_collector_is_as_it_was_after_a_pause() -> None:
    assert gc.isenabled()
    with collection_paused():
        with collection_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ValueError, match="out"), collection_paused():
        raise ValueError("out")
    assert gc.isenabled()
    gc.disable()
    try:
        with collection_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
