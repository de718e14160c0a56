"""Small files that are created whole or not at all: temporary name, flush, then the real name."""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import stat

from groupio.backend import mounts
from groupio.backend.faults import close_quietly, storage_error
from groupio.backend.folders import Folder, Modes
from groupio.errors import IntegrityError, Outcome, StorageError

TEMPORARY = ".tmp-"
"""Names with this prefix are unfinished; no listing shows them."""

FileId = tuple[int, int, int, int]
"""(device, inode, bytes, modification time): tells whether two names are the same file."""

LINK = "link"
RENAME = "rename_noreplace"

_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_NO_RENAME = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
_RENAME_NOREPLACE = 1


def file_id(status: os.stat_result) -> FileId:
    """The identity of the file that ``status`` describes."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def find(folder: Folder, name: str, *, outcome: Outcome = Outcome.NOT_COMMITTED) -> FileId | None:
    """The identity of what has that name in ``folder``; None when it is absent.

    ``outcome`` stands on the error of a failed look-up.
    """
    try:
        return file_id(os.stat(name, dir_fd=folder.fd, follow_symlinks=False))
    except FileNotFoundError:
        return None
    except OSError as error:
        path = os.path.join(folder.path, name)
        raise storage_error(error, path, "look up", outcome=outcome) from error


def open_regular(folder: Folder, name: str) -> tuple[int, os.stat_result]:
    """Open a regular file of ``folder`` to read; FileNotFoundError when it is absent.

    Never follows a symbolic link and never waits for the writer of a planted pipe.
    """
    path = os.path.join(folder.path, name)
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, dir_fd=folder.fd)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise storage_error(error, path, "open") from error
    try:
        status = os.fstat(fd)
    except OSError as error:
        close_quietly(fd)
        raise storage_error(error, path, "look at") from error
    if not stat.S_ISREG(status.st_mode):
        close_quietly(fd)
        number = errno.EISDIR if stat.S_ISDIR(status.st_mode) else errno.EINVAL
        raise StorageError(
            f"{path} is not a regular file: something else than groupio put it there, remove it",
            path=path,
            errno=number,
        )
    return fd, status


def write_temporary(
    folder: Folder, data: bytes, modes: Modes, *, durable: bool
) -> tuple[str, FileId]:
    """Write ``data`` under a new temporary name; flushed when ``durable``.

    Returns the name and the identity. After an error nothing is left behind.
    """
    name = TEMPORARY + secrets.token_hex(12)
    path = os.path.join(folder.path, name)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, modes.asked[0], dir_fd=folder.fd)
    except OSError as error:
        raise storage_error(
            error, path, "create a record in", needed=len(data), near=folder.fd
        ) from error
    try:
        try:
            modes.settle(fd, folder.fd)
            write_all(fd, data, 0)
            if durable:
                os.fsync(fd)
            identity = file_id(os.fstat(fd))
        finally:
            os.close(fd)
    except OSError as error:
        full = storage_error(error, path, "write", needed=len(data), near=folder.fd)
        remove_quietly(folder, name)
        raise full from error
    return name, identity


def write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset``, whatever the number of calls it takes."""
    rest = memoryview(data)
    while rest:
        count = os.pwrite(fd, rest, offset)
        if count == 0:
            raise OSError(errno.EIO, "the system wrote nothing")
        rest, offset = rest[count:], offset + count


def remove_quietly(folder: Folder, name: str) -> None:
    """Remove a name whose staying does no harm; says nothing when it cannot."""
    try:
        os.unlink(name, dir_fd=folder.fd)
    except OSError:
        pass  # cleaning up after another error, or of a leftover that readers ignore


class NotPrivate(Exception):
    """A file cannot be kept from other users; the message says why. Internal."""


_PRIVATE_BYTES_MAX = 4096


def private_file(folder: Folder, name: str, data: bytes) -> bytes:
    """The bytes of a file that only this user can read, made with ``data`` if absent.

    Its mode is 0600, whatever the umask. NotPrivate where that does not hold: the file system
    gives files other modes or owners, or does not look at them; the file is a link, another
    user's, or open to others.
    """
    path = os.path.join(folder.path, name)
    if not mounts.keeps_modes(folder.fd):
        raise NotPrivate(f"its file system lets every user read {path} whatever its mode")
    found = _read_private(folder, name, path)
    if found is not None:
        return found
    try:
        modes = Modes(0o600, exact=True, stated=True)
        temporary, identity = write_temporary(folder, data, modes, durable=True)
    except StorageError as error:
        if error.errno == errno.EPERM:  # the answer to the change of the mode
            raise NotPrivate(f"the file system of {path} does not give it the mode 0600") from None
        raise
    try:
        _check_private(os.stat(temporary, dir_fd=folder.fd, follow_symlinks=False), path)
        Placer().place(folder, temporary, folder, name, identity)
    except OSError as error:
        raise storage_error(error, path, "look at") from error
    finally:
        remove_quietly(folder, temporary)
    found = _read_private(folder, name, path)
    if found is None:
        raise storage_error(OSError(errno.ENOENT, "it was removed"), path, "read")
    return found


def _read_private(folder: Folder, name: str, path: str) -> bytes | None:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, dir_fd=folder.fd)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotPrivate(f"{path} is a symbolic link: remove it") from None
        if error.errno in (errno.EACCES, errno.EPERM):
            raise NotPrivate(f"{path} belongs to another user") from None
        raise storage_error(error, path, "open") from error
    try:
        _check_private(os.fstat(fd), path)
        return os.read(fd, _PRIVATE_BYTES_MAX)
    except OSError as error:
        raise storage_error(error, path, "read") from error
    finally:
        close_quietly(fd)


def _check_private(status: os.stat_result, path: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise NotPrivate(f"{path} is not a regular file: remove it")
    if status.st_uid != os.geteuid():
        raise NotPrivate(f"{path} belongs to user {status.st_uid}, not to {os.geteuid()}")
    mode = stat.S_IMODE(status.st_mode)
    if mode != 0o600:
        raise NotPrivate(
            f"{path} has the mode {mode:04o} instead of 0600: correct it, unless its file system "
            "gives all files that mode"
        )


class Placer:
    """Gives a finished file its name, only if that name is free.

    Hard links do it on every POSIX file system; where they are refused (some FUSE and SMB
    mounts) ``renameat2(RENAME_NOREPLACE)`` does. ``mode`` is what works here, "" until known.
    """

    def __init__(self) -> None:
        self.mode = ""

    def place(self, source: Folder, old: str, target: Folder, new: str, identity: FileId) -> bool:
        """Name the file ``old`` (which is ``identity``) ``new``; False when ``new`` is taken.

        ``old`` may stay behind as a second name. Not durable yet. A name that turns out to be
        this very file counts as placed: the answer of an earlier try was lost on the way.
        """
        path = os.path.join(target.path, new)
        target.entry_made()
        try:
            if self.mode != RENAME:
                try:
                    os.link(
                        old,
                        new,
                        src_dir_fd=source.fd,
                        dst_dir_fd=target.fd,
                        follow_symlinks=False,
                    )
                    self.mode = LINK
                    return True
                except OSError as error:
                    if self.mode == LINK or error.errno not in _NO_LINKS:
                        raise
            rename_with(_RENAME_NOREPLACE, source.fd, old, target.fd, new)
            self.mode = RENAME
            return True
        except FileExistsError:
            return find(target, new, outcome=Outcome.UNKNOWN) == identity
        except FileNotFoundError as error:
            if find(target, new, outcome=Outcome.UNKNOWN) == identity:
                return True
            raise storage_error(error, path, "create", outcome=Outcome.UNKNOWN) from error
        except OSError as error:
            if self.mode == "" and error.errno in _NO_RENAME:
                raise StorageError(
                    f"the file system of {target.path} has neither hard links nor a rename that "
                    "refuses to replace, so epochs cannot be decided safely there: use another",
                    path=path,
                    errno=error.errno,
                ) from error
            raise storage_error(
                error, path, "create", near=target.fd, outcome=Outcome.UNKNOWN
            ) from error


def rename_with(flags: int, source: int, old: str, target: int, new: str) -> None:
    """``renameat2`` with ``flags``; OSError (ENOSYS) where the C library has none."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:  # a C library older than 2018
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    ctypes.set_errno(0)
    if function(source, os.fsencode(old), target, os.fsencode(new), flags) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class PosixReader:
    """An open file of a store; see :class:`groupio.backend.base.RandomReader`."""

    def __init__(self, fd: int, size: int, path: str) -> None:
        self._fd = fd
        self.size = size
        self.path = path

    def read(self, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes from ``offset``; IntegrityError when the file is shorter."""
        self._check(offset, length)  # before the allocation: a damaged record may ask anything
        try:
            data = os.pread(self._fd, length, offset)
        except OSError as error:
            raise storage_error(error, self.path, "read") from error
        if len(data) == length:
            return data
        rest = bytearray(length - len(data))
        self.read_into(offset + len(data), memoryview(rest))
        return data + rest

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill ``view`` from ``offset``; IntegrityError when the file is shorter."""
        rest = view.cast("B") if view.format != "B" or view.ndim != 1 else view
        self._check(offset, len(rest))
        while rest:
            try:
                count = os.preadv(self._fd, [rest], offset)
            except OSError as error:
                raise storage_error(error, self.path, "read") from error
            if count == 0:
                raise _short(self.path, offset + len(rest), offset)
            rest, offset = rest[count:], offset + count

    def _check(self, offset: int, length: int) -> None:
        if offset < 0 or length < 0 or offset + length > self.size:
            raise _short(self.path, offset + length, self.size)

    def close(self) -> None:
        """Release the file. Safe to repeat; no read may be running."""
        if self._fd >= 0:
            close_quietly(self._fd)
            self._fd = -1

    def __enter__(self) -> PosixReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _short(path: str, wanted: int, size: int) -> IntegrityError:
    return IntegrityError(
        f"{path} has {size} bytes, {wanted} are expected: it was truncated or the record that "
        "refers to it is damaged",
        path=path,
    )
