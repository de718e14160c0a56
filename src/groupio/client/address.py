"""Where a store is, checked as far as it can be without opening it."""

from __future__ import annotations

import errno
import os
import stat

from groupio.errors import InvalidInput, StorageError


def store_address(store: str | os.PathLike[str]) -> str:
    """The absolute path of the store; its URL forms are the backend's business.

    InvalidInput when it is of no supported kind, StorageError (ENOTDIR) when it is a file.
    """
    try:
        text = os.fspath(store)
    except TypeError:
        text = None
    if not isinstance(text, str):
        raise InvalidInput(
            f"the store is of type {type(store).__name__}; give a path or a file:// URL"
        )
    if not text or "\0" in text or "://" in text:
        from groupio.backend.tree import store_path

        path = store_path(text)
    else:
        path = os.path.abspath(text)
    try:
        is_directory = stat.S_ISDIR(os.stat(path).st_mode)
    except NotADirectoryError:
        is_directory = False
    except OSError:
        return path  # absent or unreadable: whoever uses it finds out, and says it best
    if not is_directory:
        raise StorageError(
            f"the store {path} is a file, or lies below one; give the path of a directory, which "
            "need not exist",
            path=path,
            errno=errno.ENOTDIR,
        )
    return path
