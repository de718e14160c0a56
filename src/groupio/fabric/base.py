"""The interface of a fabric, by which chunks move between the memories of nodes.

The receiver pulls. It names chunks by digest and says where their bytes go; the serving side
looks them up in what it holds (its ``Provider``) and answers in the order in which it has them.
Nothing here is durable: a chunk that arrived is in memory, no more.

A pull never raises for what the peer did: each want has an outcome of its own, and the caller
asks another holder, or the store, for those that failed. Whole chunks are checked against their
BLAKE3 by the receiver, so a peer can refuse and delay, but never pass on wrong bytes. A part of
a chunk cannot be checked against the name of the chunk; the holder sends a digest of the part
along, which finds damage on the way. Ask for parts only from holders that verified the chunk.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from blake3 import blake3

from groupio.errors import InvalidInput
from groupio.fabric.pacing import Pacer
from groupio.model import CHUNK_BYTES, DIGEST_BYTES

MISSING = "missing"
"""The peer does not have the chunk, for this job, and does not expect it; or not in time."""

DIGEST = "digest"
"""The bytes that came are not those that the digest names; ``into`` holds garbage."""

RANGE = "range"
"""The peer's chunk of this digest has another length, or the part lies outside of it."""

DEADLINE = "deadline"
"""The deadline, which progress may have moved, passed before all bytes were here."""

LOST = "lost"
"""The peer cannot be reached, or broke the protocol."""

GONE = "gone"
"""The peer's machine answers, and its agent does not: it refused or closed the connection."""

REFUSED = "refused"
"""The peer, or this side, did not accept the other's key."""

CLOSED = "closed"
"""This fabric was closed."""

STOPPED = "stopped"
"""The caller ended the pull early."""

REASONS = (MISSING, DIGEST, RANGE, DEADLINE, LOST, GONE, REFUSED, CLOSED, STOPPED)
"""All values of ``Outcome.error`` of a failed want."""

JOB_BYTES_MAX = 255
"""The name of a job, in UTF-8, is at most this long."""


class Stop:
    """Ends pulls early: whoever waits in one is woken at once. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_set = False
        self._wakes: list[Callable[[], None]] = []

    @property
    def is_set(self) -> bool:
        """Whether ``set`` was called."""
        return self._is_set

    def set(self) -> None:
        """End what goes on, and what begins from now on; may be repeated."""
        with self._lock:
            self._is_set = True
            wakes, self._wakes = self._wakes, []
            for wake in wakes:
                wake()

    @contextmanager
    def waking(self, wake: Callable[[], None]) -> Iterator[None]:
        """``set`` calls ``wake`` once, within the context or never; at once if it was called."""
        with self._lock:
            if self._is_set:
                wake()
            else:
                self._wakes.append(wake)
        try:
            yield
        finally:
            with self._lock:
                if wake in self._wakes:
                    self._wakes.remove(wake)


class Want(NamedTuple):
    """One chunk, or a part of it, to bring here.

    ``digest`` names the whole chunk. ``offset`` and ``length`` are bytes within the chunk.
    ``into`` is writable memory of exactly ``length`` bytes; it belongs to the fabric until the
    pull returns. With ``whole`` the want is all of the chunk (``offset`` is 0) and its bytes are
    checked against ``digest``; without, it is a part.
    """

    digest: bytes
    offset: int
    length: int
    into: memoryview
    whole: bool = True


class Served(NamedTuple):
    """The bytes of a whole chunk, pinned until ``release`` is called, once, from any thread."""

    view: memoryview
    release: Callable[[], None]


class Provider(Protocol):
    """What a node holds, as the serving side asks for it; thread-safe.

    ``job`` scopes every lookup: only chunks of that job may be found.
    """

    def find(self, job: str, digest: bytes, wait_s: float) -> Served | None:
        """The chunk, verified, waiting up to ``wait_s`` seconds for one that is on its way here.

        None: it is not here now. Waits are short (milliseconds): the serving side asks again as
        long as ``expects`` says so.
        """

    def expects(self, job: str, digest: bytes) -> bool:
        """Whether the chunk is here or on its way here, so that asking again makes sense."""


class Outcome(NamedTuple):
    """How one want ended.

    ``ok``: ``into`` is filled and was verified. Else ``error`` is one of ``REASONS``. ``bytes``
    are those that came and count as good: ``length`` or 0.
    """

    ok: bool
    error: str
    bytes: int


class FabricFailed(ConnectionError):
    """A transfer that is no pull failed; ``reason`` is one of ``REASONS``.

    Internal: agents turn it into a note that the plan does without this fabric.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class Fabric(ABC):
    """Moves chunks between this node and its peers. All calls block and are thread-safe.

    Deadlines are values of ``time.monotonic()``, in seconds. ``pace`` is shared by all that this
    node sends and receives through the fabric; foreground intervals set its share.
    """

    name: str
    pace: Pacer

    @abstractmethod
    def trust(self, job: str, token: bytes) -> None:
        """Take connections of ``job`` from peers with this token only, and open them with it.

        It replaces the fabric's own token for that job, from the next connection on. Any thread.
        """

    @abstractmethod
    def serve(self, provider: Provider) -> str:
        """Serve what ``provider`` holds, until ``close``; the address to announce to peers.

        Called once. InvalidInput when the address may not be listened on without a token;
        OSError when it cannot be.
        """

    @abstractmethod
    def pull(
        self,
        address: str,
        job: str,
        wants: Sequence[Want],
        *,
        deadline: float,
        patience_s: float = 0.0,
        on_done: Callable[[int, Outcome], None] | None = None,
        stop: Stop | None = None,
    ) -> list[Outcome]:
        """Bring ``wants`` here from the peer at ``address``; their outcomes, in order.

        With ``patience_s`` the deadline is for a pull that stands still: whenever bytes come it
        moves to at least so many seconds from then, on links of 100 kB/s and more. Waits for the
        own pace count as progress.

        ``on_done(index, outcome)`` is told of each want as it ends, in any order and from any
        thread; it must be quick and must not raise. On return, at the latest shortly after the
        deadline or ``stop``, no thread touches the memory of a want any more. Many pulls may run
        at once, also from one peer. InvalidInput, before anything moves, for wants that no fabric
        takes.
        """

    @abstractmethod
    def probe(self, address: str, job: str, nbytes: int, deadline: float) -> float:
        """Bytes per second with which ``nbytes`` of nothing come from the peer, paced as others.

        FabricFailed when they do not all come before the deadline.
        """

    @abstractmethod
    def close(self) -> None:
        """End serving and all pulls (their wants fail as CLOSED or LOST); may be repeated.

        On return no thread of the fabric is left, and all that was served is released.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def failed(error: str) -> Outcome:
    """The outcome of a want that failed for this reason."""
    return Outcome(ok=False, error=error, bytes=0)


def check_wants(job: str, wants: Sequence[Want]) -> None:
    """InvalidInput for wants that no fabric takes; see ``Want``."""
    if not 0 < len(job.encode()) <= JOB_BYTES_MAX:
        raise InvalidInput(f"the job name {job!r} is empty or longer than {JOB_BYTES_MAX} bytes")
    for index, (digest, offset, length, into, whole) in enumerate(wants):
        if len(digest) != DIGEST_BYTES:
            raise InvalidInput(f"want {index} has a digest of {len(digest)} bytes, not 32")
        if offset < 0 or length < 0 or offset + length > CHUNK_BYTES or (whole and offset):
            raise InvalidInput(
                f"want {index} asks for {length} bytes at {offset}, which no chunk has; "
                f"chunks have at most {CHUNK_BYTES} bytes and whole ones start at 0"
            )
        if into.nbytes != length or into.readonly or not into.c_contiguous:
            raise InvalidInput(
                f"want {index} needs {length} bytes of contiguous writable memory, "
                f"not {into.nbytes} of another kind"
            )


def verified(want: Want, part_digest: bytes = b"") -> bool:
    """Whether ``want.into`` has the right bytes; ``part_digest`` is the holder's, for parts."""
    digest: bytes = blake3(want.into).digest()
    return digest == (want.digest if want.whole else part_digest)
