"""Directories of a POSIX store, held open: names, creation, and when an entry is durable.

Everything inside a store is reached through the descriptor of its directory and never through a
symbolic link, so a mount or a rename over the store's path cannot send bytes elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import threading
from dataclasses import dataclass

from groupio.backend.faults import close_quietly, storage_error
from groupio.errors import InvalidInput, Outcome, StorageError

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,254}")

_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def check_name(name: str) -> str:
    """``name`` itself; InvalidInput unless it is a plain file name of a record or segment."""
    if not _NAME.fullmatch(name):
        raise InvalidInput(
            f"{name!r} is not a name for a file in a store: use 1 to 255 letters, digits, "
            "'_', '-' and '.', not beginning with '.' or '-'"
        )
    return name


@dataclass(frozen=True, slots=True)
class Modes:
    """Permission bits for what a store creates.

    ``exact``: they are set whatever the umask of this process, else that is applied to them.
    ``stated``: somebody asked for them, so that a file system without them is an error.
    """

    file: int = 0o666
    directory: int = 0o777
    exact: bool = False
    stated: bool = False

    @classmethod
    def of(cls, file_mode: int | None, umask: int | None = None) -> Modes:
        """Those that a process with ``umask`` would give (None: this one).

        ``file_mode`` overrules it, with directories open to those who may read.
        """
        if file_mode is None:
            if umask is None:
                return cls()
            # A store that its owner cannot use would be of no use to anybody.
            return cls(0o666 & ~umask | 0o600, 0o777 & ~umask | 0o700, exact=True)
        if file_mode & ~0o666 or file_mode & 0o600 != 0o600:
            raise InvalidInput(
                f"file_mode 0o{file_mode:o} does not suit a store: the owner must read and "
                "write (0o600), others may be given read or write, such as 0o640 or 0o660"
            )
        directory = file_mode | (file_mode & 0o444) >> 2
        return cls(file_mode, directory, exact=True, stated=True)

    @property
    def asked(self) -> tuple[int, int]:
        """The modes to make a file and a directory with, before :meth:`settle`.

        The system takes the umask off them, or what a list of the parent leaves out.
        """
        return (0o666, 0o777) if self.exact and not self.stated else (self.file, self.directory)

    def settle(self, made: int, parent: int | str) -> None:
        """Give an open file or directory that was just made in ``parent`` its mode. OSError."""
        if not self.exact or (not self.stated and _has_default_acl(parent)):
            return  # the list of the parent took the place of the umask already
        now = os.fstat(made).st_mode
        # A new directory has the group of a setgid parent, and its bit.
        wanted = self.directory | now & stat.S_ISGID if stat.S_ISDIR(now) else self.file
        if stat.S_IMODE(now) == wanted:
            return
        try:
            os.fchmod(made, wanted)
        except PermissionError:
            if self.stated:  # else: such a file system gives all files the modes of its mount
                raise


def _has_default_acl(directory: int | str) -> bool:
    try:
        return bool(os.getxattr(directory, "system.posix_acl_default"))
    except OSError:  # there is none, or the file system has no such lists
        return False


class Folder:
    """An open directory of the store.

    Counts the entries made and those known to be durable, so that a flush that would change
    nothing is left out. After a failed flush every later one fails: the system may have
    forgotten what it could not write.
    """

    def __init__(self, fd: int, path: str) -> None:
        """Take over ``fd``; it is closed when this fails."""
        self.fd = fd
        self.path = path
        try:
            status = os.fstat(fd)
        except OSError as error:
            self.close()
            raise storage_error(error, path, "look at") from error
        self.identity = (status.st_dev, status.st_ino)
        self._lock = threading.Lock()
        self._made = 0
        self._durable = 0
        self._failed: int | None = None
        self._doubted = False

    @property
    def is_sound(self) -> bool:
        """No flush of the directory has failed, and nothing :meth:`doubt` was told of."""
        return self._failed is None and not self._doubted

    @property
    def is_removed(self) -> bool:
        """The directory is in no other one any more, as far as its file system says."""
        try:
            return os.fstat(self.fd).st_nlink == 0
        except OSError:  # it is away
            return False

    def doubt(self) -> None:
        """Note that a file of the directory could not be written: its file system may be away.

        A descriptor of a file system that went away may fail for ever, and a new one does not.
        """
        self._doubted = True

    def entry_made(self) -> None:
        """Note a new or changed entry."""
        with self._lock:
            self._made += 1

    def sync(self, *, force: bool = False, outcome: Outcome = Outcome.NOT_COMMITTED) -> None:
        """Make the entries noted so far durable; ``force`` also those of other processes.

        ``outcome`` stands on the error of a flush that fails.
        """
        with self._lock:
            if self._failed is not None:
                raise StorageError(
                    f"an earlier flush of {self.path} failed ({os.strerror(self._failed)}), what "
                    "was created there since may be lost: check the device, reopen the store",
                    path=self.path,
                    errno=self._failed,
                    outcome=outcome,
                )
            made = self._made
            if made == self._durable and not force:
                return
        try:
            os.fsync(self.fd)
        except OSError as error:
            with self._lock:
                self._failed = error.errno or errno.EIO
            raise storage_error(error, self.path, "flush", outcome=outcome) from error
        with self._lock:
            self._durable = max(self._durable, made)

    def close(self) -> None:
        """Close the descriptor. Safe to repeat."""
        if self.fd >= 0:
            close_quietly(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        # A backend that was given up after a failed flush is closed by its last user.
        self.close()


def open_folder(parent: Folder, name: str) -> Folder:
    """Open the directory ``name`` of ``parent``; FileNotFoundError when it is absent."""
    path = os.path.join(parent.path, name)
    try:
        fd = os.open(name, _OPEN_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent.fd)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _honest(error, parent.fd, name, path) from error
    return Folder(fd, path)


def _honest(error: OSError, parent: int, name: str, path: str) -> Exception:
    # O_DIRECTORY hides a symbolic link behind ENOTDIR.
    if error.errno == errno.ENOTDIR:
        try:
            status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        except OSError:  # the first error says more
            return storage_error(error, path, "open")
        if stat.S_ISLNK(status.st_mode):
            return storage_error(OSError(errno.ELOOP, "symbolic link"), path, "open")
    return storage_error(error, path, "open")


def make_folder(parent: Folder, name: str, modes: Modes) -> Folder:
    """Open the directory ``name`` of ``parent``, made first if absent; not durable yet."""
    path = os.path.join(parent.path, name)
    try:
        return open_folder(parent, name)
    except FileNotFoundError:
        pass
    try:
        os.mkdir(name, modes.asked[1], dir_fd=parent.fd)
        made = True
    except FileExistsError:
        made = False  # another process was faster; both flush
    except OSError as error:
        raise storage_error(error, path, "create", near=parent.fd) from error
    parent.entry_made()
    try:
        folder = open_folder(parent, name)
    except FileNotFoundError as error:
        raise storage_error(error, path, "open") from error
    try:
        if made:
            modes.settle(folder.fd, parent.fd)
    except OSError as error:
        folder.close()
        with contextlib.suppress(OSError):  # an empty directory hurts nobody
            os.rmdir(name, dir_fd=parent.fd)
        raise storage_error(error, path, "set the mode of") from error
    return folder


def open_root(path: str) -> Folder:
    """Open the store's own directory (symbolic links on the way to it are the user's affair)."""
    try:
        fd = os.open(path, _OPEN_DIRECTORY)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise storage_error(error, path, "open the store") from error
    return Folder(fd, path)


def make_root(path: str, modes: Modes) -> list[str]:
    """Create ``path`` and the directories above it that are missing; those that were, in order."""
    missing: list[str] = []
    step = path
    while not os.path.isdir(step):
        if os.path.lexists(step) and not os.path.exists(step):
            raise StorageError(
                f"cannot create the store {path}: {step} is a symbolic link that leads nowhere; "
                "make its target or remove it",
                path=path,
                errno=errno.ENOENT,
            )
        if os.path.exists(step):
            raise storage_error(OSError(errno.ENOTDIR, "file"), step, "create a store at")
        missing.append(step)
        step = os.path.dirname(step)
    for directory in reversed(missing):
        try:
            os.mkdir(directory, modes.asked[1])
            fd = os.open(directory, _OPEN_DIRECTORY | os.O_NOFOLLOW)
            try:
                modes.settle(fd, os.path.dirname(directory))
            finally:
                close_quietly(fd)
        except FileExistsError:
            pass  # another process was faster; both flush
        except OSError as error:
            raise storage_error(error, directory, "create the directory") from error
    return missing


def sync_ancestors(root: Folder, made: list[str]) -> None:
    """Flush every directory above ``root`` on its file system.

    All of them, not only the parents of those in ``made`` (created by this process): another
    process may have created the rest a moment ago and died before it flushed. A directory that
    may not be read is left out unless its child is in ``made``.
    """
    child = os.path.realpath(root.path)
    new = {os.path.realpath(path) for path in made}
    device = root.identity[0]
    while (parent := os.path.dirname(child)) != child:
        try:
            fd = os.open(parent, _OPEN_DIRECTORY)
        except OSError as error:
            if child in new or error.errno not in (errno.EACCES, errno.EPERM):
                raise storage_error(error, parent, "flush the directory") from error
            child = parent
            continue
        try:
            if os.fstat(fd).st_dev != device and child not in new:
                return  # the mount point is an entry of another file system, made by nobody here
            os.fsync(fd)
        except OSError as error:
            raise storage_error(error, parent, "flush the directory") from error
        finally:
            close_quietly(fd)
        child = parent
