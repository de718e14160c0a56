"""The tensors that are saved: the same for every system, from (shape, rank, epoch) alone.

The tensors of a rank lie in one anonymous mapping, each with a storage of its own, so that a whole
state is filled, copied and compared in large pieces.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from groupio.bench.options import TINY_BYTES, TINY_TENSORS, Options

MIB = 1 << 20
_PIECE = 8 * MIB
_CHANGED_SHARE = 50
"""Of the bytes of shape "lora" every fiftieth, 2 %, changes between epochs."""


class Slot(NamedTuple):
    """One tensor of a rank: its place in the mapping; ``fixed`` ones never change."""

    name: str
    dtype: torch.dtype
    offset: int
    nbytes: int
    fixed: bool = False


def slots_of(shape: str, nbytes: int) -> list[Slot]:
    """The tensors of one rank, fixed ones first: an embedding, then layers of mixed sizes."""
    if shape == "tiny":
        return _placed([(f"tiny.{i:05}", TINY_BYTES, False) for i in range(TINY_TENSORS)])
    if shape != "lora":
        return _placed(list(_layers("model", nbytes, False)))
    adapters = _even(nbytes // _CHANGED_SHARE)
    each = _even(min(256 << 10, max(64, adapters // 8)))
    parts = [each] * (adapters // each)
    parts[-1] += adapters - sum(parts)
    base = list(_layers("base", nbytes - adapters, True))
    return _placed(base + [(f"adapter.{i}", size, False) for i, size in enumerate(parts)])


def _even(nbytes: int) -> int:
    return max(64, nbytes // 64 * 64)


def _layers(prefix: str, nbytes: int, fixed: bool) -> Iterator[tuple[str, int, bool]]:
    largest = _even(min(64 * MIB, nbytes // 8))
    unit = _even(min(2 * MIB, max(4096, largest // 32)))
    yield f"{prefix}.embedding", largest, fixed
    left, layer = nbytes - largest, 0
    large = [*(("attention." + c, unit) for c in "qkvo")]
    large += [("mlp." + name, _even(unit * 11 // 4)) for name in ("gate", "up", "down")]
    small = [(f"norm.{i}", _even(unit // 256)) for i in range(2)] + [("bias", _even(unit // 512))]
    while left:
        for name, size in large + small:
            size = min(size, left)
            if size:
                yield f"{prefix}.layers.{layer}.{name}", size, fixed
            left -= size
        layer += 1


def _placed(parts: list[tuple[str, int, bool]]) -> list[Slot]:
    slots, offset = [], 0
    for number, (name, nbytes, fixed) in enumerate(parts):
        dtype = torch.bfloat16 if number % 3 == 1 else torch.float32
        slots.append(Slot(name, dtype, offset, nbytes, fixed))
        offset += nbytes
    return slots


class Content:
    """The bytes of any rank's tensors in any epoch."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.slots = slots_of(options.shape, options.bytes_per_rank)
        self.nbytes = self.slots[-1].offset + self.slots[-1].nbytes
        self.fixed_bytes = sum(slot.nbytes for slot in self.slots if slot.fixed)

    @property
    def differs_by_rank(self) -> bool:
        """Whether each rank has tensors of its own; else all hold the same."""
        return self.options.shape in ("fsdp", "lora")

    def fill(self, into: np.ndarray[Any, Any], rank: int, epoch: int) -> None:
        """Write the tensors of ``rank`` in ``epoch`` into ``into``, uint8[nbytes]."""
        rank = rank if self.differs_by_rank else 0
        if self.fixed_bytes:
            _fill(into[: self.fixed_bytes], (rank, 0))
        _fill(into[self.fixed_bytes :], (rank, epoch))

    def new_bytes(self, epoch: int) -> int:
        """Bytes of ``epoch`` that no other rank and no earlier epoch holds too."""
        size = self.nbytes if epoch == 1 else self.nbytes - self.fixed_bytes
        return size * (self.options.ranks if self.differs_by_rank else 1)


def _fill(into: np.ndarray[Any, Any], seed: tuple[int, int]) -> None:
    random = np.random.Generator(np.random.SFC64(seed))
    for at in range(0, len(into), _PIECE):
        part = into[at : at + _PIECE]
        words = random.integers(0, 1 << 64, (len(part) + 7) // 8, dtype=np.uint64)
        part[:] = words.view(np.uint8)[: len(part)]


class State:
    """The tensors of this rank: as it saved them, or each whole for another number of ranks.

    ``tensors`` are plain local tensors by name; ``state_dict`` is what a distributed saver gets:
    the same memory as DTensors where the ranks differ.
    """

    def __init__(self, content: Content, rank: int, *, whole: bool = False) -> None:
        self.content = content
        self.whole = whole
        self._rank = rank
        self._copies = content.options.ranks if whole and content.differs_by_rank else 1
        self.nbytes = content.nbytes * self._copies
        self._mapping = mmap.mmap(-1, self.nbytes)
        self.region = np.frombuffer(self._mapping, np.uint8)
        self.region[::4096] = 1  # touch every page
        self.tensors = {slot.name: self._tensor(slot) for slot in content.slots}
        self.state_dict: dict[str, Any] = dict(self.tensors)
        if content.differs_by_rank and not whole:
            mesh = init_device_mesh("cpu", (content.options.ranks,))
            self.state_dict = {
                name: DTensor.from_local(tensor, mesh, [Shard(0)], run_check=False)
                for name, tensor in self.tensors.items()
            }

    def _tensor(self, slot: Slot) -> torch.Tensor:
        count = slot.nbytes * self._copies // slot.dtype.itemsize
        flat = torch.frombuffer(
            self._mapping, dtype=slot.dtype, count=count, offset=slot.offset * self._copies
        )
        columns = 1024 if slot.nbytes % (1024 * slot.dtype.itemsize) == 0 else 1
        return flat.view(-1, columns) if columns > 1 else flat

    def fill(self, epoch: int) -> None:
        """Let the tensors have the bytes of ``epoch``; only for tensors as saved."""
        self.content.fill(self.region, self._rank, epoch)

    def wipe(self) -> None:
        """Set every byte to zero."""
        self.region[:] = 0

    def differences(self, epoch: int) -> list[str]:
        """Names of tensors whose bytes are not those of ``epoch``."""
        content, wrong = self.content, set()
        expected = np.empty(content.nbytes, np.uint8)
        for copy in range(self._copies):
            content.fill(expected, copy if self.whole else self._rank, epoch)
            for slot in content.slots:
                start = slot.offset * self._copies + copy * slot.nbytes
                found = self.region[start : start + slot.nbytes]
                if not np.array_equal(found, expected[slot.offset : slot.offset + slot.nbytes]):
                    wrong.add(slot.name)
        return sorted(wrong)
