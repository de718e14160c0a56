"""Which chunks the store has already: the digests of the newest committed epochs.

Sorted arrays, not a dictionary: 80 bytes a chunk, and thousands of digests are looked up by one
call. A hit is only a hit when all 32 bytes and the length are equal.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from groupio.errors import InvalidInput
from groupio.model import DIGEST_BYTES, ChunkTable, DecisionKey, Manifest, SegmentRef

EPOCHS_KEPT = 2
"""The index holds the chunks of this many epochs, those added last."""

REWRITE_AFTER_EPOCHS = 64
"""A segment that this many epochs referred to without a verification is not referred to again."""


@dataclass(frozen=True, slots=True)
class KnownIndex:
    """A fixed set of known chunks, ascending by ``prefix``.

    ``prefix`` uint64[n] (the first 8 bytes of the digest), ``digests`` uint8[n, 32], ``lengths``
    and ``offsets`` int64[n], ``segments`` int32[n] into ``refs``; ``alive`` bool[n] is the one
    array that changes: False once the chunk was found damaged.
    """

    prefix: npt.NDArray[np.uint64]
    digests: npt.NDArray[np.uint8]
    lengths: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    segments: npt.NDArray[np.int32]
    alive: npt.NDArray[np.bool_]
    refs: tuple[SegmentRef, ...]

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


class _Epoch(NamedTuple):
    """The part of a manifest that the index is built from."""

    segments: tuple[SegmentRef, ...]
    chunks: ChunkTable


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
        self._epochs: dict[DecisionKey, _Epoch] = {}
        self._index = _build([], rewrite_after_epochs)

    @property
    def index(self) -> KnownIndex:
        """What is known now; a job keeps using the one that it started with."""
        return self._index

    def add_epoch(self, manifest: Manifest) -> None:
        """Add a committed epoch; an epoch of another store replaces everything known."""
        header = manifest.header
        key = DecisionKey(header.lineage, header.epoch, header.attempt)
        with self._lock:
            if header.store_id != self._store_id:
                self._epochs.clear()
                self._store_id = header.store_id
            self._epochs.pop(key, None)
            self._epochs[key] = _Epoch(manifest.segments, manifest.chunks)
            while len(self._epochs) > self._epochs_kept:
                del self._epochs[next(iter(self._epochs))]
            dead = self._index.digests[~self._index.alive]
            fresh = {segment.name for segment in manifest.segments if segment.own}
            self._index = _build(list(self._epochs.values()), self._rewrite_after)
            # A chunk that this epoch wrote anew is sound again, whatever was known of it.
            self._bury(dead, spare=fresh)

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


def _build(epochs: list[_Epoch], rewrite_after: int) -> KnownIndex:
    """The index over ``epochs``; a chunk that is in several has the entry of the last one."""
    refs: list[SegmentRef] = []
    numbers: dict[str, int] = {}
    digests = [np.empty((0, DIGEST_BYTES), np.uint8)]
    lengths, offsets = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    segments = [np.empty(0, np.int32)]
    for epoch in reversed(epochs):
        chunks = epoch.chunks
        mapping = np.full(len(epoch.segments), -1, np.int32)
        for i, ref in enumerate(epoch.segments):
            if ref.age < rewrite_after:
                if ref.name not in numbers:
                    numbers[ref.name] = len(refs)
                    refs.append(SegmentRef(ref.name, ref.bytes, own=False, age=ref.age))
                mapping[i] = numbers[ref.name]
        usable = mapping[chunks.segments] >= 0
        digests.append(chunks.digests[usable])
        lengths.append(chunks.lengths[usable])
        offsets.append(chunks.offsets[usable])
        segments.append(mapping[chunks.segments[usable]])
    all_digests = np.concatenate(digests)
    prefix = prefixes(all_digests)
    order = np.argsort(prefix, kind="stable")
    ordered = all_digests[order]
    repeated = np.zeros(len(order), np.bool_)
    repeated[1:] = (ordered[1:] == ordered[:-1]).all(axis=1)
    order = order[~repeated]
    return KnownIndex(
        prefix=prefix[order],
        digests=all_digests[order],
        lengths=np.concatenate(lengths)[order],
        offsets=np.concatenate(offsets)[order],
        segments=np.concatenate(segments)[order],
        alive=np.ones(len(order), np.bool_),
        refs=tuple(refs),
    )
