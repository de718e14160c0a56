"""The memory that a load fills: tensors of the caller, and new values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from groupio.client.parts import Parts
from groupio.client.wants import Collector
from groupio.format.codec import Converted, decode_plain
from groupio.format.dtypes import dtype_from_name
from groupio.format.structure import Branch, Leaf, rebuild
from groupio.model import ItemKind
from groupio.plan.read import Box
from groupio.torch.sourcing import CACHED, Fill, Read, Take
from groupio.torch.tensors import as_integers

_IN_NUMPY = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.uint8}
)
"""Dtypes that numpy knows, the usual ones of many."""

Finish = Callable[[], Any]
"""Called when all bytes are there; returns the value."""


def collect_fills(fills: Iterable[Fill], parts: Parts, wants: Collector) -> list[Finish]:
    """Add to ``wants`` what the tensors are filled with.

    Tensors in host memory are filled directly, whatever their strides; the calls returned bring
    the others to their devices.
    """
    finishes: list[Finish] = []
    for fill in fills:
        array, finish = _place(fill.local.tensor)
        if finish is not None and fill.reads:
            finishes.append(finish)
        for read in fill.reads:
            piece = fill.local.pieces[read.piece]
            _collect(read, piece.box, array[piece.local] if piece.local else array, parts, wants)
    return finishes


def collect_take(
    take: Take, parts: Parts, wants: Collector, converted: list[Converted] | None = None
) -> Finish:
    """Add to ``wants`` a new value; the call gives it.

    It adds to ``converted`` the containers that were of an unknown class.
    """
    spec = take.spec
    if spec.kind is not ItemKind.TENSOR:
        data = bytearray(spec.nbytes)
        wants.add_whole(spec, parts.rows(take.reads[0].saved), memoryview(data))
        return lambda: decode_plain(data, converted) if spec.kind is ItemKind.PLAIN else bytes(data)
    value: Any
    if spec.origin == "torch":
        value = torch.empty(spec.global_shape, dtype=getattr(torch, spec.dtype), device="cpu")
        array = as_integers(value).numpy()
    else:
        value = array = np.empty(spec.global_shape, dtype_from_name(spec.dtype))
    whole = Box((0,) * len(spec.global_shape), spec.global_shape)
    for read in take.reads:
        _collect(read, whole, array, parts, wants)
    return lambda: value


def take(node: Branch | Leaf, values: dict[str, Any]) -> Any:
    """The nested value of a saved node, from the values of its items."""

    def value_of(leaf: Leaf) -> Any:
        value = values[leaf.name]
        return value.view(getattr(torch, leaf.note)) if leaf.note else value

    return rebuild(node, value_of)


def _collect(
    read: Read, held: Box, array: np.ndarray[Any, Any], parts: Parts, wants: Collector
) -> None:
    """``array`` holds the box ``held`` of the tensor; the read fills a part of it."""
    if read.box != held:
        array = array[_slices(read.box, held)]
    wants.add_box(read.saved.spec, parts.rows(read.saved), read.box, array)


@lru_cache(CACHED)
def _slices(box: Box, held: Box) -> tuple[slice, ...]:
    """Where ``box`` is in an array that holds the box ``held``."""
    corner = zip(box.offsets, held.offsets, box.shape, strict=True)
    return tuple(slice(lo - at, lo - at + size) for lo, at, size in corner)


def _place(tensor: torch.Tensor) -> tuple[np.ndarray[Any, Any], Finish | None]:
    """Host memory for a tensor, and how it gets from there to the tensor (None: it is there)."""
    if tensor.is_cpu and not tensor.is_conj() and not tensor.is_neg():
        known = tensor if tensor.dtype in _IN_NUMPY else as_integers(tensor)
        array: np.ndarray[Any, Any] = known.numpy()
        return array, None
    temporary = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="cpu")
    return as_integers(temporary).numpy(), lambda: tensor.copy_(temporary)
