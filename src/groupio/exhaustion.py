"""Limits of the system that a process runs into: what they are called, and going on without more.

The error number alone would be blamed on whatever was being done: a store for lack of descriptors,
the arena for a limit of file sizes.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from groupio.errors import GroupAborted, GroupIOError, StagingFull

log = logging.getLogger(__name__)

NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
"""Error numbers that say nothing of the file: the process, or the machine, has too many open."""

_EHWPOISON = 133  # the errno module lacks it
_NO_MEMORY = (errno.ENOMEM, errno.ENOSPC, errno.EFBIG, errno.EFAULT, errno.EAGAIN, _EHWPOISON)
_NO_THREAD = "can't start new thread"


def is_exhaustion(error: BaseException) -> bool:
    """Whether ``error``, of a call that only asks for memory, a descriptor or a thread, says that
    the system has none to give."""
    if isinstance(error, OSError):
        return error.errno in NO_DESCRIPTOR + _NO_MEMORY
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and _NO_THREAD in str(error)
    )


def why(error: BaseException, needed: int | None = None) -> str:
    """What is used up, and which limit to raise, as the second half of a sentence.

    ``needed`` is the memory that was asked for, in bytes.
    """
    number = error.errno if isinstance(error, OSError) else None
    pid = os.getpid()
    match number:
        case errno.EMFILE:
            limit = _limit(resource.RLIMIT_NOFILE)
            return (
                f"process {pid} has no file descriptor left (its limit is {limit}); raise `ulimit "
                "-n` where the job starts, or keep fewer stores and clients open"
            )
        case errno.ENFILE:
            return (
                "the machine has no file descriptor left; raise fs.file-max (see `ulimit -n` for "
                "the share of one process), or end what holds them"
            )
        case errno.EFBIG:
            limit = _limit(resource.RLIMIT_FSIZE)
            return f"process {pid} may make no file larger than {limit} bytes; raise `ulimit -f`"
        case 133:  # _EHWPOISON
            return "the memory is damaged; look at the kernel log and replace it"
        case None if isinstance(error, RuntimeError):
            limit = _limit(resource.RLIMIT_NPROC)
            return (
                f"process {pid} cannot start another thread; raise `ulimit -u` (it is {limit}), "
                "`ulimit -v` or the pids limit of its cgroup"
            )
    limit = _limit(resource.RLIMIT_AS)
    wanted = "it" if needed is None else f"{needed} bytes"
    return (
        f"the system has no memory for {wanted} ({os.strerror(number or errno.ENOMEM)}); lower the "
        "memory budget (GROUPIO_MEMORY_BYTES), or raise the limit: the memory of the cgroup, "
        f"`ulimit -v` (it is {limit}), vm.max_map_count or vm.overcommit_memory"
    )


def exhausted(error: BaseException, doing: str, *, needed: int | None = None) -> GroupIOError:
    """``error`` as StagingFull where memory is missing (``needed`` bytes), else GroupAborted.

    ``doing`` completes "cannot ...".
    """
    message = f"cannot {doing}: {why(error, needed)}"
    number = error.errno if isinstance(error, OSError) else None
    if number in NO_DESCRIPTOR or isinstance(error, RuntimeError):
        return GroupAborted(message)
    return StagingFull(message, needed=needed)


def _limit(which: int) -> str:
    soft, _ = resource.getrlimit(which)
    return "unlimited" if soft == resource.RLIM_INFINITY else str(soft)


def start_some(threads: Sequence[threading.Thread]) -> int:
    """Start as many of these threads as can be had, in order; how many those are.

    GroupAborted when there is none at all.
    """
    for number, thread in enumerate(threads):
        try:
            thread.start()
        except RuntimeError as error:
            if not number:
                raise exhausted(error, "begin") from error
            log.warning("going on with %d of %d threads: %s", number, len(threads), why(error))
            return number
    return len(threads)


class ThreadPool(ThreadPoolExecutor):
    """Has its first thread from the beginning, and goes on with fewer where no more can be had."""

    def __init__(
        self, count: int, name: str = "", initializer: Callable[[], None] | None = None
    ) -> None:
        """GroupAborted when no thread can be started."""
        super().__init__(count, name, initializer)
        try:
            self.submit(lambda: None)
        except RuntimeError as error:
            raise exhausted(error, f"start the threads {name!r}") from error

    def _adjust_thread_count(self) -> None:
        try:
            super()._adjust_thread_count()
        except RuntimeError as error:
            if not self._threads:
                raise
            log.warning("going on with %d threads: %s", len(self._threads), why(error))
