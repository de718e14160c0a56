"""Errors of the operating system as errors of groupio, with the path and what to do."""

from __future__ import annotations

import errno
import os

from groupio.errors import GroupIOError, Outcome, StorageError, StorageFull
from groupio.exhaustion import NO_DESCRIPTOR, why

_ADVICE = {
    errno.EROFS: "the file system is mounted read-only",
    errno.EACCES: "give this user the permission, or use another store",
    errno.EPERM: "the file system or its attributes forbid it",
    errno.ENOTDIR: "a store is a directory: give the path of one, or a path that does not exist",
    errno.ELOOP: "groupio follows no symbolic links inside a store: replace it by the real thing",
    errno.EIO: "the device failed: check its health and the kernel log",
    errno.ESTALE: "the file system went away: mount it again and reopen the store",
    errno.EFBIG: "the process (ulimit -f) or the file system takes no file of that size",
    errno.ENAMETOOLONG: "use a shorter path",
}

_FULL = (errno.ENOSPC, errno.EDQUOT)


def storage_error(
    error: OSError,
    path: str,
    doing: str,
    *,
    needed: int | None = None,
    near: int | None = None,
    outcome: Outcome = Outcome.NOT_COMMITTED,
) -> GroupIOError:
    """``error`` as StorageFull (disk full, quota used up) or StorageError.

    ``doing`` completes "cannot ...". ``needed`` is the size in bytes of what was to be written;
    ``near`` is an open descriptor on the file system concerned, to say what is free there.
    """
    number = error.errno if error.errno is not None else errno.EIO
    if number in _FULL:
        free = _free_bytes(near) if number == errno.ENOSPC else None
        need = "" if needed is None else f", {needed} bytes are needed"
        left = "" if free is None else f", {free} bytes are free"
        full = "the disk is full" if number == errno.ENOSPC else "the disk quota is used up"
        return StorageFull(
            f"cannot {doing} {path}: {full}{need}{left}; free some space or use another store",
            path=path,
            needed=needed,
            free=free,
            outcome=outcome,
        )
    if number in NO_DESCRIPTOR:
        return StorageError(
            f"cannot {doing} {path}, which is not the store's fault: {why(error)}",
            path=path,
            errno=number,
            outcome=outcome,
        )
    advice = _ADVICE.get(number)
    return StorageError(
        f"cannot {doing} {path}: {os.strerror(number)}" + (f"; {advice}" if advice else ""),
        path=path,
        errno=number,
        outcome=outcome,
    )


def _free_bytes(near: int | None) -> int | None:
    if near is None:
        return None
    try:
        return free_bytes(near)
    except OSError:  # the number only decorates the message of another error
        return None


def close_quietly(fd: int) -> None:
    """Close a descriptor that nothing was written through: its errors say nothing about bytes."""
    try:
        os.close(fd)
    except OSError:
        pass  # Linux has released the descriptor all the same


def free_bytes(fd: int) -> int:
    """Bytes that an unprivileged writer may still use on the file system of ``fd``."""
    stat = os.fstatvfs(fd)
    return stat.f_bavail * stat.f_frsize
