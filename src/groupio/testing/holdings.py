"""Chunks in plain memory for tests of fabrics, some of them still to come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from blake3 import blake3

from groupio.fabric.base import Served, Want

JOB = "job"
TOKEN = b"the token of the suite"
MIB = 1 << 20


class Holdings:
    """A provider for tests: chunks of one job in plain memory, some of them still to come."""

    def __init__(self, job: str = JOB) -> None:
        self.job = job
        self.pinned = 0
        self.asked: list[tuple[str, bytes]] = []
        self._chunks: dict[bytes, bytes] = {}
        self._expected: set[bytes] = set()
        self._changed = threading.Condition()

    def put(self, data: bytes, digest: bytes | None = None) -> bytes:
        """Hold ``data``, maybe under the wrong ``digest``; its digest."""
        name: bytes = digest or blake3(data).digest()
        with self._changed:
            self._chunks[name] = data
            self._expected.discard(name)
            self._changed.notify_all()
        return name

    def expect(self, digest: bytes) -> None:
        """From now on the chunk is on its way here."""
        self._expected.add(digest)

    def give_up(self, digest: bytes) -> None:
        """The chunk does not come after all."""
        with self._changed:
            self._expected.discard(digest)
            self._changed.notify_all()

    def find(self, job: str, digest: bytes, wait_s: float) -> Served | None:
        """See ``Provider``."""
        with self._changed:
            self.asked.append((job, digest))
            if job != self.job:
                return None
            if wait_s and digest in self._expected:
                self._changed.wait(wait_s)
            data = self._chunks.get(digest)
            if data is None:
                return None
            self.pinned += 1
        return Served(memoryview(data), self._release)

    def expects(self, job: str, digest: bytes) -> bool:
        """See ``Provider``."""
        return job == self.job and (digest in self._chunks or digest in self._expected)

    def _release(self) -> None:
        with self._changed:
            self.pinned -= 1


def want(digest: bytes, length: int, offset: int = 0, *, whole: bool = True) -> Want:
    """A want with memory of its own, filled with 0xEE."""
    return Want(digest, offset, length, memoryview(bytearray(b"\xee") * length), whole)


def soon(seconds: float = 30.0) -> float:
    """The deadline in so many seconds."""
    return time.monotonic() + seconds


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait until ``condition`` holds; fail when it does not in time."""
    deadline = soon(seconds)
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)
