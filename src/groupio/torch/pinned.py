"""CUDA tensors straight into the arena: its mappings are pinned once, copies run on a side stream.

A mapping of the arena is registered with the driver when the first CUDA tensor is copied into it,
and unregistered right before it is unmapped. Where the driver refuses (a limit on locked memory)
copies still work, pageable and slower, and a warning says so. ROCm has the same interface.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from groupio.client.arena import Lease, lease_at
from groupio.client.sources import DEVICE_COPIES

log = logging.getLogger("groupio.torch")


class Pins:
    """The mappings that are registered with the driver. Thread-safe.

    ``register(address, size)`` and ``unregister(address)`` return 0 or an error of the driver.
    """

    def __init__(
        self, register: Callable[[int, int], int], unregister: Callable[[int], int]
    ) -> None:
        self._register = register
        self._unregister = unregister
        self._lock = threading.Lock()
        self._known: weakref.WeakSet[Lease] = weakref.WeakSet()
        self._pid = os.getpid()

    def pin(self, lease: Lease) -> None:
        """Register the whole mapping, the first time that it is seen."""
        with self._lock:
            if lease in self._known:
                return
            self._known.add(lease)
            error = self._register(lease.address, lease.size)
            if error:
                log.warning(
                    "the driver does not pin %d bytes of the staging memory (error %d; see "
                    "ulimit -l): saves of accelerator tensors are slower",
                    lease.size,
                    error,
                )
                return
            # Runs while the memory is still mapped: a finalizer comes before the object's parts.
            unpin = weakref.finalize(lease, self._unpin, lease.address)
            unpin.atexit = False  # the driver may be gone by then

    def _unpin(self, address: int) -> None:
        # A forked child has the object, but neither the memory nor the driver.
        if os.getpid() == self._pid:
            error = self._unregister(address)
            if error:
                log.warning("the driver does not unpin staging memory (error %d)", error)


class CudaCopies:
    """How CUDA tensors are copied: each device has a stream of its own for it."""

    def __init__(self, pins: Pins) -> None:
        self._pins = pins
        self._streams: dict[int, Any] = {}

    @contextmanager
    def __call__(self, tensor: torch.Tensor, address: int, size: int) -> Iterator[None]:
        """What is copied inside is what the current stream has computed by now."""
        lease = lease_at(address)
        if lease is not None:
            self._pins.pin(lease)
        index = tensor.device.index
        stream = self._streams.get(index)
        if stream is None:
            stream = self._streams[index] = _cuda.Stream(index)
        stream.wait_stream(torch.cuda.current_stream(index))
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            # The lease is handed over after this: nothing may still be on its way into it.
            stream.synchronize()


_cuda: Any = torch.cuda  # parts of it have no type annotations


def _register(address: int, size: int) -> int:
    return int(_cuda.cudart().cudaHostRegister(address, size, 0))


def _unregister(address: int) -> int:
    return int(_cuda.cudart().cudaHostUnregister(address))


def install() -> None:
    """Make the client copy CUDA tensors this way. Needs no device: nothing is opened before."""
    DEVICE_COPIES["cuda"] = CudaCopies(Pins(_register, _unregister))
