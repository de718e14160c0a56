"""Doors: directories with a view of an epoch in another format, published whole.

A door is derived: it can be made again from the epoch, so losing one loses nothing. Still nobody
ever sees half of one: it is written under a name that listings leave out, flushed, and renamed.
An older door of the same name is exchanged in the same step, where the file system can do it.
"""

from __future__ import annotations

import builtins
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Callable
from typing import TypeVar

from blake3 import blake3

from groupio.backend.base import RECORD_BYTES_MAX, read_record
from groupio.backend.faults import close_quietly, storage_error
from groupio.backend.folders import Folder, Modes, check_name, make_folder, open_folder
from groupio.backend.records import PosixReader, find, open_regular, rename_with, write_all

DOORS = "dcp"
"""The folder of a store that has the doors for ``torch.distributed.checkpoint``."""

ABANDONED_AGE_S = 3600.0
"""An unfinished door that nobody has touched for so long belongs to a dead process."""

_EXCHANGE = 2
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
_DOOR_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


_Answer = TypeVar("_Answer")


class DoorFile:
    """A file of a new door, written from its start to its end."""

    def __init__(self, folder: Folder, name: str, modes: Modes) -> None:
        """Create it; StorageError or StorageFull when that cannot be."""
        self.path = os.path.join(folder.path, name)
        self.size = 0
        self._hash = blake3()
        self._near = folder
        self._fd = -1
        try:
            self._fd = os.open(name, _DOOR_FILE, modes.asked[0], dir_fd=folder.fd)
            modes.settle(self._fd, folder.fd)
        except OSError as error:
            self.close()
            raise storage_error(error, self.path, "create", near=folder.fd) from error

    def write(self, data: bytes | memoryview) -> None:
        """Append ``data``."""
        try:
            write_all(self._fd, data, self.size)
        except OSError as error:
            near = self._near.fd
            raise storage_error(error, self.path, "write", needed=len(data), near=near) from error
        self._hash.update(data)
        self.size += len(data)

    def digest(self) -> bytes:
        """BLAKE3 of what was written so far."""
        return self._hash.digest()

    def sync_close(self) -> None:
        """Make the bytes durable and close."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise storage_error(error, self.path, "flush") from error
        finally:
            self.close()

    def close(self) -> None:
        """Close without a flush. Safe to repeat."""
        if self._fd >= 0:
            close_quietly(self._fd)
            self._fd = -1


class NewDoor:
    """A door that is being written; nobody finds it before :meth:`publish`.

    Used as a context manager it removes what was not published.
    """

    def __init__(self, doors: Folder, name: str, modes: Modes) -> None:
        """Use :meth:`Doors.create`."""
        self._doors = doors
        self._name = check_name(name)
        self._modes = modes
        self.temporary = f".{name}.tmp-{secrets.token_hex(12)}"
        self._published = False
        self._files: list[DoorFile] = []
        self._folder = make_folder(doors, self.temporary, modes)

    def create(self, name: str) -> DoorFile:
        """A new file in it; ``name`` may begin with a dot (``.metadata``)."""
        check_name(name.removeprefix("."))
        file = DoorFile(self._folder, name, self._modes)
        self._files.append(file)
        return file

    def publish(self) -> None:
        """Give the door its name, in the place of an older one; durable on return.

        Every file must have been closed with ``sync_close``.
        """
        self._folder.sync(force=True)
        path = os.path.join(self._doors.path, self._name)
        fd, old, new = self._doors.fd, self.temporary, self._name
        self._doors.entry_made()
        try:
            if find(self._doors, new) is None:
                os.rename(old, new, src_dir_fd=fd, dst_dir_fd=fd)
            else:
                _replace(fd, old, new)
        except OSError as error:
            raise storage_error(error, path, "publish the door", near=fd) from error
        self._published = True
        self._doors.sync()

    def __enter__(self) -> NewDoor:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            file.close()
        self._folder.close()
        # After an exchange the old door has this name.
        _remove_tree(self._doors, self.temporary)


class Doors:
    """The doors of one store, by name (the epoch in decimal)."""

    def __init__(self, root: Folder, modes: Modes) -> None:
        """Use :meth:`groupio.backend.posix.PosixBackend.doors`."""
        self._root = root
        self._modes = modes
        self.path = os.path.join(root.path, DOORS)
        self._opened: Folder | None = None

    def create(self, name: str) -> NewDoor:
        """A new door, to be published as ``name``. Old unfinished ones are removed."""
        modes = self._modes
        folder = self._existing()
        if folder is None:
            folder = self._opened = make_folder(self._root, DOORS, modes)
        # Its maker may have died before the flush.
        self._root.sync(force=True)
        new = NewDoor(folder, name, modes)
        made = find(folder, new.temporary)
        if made is not None:
            self.remove_unfinished(made[3], but=new.temporary)
        return new

    def list(self) -> builtins.list[str]:
        """The names of the doors, ascending; [] when none was ever made."""
        return [name for name in self._names() if not name.startswith(".")]

    def read(self, name: str, file: str, bytes_max: int = RECORD_BYTES_MAX) -> bytes | None:
        """The bytes of one file of a door, or None when the door or the file is not there.

        IntegrityError, with nothing read, when it has more than ``bytes_max`` bytes.
        """
        return self._in_door(name, lambda folder: _read(folder, file, bytes_max))

    def reader(self, name: str, file: str) -> PosixReader | None:
        """A reader of one file of a door, or None when the door or the file is not there."""
        return self._in_door(name, lambda folder: _open(folder, file))

    def unfinished(self) -> builtins.list[str]:
        """Directories of doors that are being made, or whose makers died; a later door removes
        those of the dead."""
        return [name for name in self._names() if name.startswith(".")]

    def remove_unfinished(
        self, now_ns: int, older_than_s: float = ABANDONED_AGE_S, *, but: str = ""
    ) -> int:
        """Remove what killed processes left, all but the one named; how many there were.

        ``now_ns`` is the time by the clock of the store, in nanoseconds since 1970.
        """
        folder, count = self._existing(), 0
        for name in self.unfinished():
            there = None if folder is None or name == but else find(folder, name)
            if folder is not None and there is not None and now_ns - there[3] > older_than_s * 1e9:
                _remove_tree(folder, name)
                count += 1
        return count

    def sizes(self, name: str) -> dict[str, int]:
        """The files of a door and their sizes in bytes; empty when there is no such door."""

        def look(folder: Folder) -> dict[str, int]:
            names = sorted(os.listdir(folder.fd))
            return {n: os.stat(n, dir_fd=folder.fd, follow_symlinks=False).st_size for n in names}

        return self._in_door(name, look) or {}

    def remove(self, name: str) -> None:
        """Remove a door if it is there: at once for readers, and durably on return."""
        folder = self._existing()
        if folder is None:
            return
        gone = f".{check_name(name)}.tmp-{secrets.token_hex(12)}"
        try:
            os.rename(name, gone, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
        except FileNotFoundError:
            return
        except OSError as error:
            raise storage_error(error, os.path.join(self.path, name), "remove") from error
        folder.sync(force=True)
        _remove_tree(folder, gone)

    def close(self) -> None:
        """Release the folder. Safe to repeat."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def __enter__(self) -> Doors:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _existing(self) -> Folder | None:
        if self._opened is None:
            try:
                self._opened = open_folder(self._root, DOORS)
            except FileNotFoundError:
                return None
        return self._opened

    def _names(self) -> builtins.list[str]:
        folder = self._existing()
        if folder is None:
            return []
        try:
            return sorted(os.listdir(folder.fd))
        except OSError as error:
            raise storage_error(error, self.path, "list") from error

    def _in_door(self, name: str, ask: Callable[[Folder], _Answer]) -> _Answer | None:
        doors = self._existing()
        if doors is None:
            return None
        try:
            folder = open_folder(doors, check_name(name))
        except FileNotFoundError:
            return None
        try:
            return ask(folder)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise storage_error(error, folder.path, "read") from error
        finally:
            folder.close()


def _open(folder: Folder, file: str) -> PosixReader:
    fd, status = open_regular(folder, file)
    return PosixReader(fd, status.st_size, os.path.join(folder.path, file))


def _read(folder: Folder, file: str, bytes_max: int) -> bytes:
    with _open(folder, file) as reader:
        return read_record(reader, bytes_max)


def _replace(fd: int, new: str, name: str) -> None:
    """Put ``new`` in the place of ``name``; the old one is then called ``new``, or hidden."""
    try:
        rename_with(_EXCHANGE, fd, new, fd, name)
        return
    except OSError as error:
        if error.errno not in _NO_EXCHANGE:
            raise
    # Without an exchange there is a moment without a door; it can always be made again.
    hidden = f"{new}-old"
    os.rename(name, hidden, src_dir_fd=fd, dst_dir_fd=fd)
    os.rename(new, name, src_dir_fd=fd, dst_dir_fd=fd)
    os.rename(hidden, new, src_dir_fd=fd, dst_dir_fd=fd)


def _remove_tree(folder: Folder, name: str) -> None:
    """Remove a directory, or whatever has its name, as far as possible."""
    try:
        status = os.stat(name, dir_fd=folder.fd, follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            shutil.rmtree(name, ignore_errors=True, dir_fd=folder.fd)
        else:
            os.unlink(name, dir_fd=folder.fd)
    except OSError:
        pass  # a hidden leftover hurts nobody
