"""The Mooncake Transfer Engine of this process, and the memory that it may touch.

The engine gives any memory that is registered with it to whoever knows its address, and its own
ports ask nobody for a key. So it gets a window of its own and never an arena: half of its slots
hold what is about to be read by peers, the other half what comes from them. Registered once, the
window also costs no pinning of memory for each chunk.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from groupio.errors import InvalidInput
from groupio.model import CHUNK_BYTES

SLOT_BYTES = CHUNK_BYTES
"""A slot holds any one chunk, or many small ones."""

SLOTS = 8
"""Slots for each direction, at most: 64 MiB for both."""

WINDOW_SHARE = 16
"""The window takes at most one part in so many of the agent's memory budget, or two slots."""

_LOOK_S = (50e-6, 1e-3)
_CHECK_S = 0.1
_PENDING = 0
_DONE = 1


def slots_of(budget: int) -> int:
    """Slots for each direction of an agent that has ``budget`` bytes for everything."""
    return min(max(budget // WINDOW_SHARE // window_bytes(1), 1), SLOTS)


def window_bytes(slots: int) -> int:
    """The memory of so many slots for each direction, in bytes."""
    return 2 * slots * SLOT_BYTES


class Slot(NamedTuple):
    """A part of the window: its address in this process and its memory, SLOT_BYTES."""

    address: int
    view: memoryview


class Slots:
    """Slots that are taken and given back. Thread-safe."""

    def __init__(self, slots: list[Slot]) -> None:
        self._free = slots
        self._changed = threading.Condition()

    def take(self, deadline: float, stopped: Callable[[], bool]) -> Slot:
        """A slot with arbitrary content. TimeoutError past the deadline, ConnectionError when
        ``stopped``."""
        with self._changed:
            while not self._free:
                _check(deadline, stopped)
                self._changed.wait(min(max(deadline - time.monotonic(), 0.0), _CHECK_S))
            return self._free.pop()

    def give(self, slot: Slot) -> None:
        """Nobody uses this slot any more."""
        with self._changed:
            self._free.append(slot)
            self._changed.notify()


class Engine:
    """A transfer engine and its window. ``session`` is the name by which peers reach it.

    With RDMA devices the engine uses them, else TCP. All methods are thread-safe and block.
    """

    def __init__(self, host: str, slots: int = SLOTS) -> None:
        """``host`` is the address of this node that peers use.

        ModuleNotFoundError without the package, InvalidInput without a library that it needs,
        OSError when the engine does not start.
        """
        self._engine: Any = _new_engine(host)
        port = self._engine.get_rpc_port()
        self.session = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        window = mmap.mmap(-1, window_bytes(slots), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._window = np.frombuffer(window, np.uint8)
        base = self._window.ctypes.data
        if self._engine.register_memory(base, len(self._window)):
            raise OSError(f"the transfer engine cannot register {len(self._window)} bytes")
        parts = [
            Slot(base + at, memoryview(window)[at : at + SLOT_BYTES])
            for at in range(0, len(window), SLOT_BYTES)
        ]
        self.serving = Slots(parts[:slots])
        self._receiving = Slots(parts[slots:])
        # Opening a new peer waits for it as long as the engine likes, and all others with it.
        self._submitting = ThreadPoolExecutor(1, "mooncake")
        self._lock = threading.Lock()
        self._abandoned: list[tuple[int, Slot]] = []
        """Transfers that nobody waits for, and the slots that they may still write to."""

    @contextmanager
    def fetched(
        self,
        session: str,
        address: int,
        nbytes: int,
        deadline: float,
        stopped: Callable[[], bool],
    ) -> Iterator[memoryview]:
        """``nbytes`` bytes (1 to SLOT_BYTES) from ``address`` of a peer, within the context.

        They are not checked in any way. ConnectionError when the engine cannot get them,
        TimeoutError past the deadline; then the memory is used again only when the engine has
        ended the transfer.
        """
        self._collect()
        slot = self._receiving.take(deadline, stopped)
        batch = self._submit(session, address, slot, nbytes, deadline, stopped)
        if batch == 0:
            self._receiving.give(slot)
            raise ConnectionError("the peer's engine cannot be reached")
        try:
            status = self._wait(batch, deadline, stopped)
        except OSError:
            with self._lock:
                self._abandoned.append((batch, slot))
            raise
        try:
            if status != _DONE:
                raise ConnectionError("the peer's engine did not give its bytes")
            yield slot.view[:nbytes]
        finally:
            self._receiving.give(slot)

    def close(self) -> None:
        """End the engine and all its transfers; takes about a second. May be repeated."""
        self._submitting.shutdown(wait=True, cancel_futures=True)
        self._engine = None  # before the window goes, which it may write to until then

    def _submit(
        self,
        session: str,
        address: int,
        slot: Slot,
        nbytes: int,
        deadline: float,
        stopped: Callable[[], bool],
    ) -> int:
        """Start a transfer; its number, 0 when it could not begin."""
        work: Future[int] = self._submitting.submit(
            self._engine.batch_transfer_async_read, session, [slot.address], [address], [nbytes]
        )
        while not wait([work], min(max(deadline - time.monotonic(), 0.0), _CHECK_S)).done:
            try:
                _check(deadline, stopped)
            except OSError:
                if work.cancel():
                    self._receiving.give(slot)
                else:
                    work.add_done_callback(lambda late: self._began_late(late, slot))
                raise
        return work.result()

    def _began_late(self, work: Future[int], slot: Slot) -> None:
        with self._lock:
            self._abandoned.append((work.result(), slot))

    def _wait(self, batch: int, deadline: float, stopped: Callable[[], bool]) -> int:
        pause_s, longest_s = _LOOK_S
        while (status := int(self._engine.transfer_check_status(batch))) == _PENDING:
            _check(deadline, stopped)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)
        return status

    def _collect(self) -> None:
        """Use the slots of abandoned transfers again that have ended by now."""
        with self._lock:
            abandoned, self._abandoned = self._abandoned, []
            for batch, slot in abandoned:
                if batch and self._engine.transfer_check_status(batch) == _PENDING:
                    self._abandoned.append((batch, slot))
                else:
                    self._receiving.give(slot)


def _check(deadline: float, stopped: Callable[[], bool]) -> None:
    if stopped():
        raise ConnectionAbortedError("the pull was ended")
    if time.monotonic() >= deadline:
        raise TimeoutError("the deadline has passed")


def _new_engine(host: str) -> Any:
    try:
        from mooncake.engine import TransferEngine
    except ModuleNotFoundError:
        raise
    except ImportError as error:
        raise InvalidInput(
            f"the Mooncake Transfer Engine cannot be loaded ({error}); install that library, such "
            "as with: apt-get install libibverbs1"
        ) from error
    engine = TransferEngine()
    if engine.initialize(host, "P2PHANDSHAKE", "tcp", ""):
        raise OSError(f"the transfer engine does not start at {host}; the log has its reasons")
    return engine
