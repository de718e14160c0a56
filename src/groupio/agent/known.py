"""Index of the chunks that the store has: the digests of the newest committed epochs.

Sorted arrays, not a dictionary: 58 bytes a chunk, and thousands of digests are looked up by one
call. A hit is only a hit when all 32 bytes and the length are equal. The arrays are all that is
kept of an epoch.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from groupio.errors import InvalidInput
from groupio.model import DIGEST_BYTES, ChunkTable, DecisionKey, EpochHeader, SegmentRef

EPOCHS_KEPT = 2
"""The index holds the chunks of this many epochs, those added last."""

REWRITE_AFTER_EPOCHS = 64
"""A segment that this many epochs referred to without a verification is not referred to again."""


@dataclass(frozen=True, slots=True)
class KnownIndex:
    """A fixed set of known chunks, ascending by ``prefix``.

    ``prefix`` uint64[n] (the first 8 bytes of the digest), ``digests`` uint8[n, 32], ``lengths``
    int32[n], ``offsets`` int64[n], ``segments`` int32[n] into ``refs``, ``epochs`` uint8[n] (whose
    entry it is, a number of :class:`KnownChunks`); ``alive`` bool[n] is the one array that changes:
    False once the chunk was found damaged.
    """

    prefix: npt.NDArray[np.uint64]
    digests: npt.NDArray[np.uint8]
    lengths: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    segments: npt.NDArray[np.int32]
    epochs: npt.NDArray[np.uint8]
    alive: npt.NDArray[np.bool_]
    refs: tuple[SegmentRef, ...]

    @property
    def nbytes(self) -> int:
        """The memory of the arrays, in bytes."""
        return sum(getattr(self, name).nbytes for name in _COLUMNS)

    def find(
        self, digests: npt.NDArray[np.uint8], lengths: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """The row of each chunk (``digests`` uint8[m, 32], ``lengths`` int64[m]), -1 if unknown."""
        rows = np.full(len(digests), -1, np.int64)
        if not len(self.prefix):
            return rows
        prefix = prefixes(digests)
        at = np.searchsorted(self.prefix, prefix)
        open_ = np.arange(len(digests))
        # More than one round only where two digests share their first 8 bytes.
        while True:
            open_ = open_[at[open_] < len(self.prefix)]
            open_ = open_[self.prefix[at[open_]] == prefix[open_]]
            if not len(open_):
                return rows
            candidates = at[open_]
            equal = (self.digests[candidates] == digests[open_]).all(axis=1)
            equal &= (self.lengths[candidates] == lengths[open_]) & self.alive[candidates]
            rows[open_[equal]] = candidates[equal]
            open_ = open_[~equal]
            at[open_] += 1


_COLUMNS = ("prefix", "digests", "lengths", "offsets", "segments", "epochs", "alive")


class Epoch(Protocol):
    """The part of a manifest that the index is built from: a Manifest, or a reader of one."""

    @property
    def header(self) -> EpochHeader:
        """Whose epoch it is."""
        ...

    @property
    def segments(self) -> tuple[SegmentRef, ...]:
        """The segments that it uses."""
        ...

    @property
    def chunks(self) -> ChunkTable:
        """Its chunks, all in these segments."""
        ...


class KnownChunks:
    """The index over the epochs added last, of one store. Thread-safe."""

    def __init__(
        self,
        *,
        epochs_kept: int = EPOCHS_KEPT,
        rewrite_after_epochs: int = REWRITE_AFTER_EPOCHS,
    ) -> None:
        self._epochs_kept = epochs_kept
        self._rewrite_after = rewrite_after_epochs
        self._lock = threading.Lock()
        self._store_id: str | None = None
        self._epochs: dict[DecisionKey, int] = {}
        """The numbers of the epochs in the index, those added last at the end."""
        self._index = _nothing()

    @property
    def index(self) -> KnownIndex:
        """What is known now; a job keeps using the one that it started with."""
        return self._index

    def add_epoch(self, epoch: Epoch) -> None:
        """Add a committed epoch; an epoch of another store replaces everything known.

        Where ``epoch`` is a reader, what it raises passes through and nothing has changed.
        """
        header, segments, chunks = epoch.header, epoch.segments, epoch.chunks
        key = DecisionKey(header.lineage, header.epoch, header.attempt)
        with self._lock:
            if header.store_id != self._store_id:
                self._epochs.clear()
                self._store_id = header.store_id
            self._epochs.pop(key, None)
            while len(self._epochs) >= self._epochs_kept:
                del self._epochs[next(iter(self._epochs))]
            kept = np.zeros(self._epochs_kept, np.bool_)
            kept[list(self._epochs.values())] = True
            self._epochs[key] = number = int(np.flatnonzero(~kept)[0])
            old = self._index
            dead = old.digests[~old.alive]
            young = [ref.age < self._rewrite_after for ref in segments]
            self._index = _join(segments, chunks, young, number, old, kept[old.epochs])
            # A chunk that this epoch wrote anew is sound again, whatever was known of it.
            self._bury(dead, spare={segment.name for segment in segments if segment.own})

    def discard(self, digest: bytes) -> None:
        """The chunk was found damaged: the next save writes it anew, running jobs too.

        InvalidInput when ``digest`` is not 32 bytes.
        """
        with self._lock:
            self._bury(_as_row(digest), spare=set())

    def lookup(self, digest: bytes, length: int) -> tuple[SegmentRef, int] | None:
        """The segment that has the chunk and the offset in it; None when it is not known."""
        index = self._index
        row = int(index.find(_as_row(digest), np.array([length], np.int64))[0])
        if row < 0:
            return None
        return index.refs[index.segments[row]], int(index.offsets[row])

    def _bury(self, digests: npt.NDArray[np.uint8], spare: set[str]) -> None:
        index = self._index
        spared = np.array([ref.name in spare for ref in index.refs], np.bool_)
        for digest, prefix in zip(digests, prefixes(digests), strict=True):
            lo = int(np.searchsorted(index.prefix, prefix))
            hi = int(np.searchsorted(index.prefix, prefix, side="right"))
            same = (index.digests[lo:hi] == digest).all(axis=1)
            index.alive[lo:hi][same & ~spared[index.segments[lo:hi]]] = False


def _as_row(digest: bytes) -> npt.NDArray[np.uint8]:
    if len(digest) != DIGEST_BYTES:
        raise InvalidInput(f"a chunk digest has {DIGEST_BYTES} bytes, not {len(digest)}")
    return np.frombuffer(digest, np.uint8).reshape(1, DIGEST_BYTES)


def prefixes(digests: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """The first 8 bytes of each digest (uint8[n, 32]), uint64[n]."""
    whole = np.ascontiguousarray(digests).view(np.uint64).reshape(len(digests), DIGEST_BYTES // 8)
    return np.ascontiguousarray(whole[:, 0])


def _nothing() -> KnownIndex:
    return KnownIndex(
        prefix=np.empty(0, np.uint64),
        digests=np.empty((0, DIGEST_BYTES), np.uint8),
        lengths=np.empty(0, np.int32),
        offsets=np.empty(0, np.int64),
        segments=np.empty(0, np.int32),
        epochs=np.empty(0, np.uint8),
        alive=np.empty(0, np.bool_),
        refs=(),
    )


def _join(
    segments: Sequence[SegmentRef],
    chunks: ChunkTable,
    young: Sequence[bool],
    number: int,
    old: KnownIndex,
    kept: npt.NDArray[np.bool_],
) -> KnownIndex:
    """The index over the chunks in ``young`` segments of epoch ``number``, and the rows ``kept``
    of ``old``; a chunk that is in both has the entry of the epoch."""
    refs = {
        ref.name: SegmentRef(ref.name, ref.bytes, own=False, age=ref.age)
        for ref, is_young in zip(segments, young, strict=True)
        if is_young
    }
    for i in np.unique(old.segments[kept]).tolist():
        refs.setdefault(old.refs[i].name, old.refs[i])
    numbers = {name: i for i, name in enumerate(refs)}
    fresh = np.array([numbers.get(ref.name, -1) for ref in segments], np.int32)
    stale = np.array([numbers.get(ref.name, -1) for ref in old.refs], np.int32)
    rows = np.array(young, np.bool_)[chunks.segments]

    digests = np.concatenate((chunks.digests[rows], old.digests[kept]))
    order = np.argsort(prefixes(digests), kind="stable")
    digests = digests[order]
    whole = digests.view(np.uint64)
    first = np.ones(len(order), np.bool_)
    first[1:] = (whole[1:] != whole[:-1]).any(axis=1)
    order, digests = order[first], digests[first]

    def column(new: npt.NDArray[Any], before: npt.NDArray[Any]) -> npt.NDArray[Any]:
        joined: npt.NDArray[Any] = np.concatenate(
            (new[rows].astype(before.dtype, copy=False), before[kept])
        )[order]
        return joined

    return KnownIndex(
        prefix=prefixes(digests),
        digests=digests,
        lengths=column(chunks.lengths, old.lengths),
        offsets=column(chunks.offsets, old.offsets),
        segments=column(fresh[chunks.segments], stale[old.segments]),
        epochs=column(np.full(len(rows), number, np.uint8), old.epochs),
        alive=np.ones(len(order), np.bool_),
        refs=tuple(refs.values()),
    )
