"""Bit for bit: the final epochs of two stores, every item of every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import groupio
from groupio.format.codec import encode_plain

GROUPS = (("model", "weights"), ("optim", "optimizer"), ("rng", "RNG"))
"""The first part of an item's name, and what it is called in the report."""


@dataclass(slots=True)
class Comparison:
    """How many items and bytes were compared, by what they are, and which of them differ."""

    items: dict[str, int] = field(default_factory=dict)
    nbytes: dict[str, int] = field(default_factory=dict)
    different: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether something was compared, weights, optimizer and RNG among it, and all is equal."""
        return not self.different and all(self.items.get(word) for _, word in GROUPS)

    def summary(self) -> str:
        """One line: what was compared."""
        parts = [
            f"{word}: {count} items, {self.nbytes[word] / 1e6:.1f} MB"
            for word, count in self.items.items()
        ]
        return "; ".join(parts)


def compare(
    one: Path, other: Path, epoch: int, ranks: int, on_rank: Callable[[int], None]
) -> Comparison:
    """Load ``epoch`` of every rank from both stores (which verifies it) and compare the bytes."""
    result = Comparison()
    with_clients = [groupio.connect(str(path), rank=0, world_size=1) for path in (one, other)]
    try:
        for rank in range(ranks):
            on_rank(rank)
            first, second = (client.load(epoch, member=rank) for client in with_clients)
            for name in sorted(first.keys() ^ second.keys()):
                result.different.append(f"rank {rank}: {name} is in one run only")
            for name, value in _common(first, second):
                group = dict(GROUPS).get(name.partition(".")[0], "other")
                data = raw(value)
                result.items[group] = result.items.get(group, 0) + 1
                result.nbytes[group] = result.nbytes.get(group, 0) + data.nbytes
                if not same(value, second[name]):
                    result.different.append(f"rank {rank}: {name} differs")
    finally:
        for client in with_clients:
            client.close()
    return result


def same(one: Any, other: Any) -> bool:
    """Equal types, shapes, dtypes and bytes; NaNs and signed zeros count by their bits."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
    elif type(one) is not type(other):
        return False
    return bool(np.array_equal(raw(one), raw(other)))


def raw(value: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes of an array or of the encoded plain value: uint8[n]."""
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return np.frombuffer(encode_plain(value), np.uint8)


def _common(first: dict[str, Any], second: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in first.items() if name in second)
