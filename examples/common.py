"""What the examples share: a tiny model, data by step, and a digest that proves a resume exact."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

WIDTH = 64


def tiny_model() -> nn.Module:
    """A model of a few thousand parameters with dropout, so that the RNG state matters."""
    return nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Dropout(0.1), nn.Linear(2 * WIDTH, WIDTH)
    )


def batch(step: int, rank: int) -> torch.Tensor:
    """The data of one step on one rank: the same in every run."""
    source = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, WIDTH, generator=source)


def digest(state: Mapping[str, Any]) -> str:
    """A hash of all tensors of a model's state dict, sharded ones put together."""
    total = hashlib.sha256()
    for name, value in sorted(state.items()):
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        total.update(name.encode() + whole.detach().contiguous().numpy().tobytes())
    return total.hexdigest()[:16]
