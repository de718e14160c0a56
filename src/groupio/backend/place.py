"""The directory behind a path, as one process shows it to another of the same machine.

In another mount namespace, as containers have, a path may lead elsewhere. The process that means a
directory opens it and hands the descriptor over; the other one compares it with what its own path
leads to. Equal device and inode are the same directory. Unequal ones may be: a network file system
that is mounted twice has two devices, and some number their files anew with each mount. Then a
file of a name that was never used decides: it is made under the path and looked for behind the
descriptor.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from typing import NamedTuple

from groupio.backend.faults import storage_error
from groupio.backend.records import TEMPORARY

LOOK_S = 2.0
"""A new file is looked for so long: network file systems may show it late."""

LOOK_FIRST_S = 0.02
"""The first wait between two looks; each further one is twice as long."""

_OPEN = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


class Place(NamedTuple):
    """The deepest directory of a path that exists, and ``rest``: the names that do not, yet."""

    device: int
    inode: int
    rest: str


def open_place(path: str, near: int | None = None) -> tuple[int, str]:
    """A descriptor of the deepest existing directory of ``path``, and the names below it.

    A relative path begins at the descriptor ``near``. OSError when it cannot be looked at.
    """
    rest = ""
    while True:
        try:
            return os.open(path or ".", _OPEN, dir_fd=near), rest
        except (FileNotFoundError, NotADirectoryError):
            if path in ("", "/"):
                raise
            path, name = os.path.split(path)
            rest = os.path.join(name, rest) if rest else name


def find_place(path: str, near: int | None = None) -> Place:
    """What :func:`open_place` finds, without keeping it open."""
    fd, rest = open_place(path, near)
    try:
        status = os.fstat(fd)
    finally:
        os.close(fd)
    return Place(status.st_dev, status.st_ino, rest)


def is_same_place(path: str, shown: int, rest: str) -> bool:
    """Whether ``path`` leads to ``rest`` below the directory ``shown``, by a new file in it.

    Blocks for up to LOOK_S. StorageError when the file cannot be made.
    """
    until = time.monotonic() + LOOK_S
    wait_s = LOOK_FIRST_S
    while True:
        own, below = open_place(path)
        try:
            theirs, missing = open_place(rest, shown)
            try:
                # Another process may be making the directories just now.
                if below == missing and _shares_files(path, own, theirs, until):
                    return True
            finally:
                os.close(theirs)
        finally:
            os.close(own)
        if time.monotonic() + wait_s > until:
            return False
        time.sleep(wait_s)
        wait_s *= 2


def _shares_files(path: str, own: int, theirs: int, until: float) -> bool:
    if os.path.samestat(os.fstat(own), os.fstat(theirs)):
        return True
    name = TEMPORARY + secrets.token_hex(12)
    try:
        os.close(
            os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600, dir_fd=own)
        )
    except OSError as error:
        raise storage_error(error, path, "prove which directory is at") from error
    wait_s = LOOK_FIRST_S
    try:
        while not _is_in(theirs, name):
            if time.monotonic() + wait_s > until:
                return False
            time.sleep(wait_s)
            wait_s *= 2
        return True
    finally:
        with contextlib.suppress(OSError):  # leftovers are removed by age
            os.unlink(name, dir_fd=own)


def _is_in(directory: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True
