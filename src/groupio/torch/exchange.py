"""Moves bytes between ranks by operations of their process group, from the calling thread only.

The same code serves Gloo and the backends of accelerators, whose groups move device memory: there
the bytes pass through a tensor on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from groupio.errors import GroupAborted, Outcome

Bytes = npt.NDArray[np.uint8]

_DEVICES = {"nccl": "cuda", "hccl": "npu", "xccl": "xpu", "cncl": "mlu", "mccl": "musa"}
"""Backends that only move memory of this kind of device."""


class Mover:
    """Exchanges bytes with the other ranks of ``group`` (None: the world).

    All ranks call the same methods in the same order. GroupAborted when a rank is lost, or the
    group's own timeout has passed; then the group may be of no more use.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.backend = str(dist.get_backend(group))
        self._device = device_of(self.backend)
        self._peers = dist.get_process_group_ranks(group)

    def gather(self, mine: Bytes) -> list[Bytes]:
        """Everybody's bytes, by rank; all give equally many."""
        tensor = self._to_device(mine)
        gathered = [torch.empty_like(tensor, device=self._device) for _ in self._peers]
        try:
            dist.all_gather(gathered, tensor, group=self._group)
            return [_to_host(one) for one in gathered]
        except RuntimeError as error:
            raise _lost(error) from error

    def move(
        self, sends: Sequence[tuple[Bytes, Sequence[int]]], receives: Sequence[tuple[int, int]]
    ) -> list[Bytes]:
        """Send each of ``sends`` to its ranks, and receive from ranks so many bytes each.

        The other ranks of each transfer call this at the same time with its other end.
        """
        incoming = [
            torch.empty(nbytes, dtype=torch.uint8, device=self._device) for _, nbytes in receives
        ]
        operations = [
            dist.P2POp(dist.irecv, tensor, self._peers[rank], self._group)
            for tensor, (rank, _) in zip(incoming, receives, strict=True)
        ]
        for data, ranks in sends:
            tensor = self._to_device(data)
            operations += [
                dist.P2POp(dist.isend, tensor, self._peers[rank], self._group) for rank in ranks
            ]
        try:
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()
            return [_to_host(one) for one in incoming]
        except RuntimeError as error:
            raise _lost(error) from error

    def _to_device(self, data: Bytes) -> torch.Tensor:
        return torch.from_numpy(data).to(self._device)


def device_of(backend: str) -> torch.device:
    """The device whose memory a group with this backend moves."""
    # A group may have a backend for each kind of memory: "cpu:gloo,cuda:nccl".
    kinds = dict(part.split(":", 1) for part in backend.split(",") if ":" in part)
    kind = "cpu" if "cpu" in kinds else next(iter(kinds), _DEVICES.get(backend, "cpu"))
    if kind == "cpu":
        return torch.device("cpu")
    module: Any = getattr(torch, kind)
    return torch.device(kind, module.current_device())


def _to_host(tensor: torch.Tensor) -> Bytes:
    array: Bytes = tensor.cpu().numpy()
    return array


def _lost(error: RuntimeError) -> GroupAborted:
    first_line = (str(error).splitlines() or [""])[0]
    return GroupAborted(
        f"the ranks lost each other while they exchanged chunks ({first_line}); see which rank "
        "ended, then start the job again",
        outcome=Outcome.UNKNOWN,
    )
