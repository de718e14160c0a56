"""The interface of a store, and what is durable when each call returns.

A store has six folders of small records and segments. Records are created whole or not at all
and never changed afterwards; the decision of an epoch is the one that is *created if absent*.
All calls block and may come from any thread. They raise the typed errors of
:mod:`groupio.errors`: ``StorageError`` with the error number of the system, ``StorageFull``,
``NotFound``, ``IntegrityError`` for bytes that should be there and are not, ``InvalidInput`` for
a name or a size that no store takes.

A backend never repeats a failed flush: after one, the system may have dropped the unwritten
pages and would report success for bytes that are gone.
"""

from __future__ import annotations

import builtins
import errno
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from groupio.errors import FormatError, GroupIOError, IntegrityError, StorageError
from groupio.format.envelope import HEADER_BYTES
from groupio.format.limits import ROOT_BYTES_MAX

if TYPE_CHECKING:
    from groupio.format.records import StoreRecord
    from groupio.model import DecisionKey

ROOT = ""
"""The folder name of the store itself, where the store record is."""

EPOCHS = "epochs"
PREPARED = "prepared"
INFLIGHT = "inflight"
SEGMENTS = "segments"
LINEAGES = "lineages"
CONTROLLERS = "controllers"

FOLDERS = (EPOCHS, PREPARED, INFLIGHT, SEGMENTS, LINEAGES, CONTROLLERS)
"""The folders of a store, besides ``ROOT``."""

RECORD_BYTES_MAX = HEADER_BYTES + ROOT_BYTES_MAX
"""Largest record that is read whole, in bytes; only manifests are larger, and read in parts."""

CATALOGUE = "catalogue"
"""The file in ``ROOT`` that says what older decisions say, to save opening them; see
:mod:`groupio.format.catalogue`."""

STORE_RECORD = "groupio.json"
"""The record in ``ROOT`` that makes a directory a store."""


MARK_BYTES_MAX = 64
"""Bytes read of a mark; a real one has fewer."""


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """What a store is made of, for ``status`` and ``doctor``.

    ``io_mode`` is "direct" or "buffered": how segments are really written here. ``commit_mode``
    is "link" or "rename_noreplace": how a decision is created if absent; "none" when the store
    cannot be written. ``node_local``: the bytes do not survive the loss of this node.
    ``free_bytes`` is what an unprivileged writer may still use, None where there is no limit.
    """

    kind: str
    path: str
    node_local: bool
    filesystem: str
    io_mode: str
    commit_mode: str
    free_bytes: int | None
    writable: bool = True


class SegmentFile(Protocol):
    """A new segment being written; nothing refers to it before its decision is made."""

    @property
    def name(self) -> str:
        """The file name, without directories."""
        ...

    @property
    def path(self) -> str:
        """Where it is, for messages."""
        ...

    @property
    def io_mode(self) -> str:
        """How :meth:`write` really writes: "direct" or "buffered"."""
        ...

    def write(self, offset: int, views: Sequence[memoryview]) -> None:
        """Write all bytes of ``views``, one after the other, at ``offset``.

        In direct mode the offset and the length of each view are multiples of ``PAGE_BYTES``
        and the memory is aligned so (else InvalidInput). Safe from several threads for ranges
        that do not overlap. Nothing is durable before :meth:`sync_close`.
        """
        ...

    def write_tail(self, offset: int, data: bytes) -> None:
        """Write the end of the file: any offset, any length."""
        ...

    def sync_close(self, size: int) -> None:
        """Flush once, check that the file has ``size`` bytes, close.

        On return the bytes are durable, and so is the file's name after ``sync_folder``. After
        an error the segment is worthless: ``abort`` it, write another.
        """
        ...

    def abort(self) -> None:
        """Close and remove the file, as far as possible; never raises. Safe to repeat."""
        ...


class RandomReader(Protocol):
    """An open record or segment; reads from any thread, until ``close``."""

    @property
    def size(self) -> int:
        """Bytes in the file, when it was opened."""
        ...

    @property
    def path(self) -> str:
        """Where it is, for messages."""
        ...

    def read(self, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes from ``offset``; IntegrityError when the file is shorter."""
        ...

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill ``view`` from ``offset``; IntegrityError when the file is shorter."""
        ...

    def close(self) -> None:
        """Release the file. Safe to repeat; no read may be running."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def is_no_record(error: GroupIOError) -> bool:
    """Whether ``error`` says that what has the name of a record is none, or a damaged one.

    A pipe, a device, a directory or a symbolic link counts too: the name is taken all the same,
    and the rest of the store can be read. The store being away is no such error.
    """
    if isinstance(error, StorageError):
        return error.errno in (errno.EISDIR, errno.EINVAL, errno.ELOOP)
    return isinstance(error, IntegrityError | FormatError)


def read_record(reader: RandomReader, bytes_max: int = RECORD_BYTES_MAX) -> bytes:
    """All bytes of a small record; IntegrityError, with nothing read, when it is larger than that.

    A file of terabytes, sparse or not, in the place of a record must not cost the reader's memory.
    """
    if reader.size > bytes_max:
        raise IntegrityError(
            f"{reader.path} is damaged: it has {reader.size} bytes, and such a record has at most "
            f"{bytes_max}; restore the file from a copy, or remove it",
            path=reader.path,
        )
    return reader.read(0, reader.size)


class Backend(Protocol):
    """A store. ``folder`` is one of ``FOLDERS`` or ``ROOT``; names have no directories."""

    @property
    def path(self) -> str:
        """The store's address, for messages."""
        ...

    @property
    def identity(self) -> tuple[str, int, int]:
        """``(store id in hex, device, inode)``: equal only for the very same store."""
        ...

    def check_identity(self) -> None:
        """StorageError unless the address still leads to the store that was opened."""
        ...

    def ensure_store_record(self, job: str) -> StoreRecord:
        """The store record, made durably for ``job`` if there is none; on return it is durable."""
        ...

    def store_record(self) -> StoreRecord:
        """The store record; NotFound when this is not a store (yet)."""
        ...

    def info(self) -> BackendInfo:
        """What the store is made of; tries out the modes when they are not known yet."""
        ...

    def list(self, folder: str) -> builtins.list[str]:
        """The names in ``folder`` in ascending order, without unfinished ones; [] if absent."""
        ...

    def identities(self, folder: str) -> dict[str, int]:
        """What :meth:`list` gives, each name with a number that another file has not; one listing.

        The number is the inode, 0 where a store has none: then the name alone tells.
        """
        ...

    def exists(self, folder: str, name: str) -> bool:
        """Whether there is such a name."""
        ...

    def size(self, folder: str, name: str) -> int:
        """Bytes in the file."""
        ...

    def sizes(self, folder: str, names: Iterable[str]) -> dict[str, int]:
        """Bytes in each of these files; -1 for a name under which there is no file."""
        ...

    def read(self, folder: str, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """Exactly ``length`` bytes from ``offset``.

        With ``length`` None to the end; then IntegrityError when the file is larger than
        ``RECORD_BYTES_MAX``.
        """
        ...

    def read_into(self, folder: str, name: str, offset: int, view: memoryview) -> None:
        """Fill ``view``; IntegrityError when the file is shorter or missing."""
        ...

    def reader(self, folder: str, name: str) -> RandomReader:
        """Keep the file open for many reads."""
        ...

    def delete(self, folder: str, name: str) -> None:
        """Remove the file if it is there. A power cut right after may bring it back."""
        ...

    def put(self, folder: str, name: str, data: bytes, *, durable: bool) -> None:
        """Create a new record; StorageError (EEXIST) when the name is taken."""
        ...

    def put_if_absent(self, folder: str, name: str, data: bytes) -> bool:
        """Create a record durably unless the name is taken; False if it is.

        In both cases the record that is there is durable on return. When an error says
        ``outcome="unknown"`` the record may be there: read it.
        """
        ...

    def leave_mark(self, folder: str, data: bytes) -> str:
        """A new small file that no listing shows, and its name, which was never used before.

        Whoever sees the same store finds it by its name once this returns, as soon as the caches
        of the file system let them. Not durable; one that is left over is removed with other
        unfinished files, by age.
        """
        ...

    def find_mark(self, folder: str, name: str) -> bytes | None:
        """What :meth:`leave_mark` wrote under this name; None when nothing is there (yet).

        InvalidInput when no mark has such a name.
        """
        ...

    def remove_mark(self, folder: str, name: str) -> None:
        """Remove the mark if it is there."""
        ...

    def replace(self, folder: str, name: str, data: bytes) -> None:
        """Write a derived file in the place of an older one, whole or not at all.

        Its bytes are durable on return, its name is not. Never for records.
        """
        ...

    def prepare(self, key: DecisionKey, data: bytes) -> None:
        """Write the record that :meth:`commit_prepared` makes the decision.

        On return its bytes are durable, and off the node where the store is; an earlier
        prepared record of the key is replaced.
        """
        ...

    def commit_prepared(self, key: DecisionKey) -> bool:
        """Make the prepared record the decision of ``key``, unless there is one.

        True: the decision is durable and is the record that this object prepared last (or, in
        a process that prepared none, the one found prepared). False: another decision is there
        and is durable; read it. NotFound: neither a prepared record nor a decision. An error
        with ``outcome="unknown"`` leaves open whether the decision was made.
        """
        ...

    def create_segment(self, name: str) -> SegmentFile:
        """A new, empty segment; StorageError (EEXIST) when the name is taken."""
        ...

    def sync_folder(self, folder: str, *, force: bool = False) -> None:
        """Make the names that this object created in ``folder`` so far durable.

        Costs nothing when they are already. A segment's name may be made durable while its
        bytes are still being written. ``force`` makes names durable that others created.
        """
        ...

    def close(self) -> None:
        """Release the store. Safe to repeat; no other call may be running."""
        ...
