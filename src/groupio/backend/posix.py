"""The store on a file system, with the durability that the file system can really give.

Order is everything here: the bytes of a record or segment are flushed before the name by which
others find it exists, and the directory that holds the name is flushed before anybody is told.
Nothing is ever overwritten in place.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import time
from typing import TYPE_CHECKING, Self

from groupio.backend.base import (
    EPOCHS,
    FOLDERS,
    MARK_BYTES_MAX,
    PREPARED,
    ROOT,
    SEGMENTS,
    STORE_RECORD,
    BackendInfo,
)
from groupio.backend.doors import Doors
from groupio.backend.faults import free_bytes, storage_error
from groupio.backend.folders import (
    Folder,
    Modes,
    check_name,
    make_folder,
    make_root,
    open_root,
    sync_ancestors,
)
from groupio.backend.mounts import filesystem_type, is_node_local
from groupio.backend.records import (
    TEMPORARY,
    FileId,
    Placer,
    PosixReader,
    find,
    open_regular,
    private_file,
    remove_quietly,
    write_temporary,
)
from groupio.backend.segments import BUFFERED, PosixSegment
from groupio.backend.tree import PosixTree, store_path
from groupio.errors import GroupIOError, InvalidInput, NotFound, Outcome, StorageError
from groupio.format import records as format_records
from groupio.format.limits import STORE_FORMAT
from groupio.model import PAGE_BYTES

if TYPE_CHECKING:
    from groupio.format.records import StoreRecord
    from groupio.model import DecisionKey

_STORE_RECORD_LIMIT = 1 << 20
"""Bytes read of a store record; a real one has a few hundred, more is damage."""

_MARK = re.compile(re.escape(TEMPORARY) + r"[0-9a-f]{24}")
"""The names that :func:`write_temporary` makes."""

_PREPARED_LIMIT = 64
"""Prepared records remembered at once; a few epochs are ever in flight."""


class PosixBackend(PosixTree):
    """A store on a POSIX file system; see :class:`groupio.backend.base.Backend`."""

    def __init__(self, path: str, root: Folder, modes: Modes) -> None:
        """Use :meth:`open`."""
        super().__init__(path, root)
        self._modes = modes
        self._prepared: dict[str, FileId] = {}
        self._placer = Placer()
        self._record: StoreRecord | None = None
        self._record_durable = False
        self._modes_found: tuple[str, str] | None = None
        self._filesystem = filesystem_type(root.fd)
        self._node_local = is_node_local(self._filesystem)

    @classmethod
    def open(
        cls,
        store: str | os.PathLike[str],
        *,
        create: bool,
        file_mode: int | None = None,
        umask: int | None = None,
    ) -> Self:
        """Open the store at a path or ``file://`` URL.

        With ``create`` the directory and its folders are made if absent and are durable on
        return, with all directories above them. New files and directories have the modes that
        a process with ``umask`` gives them (None: this one), or ``file_mode``. NotFound when it
        is absent and not to be created; StorageError when it is a file (ENOTDIR) or may not be
        read (EACCES). A store that cannot be written opens for reading.
        """
        path = store_path(store)
        modes = Modes.of(file_mode, umask)
        made = make_root(path, modes) if create else []
        try:
            root = open_root(path)
        except FileNotFoundError as error:
            raise NotFound(
                f"there is no store at {path}: check the path; the first save creates it", path=path
            ) from error
        backend = cls(path, root, modes)
        if create:
            try:
                backend._make_folders(made)
            except BaseException:
                backend.close()
                raise
        return backend

    def _make_folders(self, made: list[str]) -> None:
        absent_before = [name for name in FOLDERS if find(self._root, name) is None]
        for name in FOLDERS:
            self._folders[name] = make_folder(self._root, name, self._modes)
        # Without the record nobody has finished creating this store; its maker may have died
        # between creating a directory and flushing it, so all of them are flushed again.
        if find(self._root, STORE_RECORD) is None or absent_before:
            for folder in self._folders.values():
                folder.sync(force=True)
            sync_ancestors(self._root, made)

    # What the store is ----------------------------------------------------------------------

    @property
    def identity(self) -> tuple[str, int, int]:
        """``(store id in hex, device, inode)``; NotFound before there is a store record."""
        return (self.store_record().store_id, *self._root.identity)

    def check_identity(self) -> None:
        """StorageError unless the path still leads to the very store that was opened.

        It does not when the directory was replaced, another file system was mounted over it or
        over a folder, or the store record is another one. It is an error too when the open
        directories cannot be used any more.
        """
        self._check_place(self._path, None, self._root)
        with self._lock:
            folders = [item for item in self._folders.items() if item[0] != ROOT]
        for name, folder in folders:
            self._check_place(name, self._root.fd, folder)
        if self._record is not None:
            self._check_record(self._record)

    def _check_record(self, known: StoreRecord) -> None:
        try:
            now: str | None = self._read_record().store_id
        except NotFound:
            now = None
        if now != known.store_id:
            raise self._replaced(f"its record names the store {now}, not {known.store_id}")

    def _check_place(self, name: str, parent: int | None, folder: Folder) -> None:
        try:
            status = os.stat(name, dir_fd=parent, follow_symlinks=parent is None)
            # Asks the file system, which fstat does not on every network file system.
            os.stat(".", dir_fd=folder.fd)
        except OSError as error:
            raise storage_error(error, folder.path, "find the opened store again at") from error
        if (status.st_dev, status.st_ino) != folder.identity:
            raise self._replaced(f"{folder.path} is another directory or file system now")

    def anew(self) -> Self:
        """This very store, opened anew by its path; for one that was away, or failed to flush.

        The caller has to have read the store record. This object stays as it is: whoever goes on
        with it fails as before, and it is closed with its last user. The id in the store record
        says which store is there: device and inode may be others after a mount. StorageError
        (EREMCHG), with nothing written, when another store or none is at the path, or when one of
        the folders was replaced or covered by a mount; ENOENT when it was removed. What was made
        through this object and is not durable yet has to be made again.
        """
        try:
            root = open_root(self._path)
        except FileNotFoundError as error:
            if self._root.is_removed:
                raise storage_error(error, self._path, "open") from error
            raise self._replaced("nothing is there") from error
        fresh = type(self)(self._path, root, self._modes)
        try:
            fresh._succeed(self)
        except BaseException:
            fresh.close()
            raise
        return fresh

    def _succeed(self, old: PosixBackend) -> None:
        """Make sure that this is the store that ``old`` opened."""
        assert old._record is not None
        self._check_record(old._record)
        self._record = old._record
        with old._lock:
            folders = [item for item in old._folders.items() if item[0] != ROOT]
        for name, folder in folders:
            try:
                mine: Folder | None = self._folder(name)
            except FileNotFoundError:
                mine = None
            if mine is None or not _corresponds(mine, self._root, folder, old._root):
                raise self._replaced(f"{folder.path} is another directory or file system now")
        if old._record_durable:
            self.ensure_store_record(old._record.job)  # which is durable now, whatever was before

    def _replaced(self, why: str) -> StorageError:
        return StorageError(
            f"the store at {self._path} is not the one that was opened: {why}; restore the "
            "mount, or connect anew to use what is there",
            path=self._path,
            errno=errno.EREMCHG,
        )

    def store_record(self) -> StoreRecord:
        """The store record; NotFound when the directory is not a store (yet)."""
        if self._record is None:
            self._record = self._read_record()
        return self._record

    def _read_record(self) -> StoreRecord:
        try:
            with self.reader(ROOT, STORE_RECORD) as reader:
                data = reader.read(0, min(reader.size, _STORE_RECORD_LIMIT))
        except NotFound as error:
            raise NotFound(
                f"{self._path} is not a groupio store: it has no {STORE_RECORD}; check the "
                "path; the first save makes it one",
                path=self._path,
            ) from error
        return format_records.decode_store(data, os.path.join(self._path, STORE_RECORD))

    def ensure_store_record(self, job: str) -> StoreRecord:
        """The store record, made for ``job`` if there is none; durable on return."""
        if self._record_durable:
            return self.store_record()
        try:
            record = self.store_record()
            # Its maker may have died before the flush.
            self._root.sync(force=True)
        except NotFound:
            record = format_records.StoreRecord(
                store_id=secrets.token_hex(16),
                job=job,
                format=STORE_FORMAT,
                created_at=time.time(),
            )
            if not self.put_if_absent(ROOT, STORE_RECORD, format_records.encode_store(record)):
                record = self.store_record()
            self._record = record
        self._record_durable = True
        return record

    def info(self) -> BackendInfo:
        """What the store is made of; the first call tries the modes out with a small file."""
        if self._modes_found is None:
            self._modes_found = self._try_modes()
        io_mode, commit_mode = self._modes_found
        try:
            free = free_bytes(self._root.fd)
        except OSError as error:
            raise storage_error(error, self._path, "ask for the free space of") from error
        return BackendInfo(
            kind="posix",
            path=self._path,
            node_local=self._node_local,
            filesystem=self._filesystem,
            io_mode=io_mode,
            commit_mode=commit_mode,
            free_bytes=free,
            writable=commit_mode != "none",
        )

    def _try_modes(self) -> tuple[str, str]:
        import mmap  # only here: page-aligned memory for one write

        name = TEMPORARY + secrets.token_hex(12)
        try:
            segment = PosixSegment(self._root, name, self._modes)
        except GroupIOError:
            return BUFFERED, "none"
        placed = name + "-placed"
        try:
            segment.write(0, [memoryview(mmap.mmap(-1, PAGE_BYTES))])
            # The names are new, so no identity is needed to tell the file from another.
            self._placer.place(self._root, name, self._root, placed, (0, 0, 0, 0))
            return segment.io_mode, self._placer.mode
        finally:
            segment.abort()
            remove_quietly(self._root, placed)

    # Writing --------------------------------------------------------------------------------

    def put(self, folder: str, name: str, data: bytes, *, durable: bool) -> None:
        """Create a new record; StorageError (EEXIST) when the name is taken."""
        if not self._publish(folder, name, data, durable=durable):
            path = self._where(folder, name)
            raise StorageError(
                f"cannot create {path}: it exists, and records are never replaced; read it, or "
                "remove it when its writer is gone",
                path=path,
                errno=errno.EEXIST,
            )

    def put_if_absent(self, folder: str, name: str, data: bytes) -> bool:
        """Create a record durably unless the name is taken; False if it is.

        In both cases the record that is there is durable on return.
        """
        return self._publish(folder, name, data, durable=True)

    def _publish(self, folder: str, name: str, data: bytes, *, durable: bool) -> bool:
        check_name(name)
        where = self._writable(folder)
        temporary, identity = write_temporary(where, data, self._modes, durable=durable)
        try:
            placed = self._placer.place(where, temporary, where, name, identity)
        finally:
            remove_quietly(where, temporary)
        if durable:
            where.sync(force=not placed, outcome=Outcome.UNKNOWN)
        return placed

    def leave_mark(self, folder: str, data: bytes) -> str:
        """A new small file that no listing shows, and its name, which was never used before."""
        name, _ = write_temporary(self._writable(folder), data, self._modes, durable=False)
        return name

    def find_mark(self, folder: str, name: str) -> bytes | None:
        """What :meth:`leave_mark` wrote under this name; None when nothing is there (yet)."""
        _check_mark(name)
        path = self._where(folder, name)
        try:
            fd, status = open_regular(self._folder(folder), name)
        except FileNotFoundError:
            return None
        with PosixReader(fd, status.st_size, path) as reader:
            return reader.read(0, min(reader.size, MARK_BYTES_MAX))

    def remove_mark(self, folder: str, name: str) -> None:
        """Remove the mark if it is there."""
        _check_mark(name)
        try:
            os.unlink(name, dir_fd=self._folder(folder).fd)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise storage_error(error, self._where(folder, name), "remove") from error

    def replace(self, folder: str, name: str, data: bytes) -> None:
        """Write a derived file in the place of an older one, whole or not at all.

        Its bytes are durable on return, its name is not.
        """
        self._rename_new(self._writable(folder), check_name(name), data)

    def _rename_new(self, folder: Folder, name: str, data: bytes) -> FileId:
        temporary, identity = write_temporary(folder, data, self._modes, durable=True)
        try:
            os.rename(temporary, name, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
        except OSError as error:
            path = os.path.join(folder.path, name)
            full = storage_error(error, path, "create", near=folder.fd)
            remove_quietly(folder, temporary)
            raise full from error
        folder.entry_made()
        return identity

    def prepare(self, key: DecisionKey, data: bytes) -> None:
        """Write the record that :meth:`commit_prepared` makes the decision; its bytes are durable.

        Its name is durable too on a file system off the node. On a node-local one only the
        decision makes it so: it is flushed once, and before that nothing survives the node.
        """
        name, folder = check_name(str(key)), self._writable(PREPARED)
        identity = self._rename_new(folder, name, data)
        if not self._node_local:
            folder.sync()
        with self._lock:
            self._prepared[name] = identity
            while len(self._prepared) > _PREPARED_LIMIT:
                del self._prepared[next(iter(self._prepared))]

    def commit_prepared(self, key: DecisionKey) -> bool:
        """Make the prepared record the decision of ``key``, unless there is one.

        True: the decision is durable and is the record that this object prepared last (or, in
        a process that prepared none, the one found prepared). False: another decision is there
        and is durable; read it. NotFound: neither a prepared record nor a decision.
        """
        name = check_name(str(key))
        prepared, epochs = self._writable(PREPARED), self._writable(EPOCHS)
        with self._lock:
            mine = self._prepared.get(name)
        found = find(prepared, name)
        if found is not None:
            self._placer.place(prepared, name, epochs, name, found)
        # Another's decision is made durable too: whoever hears of it may act on it.
        epochs.sync(force=True, outcome=Outcome.UNKNOWN)
        decision = find(epochs, name, outcome=Outcome.UNKNOWN)
        if decision is None:
            raise NotFound(
                f"epoch {key.epoch} has neither a prepared record nor a decision at "
                f"{self._where(PREPARED, name)}: prepare it first",
                path=self._where(PREPARED, name),
                epoch=key.epoch,
                outcome=Outcome.UNKNOWN,
            )
        remove_quietly(prepared, name)
        return decision == (mine or found)

    def create_segment(self, name: str) -> PosixSegment:
        """A new, empty segment; StorageError (EEXIST) when the name is taken."""
        return PosixSegment(self._writable(SEGMENTS), check_name(name), self._modes)

    def sync_folder(self, folder: str, *, force: bool = False) -> None:
        """Make the names that this object created in ``folder`` so far durable.

        Costs nothing when they are already. A segment's name may be made durable while its
        bytes are still being written, which takes this flush off the way to the commit.
        ``force`` makes names durable that others created.
        """
        self._writable(folder).sync(force=force)

    def doors(self) -> Doors:
        """The doors of the store; what is made there has the modes of this backend's files."""
        return Doors(self._root, self._modes)

    def private_file(self, folder: str, name: str, data: bytes) -> bytes:
        """The bytes of a file that only this user can read, made with ``data`` if absent.

        Its mode is 0600, whatever the modes of the store. :class:`NotPrivate` where the store
        cannot keep it so, or it is another user's.
        """
        return private_file(self._writable(folder), check_name(name), data)

    @property
    def is_sound(self) -> bool:
        """No flush of a directory and no call for a segment has failed.

        Open the store :meth:`anew` otherwise. Every later flush of a directory fails after one that
        failed, and one through new descriptors tells the truth again. Descriptors of a file system
        that was away may be of no use for ever.
        """
        # A copy: another thread may be opening a folder.
        return all(folder.is_sound for folder in list(self._folders.values()))

    def remove_temporary(self, older_than_s: float) -> int:
        """Remove unfinished records and doors that killed writers left; how many there were.

        Age is measured by the store's clock. A writer paused for longer than that finds its
        record gone and fails typed, so take a time that no living writer needs.
        """
        probe, (_, _, _, now) = write_temporary(self._root, b"", self._modes, durable=False)
        remove_quietly(self._root, probe)
        count = 0
        for folder in (ROOT, *FOLDERS):
            for name in self.unfinished(folder):
                there = find(self._folder(folder), name)
                if there is not None and now - there[3] > older_than_s * 1e9:
                    remove_quietly(self._folder(folder), name)
                    count += 1
        try:
            with self.doors() as doors:
                count += doors.remove_unfinished(now, older_than_s)
        except GroupIOError:
            pass  # whatever is in the place of the doors, saves do without it
        return count


def _check_mark(name: str) -> None:
    if not _MARK.fullmatch(name):
        raise InvalidInput(f"{name[:80]!r} is not the name of a mark in a store")


def _corresponds(mine: Folder, root: Folder, old: Folder, old_root: Folder) -> bool:
    """Whether ``mine`` in ``root`` may be what ``old`` in ``old_root`` was, after a mount."""
    if root.identity == old_root.identity:
        return mine.identity == old.identity
    # Numbers are others now; but what was on the store's own file system is so still.
    return (mine.identity[0] == root.identity[0]) == (old.identity[0] == old_root.identity[0])
