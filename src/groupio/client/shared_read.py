"""The grouped read of one host: its ranks read each chunk once between them.

What several ranks want is read by one of them into a window of shared memory and copied out by
each; what one rank wants it reads itself. All ranks of the host take part in every fill.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from groupio.backend.base import Backend
from groupio.client.chunk_reader import Wants, read_chunks
from groupio.client.shared_link import Link
from groupio.client.shared_messages import Begin, Join
from groupio.client.shared_talk import Hub, Spoke, Talk
from groupio.client.shared_window import SLOT_BYTES, Places, Window, new_window
from groupio.client.shared_work import Source, Voice, Work
from groupio.errors import (
    FormatError,
    GroupAborted,
    GroupIOError,
    IntegrityError,
    StorageError,
)
from groupio.exhaustion import exhausted
from groupio.model import ChunkTable, SegmentRef
from groupio.plan.sharing import Sharing, share_reading

log = logging.getLogger("groupio.client")

_THREADS_PER_CPU = 2
_DAMAGE = (IntegrityError, FormatError)


class GroupedRead:
    """One rank's part in the reading of one load; close it when the load is over.

    ``bytes_read`` came from the store to this rank, ``bytes_forwarded`` from other ranks, over all
    fills so far; both count whole chunks. ``notes`` say where the ranks could not read together.
    """

    def __init__(self, link: Link | None, notes: Sequence[str] = ()) -> None:
        """``link`` to the other ranks of the host, which the reading owns from now on. Without
        one this rank reads by itself."""
        self.bytes_read = 0
        self.bytes_forwarded = 0
        self.notes = list(notes)
        self._talk: Hub | Spoke | None = None
        if link is not None and len(link.ranks) > 1:
            self._talk = Hub(link) if link.me == 0 else Spoke(link)
        elif link is not None:
            link.close()
        self._broken = False
        self._asked = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Hang up. In the middle of a fill this makes the other ranks raise. Safe to repeat."""
        if self._talk is not None:
            self._talk.close()
            self._talk = None
            self._broken = True

    @contextmanager
    def fill(self, epoch: int, deadline: float) -> Iterator[None]:
        """Within it this rank fills its state, and calls :meth:`fetch` once or not at all.

        When it does not, because it wants nothing or met damage before, the others read without
        it; when it leaves with any other error they raise one that names this rank.
        """
        self._asked = False
        try:
            yield
        except _DAMAGE:
            self._sit_out(epoch, deadline)
            raise
        except BaseException as error:
            if self._talk is not None and not self._asked:
                self._talk.open_round(epoch, deadline)
                self._give_up(self._talk, error, epoch)
            raise
        self._sit_out(epoch, deadline)

    def fetch(
        self,
        backend: Backend,
        segments: Sequence[SegmentRef],
        table: ChunkTable,
        wants: Wants,
        *,
        deadline: float,
        threads: int,
        epoch: int,
    ) -> list[bytes]:
        """As :func:`groupio.client.chunk_reader.read_chunks`, together with the other ranks of
        the host: all of them call it for the same epoch, each with what it wants.

        Damage is returned to every rank that wanted the chunk. Besides the errors of
        ``read_chunks``: GroupTimeout names ranks that did not come or not read in time,
        GroupAborted a rank that ended, StagingFull without memory for the window; what goes
        wrong on one rank is raised by all, after which the reading is over.
        """
        self._asked = True
        source = Source(backend, segments, table)
        if self._talk is None:
            if self._broken:
                raise GroupAborted(
                    f"the ranks of this host lost each other before epoch {epoch} was read; load "
                    "again on all ranks",
                    epoch=epoch,
                )
            return self._read_alone(source, wants, deadline, threads, epoch)
        talk = self._talk
        talk.open_round(epoch, deadline)
        try:
            return self._together(talk, source, wants, threads)
        except BaseException as error:
            self._give_up(talk, error, epoch)
            raise

    def _together(
        self, talk: Hub | Spoke, source: Source, wants: Wants, threads: int
    ) -> list[bytes]:
        rows = wants.all_rows()
        mask = np.zeros(len(source.table), np.bool_)
        mask[rows] = True
        join = Join(
            talk.round, talk.link.me, identity_of(source.table), np.packbits(mask).tobytes()
        )
        begin, sharing, fd = _agree(talk, join, source.table)
        try:
            if begin.note:
                self.notes.append(begin.note)
                log.warning("%s", begin.note)
            if begin.alone:
                return self._read_alone(source, wants, talk.deadline, threads, talk.epoch)
            return self._share(talk, source, wants, sharing, fd, threads)
        finally:
            if fd >= 0:
                os.close(fd)

    def _share(
        self,
        talk: Hub | Spoke,
        source: Source,
        wants: Wants,
        sharing: Sharing,
        fd: int,
        threads: int,
    ) -> list[bytes]:
        window = None
        work = None
        me = talk.link.me
        try:
            size = Places(sharing).total_bytes
            try:
                window = Window(fd, size)
            except OSError as error:
                doing = "map the memory through which the ranks of this host read together"
                raise exhausted(error, doing, needed=size) from error
            voice = Voice(talk.filled, talk.copied, talk.nudge)
            work = Work(source, wants, sharing, me, window, voice)
            # The ranks of the host share its processors; one thread reads while another copies.
            cpus = len(os.sched_getaffinity(0))
            work.start(min(threads, max(2, _THREADS_PER_CPU * cpus // len(talk.link.ranks))))
            talk.attend(work, sharing)
        finally:
            if work is not None:
                work.stop()
                self.bytes_read += work.bytes_read
                self.bytes_forwarded += work.bytes_forwarded
                finished, damaged = work.finished, work.damaged
                del work
            if window is not None:
                window.close()
        if not finished:
            raise StorageError(
                f"the store {source.backend.path} did not deliver epoch {talk.epoch} in time; "
                "give a larger deadline_s or look at the storage",
                path=source.backend.path,
                errno=errno.ETIMEDOUT,
            )
        return in_file_order(source.table, damaged)

    def _read_alone(
        self, source: Source, wants: Wants, deadline: float, threads: int, epoch: int
    ) -> list[bytes]:
        bad = read_chunks(*source, wants, deadline=deadline, threads=threads, epoch=epoch)
        self.bytes_read += int(source.table.lengths[wants.all_rows()].sum())
        return bad

    def _sit_out(self, epoch: int, deadline: float) -> None:
        """Take part in a fill without wanting anything; the others' errors are theirs."""
        talk = self._talk
        if talk is None or self._asked:
            return
        self._asked = True
        talk.open_round(epoch, deadline)
        nothing = Join(talk.round, talk.link.me, b"", b"")
        try:
            if isinstance(talk, Spoke):
                talk.sit_out(nothing)
                return
            # Without the table the hub cannot plan for the others.
            rows = [join.rows for join in talk.gather(nothing)]
            note = ""
            if sum(map(bool, rows)) > 1:
                rank = talk.link.ranks[0]
                note = f"the ranks of a host read by themselves: rank {rank} met damage before"
            talk.announce(Begin(talk.round, [], alone=True, note=note), None, -1)
        except GroupIOError as error:
            self._give_up(talk, error, epoch)
            raise

    def _give_up(self, talk: Talk, error: BaseException, epoch: int) -> None:
        """Let the others raise too, and hang up."""
        if not isinstance(error, GroupIOError):
            rank = talk.link.ranks[talk.link.me]
            error = GroupAborted(
                f"reading epoch {epoch} failed: {type(error).__name__}: {error}; see its output",
                members=[rank],
                epoch=epoch,
            )
        talk.give_up(error)
        self.close()


def _agree(talk: Hub | Spoke, join: Join, table: ChunkTable) -> tuple[Begin, Sharing, int]:
    """What all want, who reads what of it, and the window's descriptor (-1 without one)."""
    if isinstance(talk, Spoke):
        begin, fd = talk.join(join)
        try:
            return begin, _plan(begin.rows, table), fd
        except BaseException:
            if fd >= 0:
                os.close(fd)
            raise
    rows = [one.rows for one in talk.gather(join)]
    sharing = _plan(rows, table)
    begin, fd = Begin(talk.round, rows), -1
    size = Places(sharing).total_bytes
    if size:
        try:
            fd = new_window(size)
        except OSError as error:
            begin.note = (
                f"the ranks of a host read by themselves: no shared memory of {size} bytes "
                f"({error.strerror})"
            )
    begin.alone = fd < 0
    try:
        talk.announce(begin, sharing, fd)
    except BaseException:
        if fd >= 0:
            os.close(fd)
        raise
    return begin, sharing, fd


def _plan(rows: Sequence[bytes], table: ChunkTable) -> Sharing:
    wanted = np.zeros((len(rows), len(table)), np.bool_)
    for place, bits in enumerate(rows):
        if bits:
            packed = np.frombuffer(bits, np.uint8)
            wanted[place] = np.unpackbits(packed, count=len(table))
    return share_reading(wanted, table, SLOT_BYTES)


def identity_of(table: ChunkTable) -> bytes:
    """The same for equal tables only."""
    hasher = blake3()
    columns: tuple[npt.NDArray[np.generic], ...] = (table.lengths, table.segments, table.offsets)
    for column in (*columns, table.digests):
        hasher.update(np.ascontiguousarray(column).view(np.uint8).data)
    return hasher.digest()


def in_file_order(table: ChunkTable, damaged: Sequence[int]) -> list[bytes]:
    """The digests of these rows, in the order of the files."""
    rows = np.array(damaged, np.int64)
    rows = rows[np.lexsort((table.offsets[rows], table.segments[rows]))]
    return [table.digests[row].tobytes() for row in rows]
