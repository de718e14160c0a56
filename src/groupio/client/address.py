"""Checks the address of a store as far as that goes without opening it."""

from __future__ import annotations

import errno
import json
import os
import stat

from groupio.errors import InvalidInput, StorageError
from groupio.settings import is_unicode

_STORE_RECORD = "groupio.json"
_RECORD_BYTES_MAX = 1 << 16
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


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
    if not is_unicode(path):
        raise InvalidInput(
            f"the path {path!r} of the store is not valid UTF-8, which the records and messages of "
            "groupio hold; rename the directories concerned"
        )
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


def recorded_job(path: str) -> str:
    """The job that the store at ``path`` belongs to; "" when there is none, or nobody can tell.

    A store that was renamed, or is reached through a link, keeps its job.
    """
    try:
        fd = os.open(os.path.join(path, _STORE_RECORD), _READ)
        try:
            job = json.loads(os.read(fd, _RECORD_BYTES_MAX))["job"]
        finally:
            os.close(fd)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""  # what is wrong with it is said by whoever opens the store
    return job if isinstance(job, str) and is_unicode(job) else ""


def refuse_checkpoint(path: str) -> None:
    """InvalidInput when ``path`` is a checkpoint of torch, or the door of an epoch, not a store.

    It says how to import the one and where the store of the other is. Nothing is read.
    """
    if not os.path.isfile(os.path.join(path, ".metadata")):
        return
    folder, step = os.path.split(os.path.abspath(path))
    store, kind = os.path.split(folder)
    if kind == "dcp" and os.path.isdir(os.path.join(store, "epochs")):
        raise InvalidInput(
            f"{path} is a view of one epoch of a store; give the store {store} and the epoch {step}"
        )
    raise InvalidInput(
        f"{path} is a checkpoint of torch.distributed.checkpoint, not a store of groupio; to "
        "import it load it with torch.distributed.checkpoint.load, then save the state dict with "
        "groupio.torch.save into another directory"
    )
