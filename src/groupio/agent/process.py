"""Makes the agent a process of its own: its directory, locks, socket and detachment.

All agents and clients of one user on one node meet in the runtime directory::

    agent-<version>.sock    where clients connect; its presence alone proves nothing
    agent-<version>.lock    held (flock) by whoever starts or retires an agent
    agent-<version>.alive   held (flock) by a running agent for its whole life
    agent-<version>.log     its log, rotated

Locks belong to open files, so the end of a process, however it comes, frees them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import select
import socket
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from groupio import wire
from groupio.errors import AgentLost, InvalidInput
from groupio.exhaustion import NO_DESCRIPTOR
from groupio.settings import is_unicode

_LOCK_POLL_S = 0.005
_TAKE_S = 0.5
"""A probe of the life lock (:func:`is_alive`) may hold it for a moment, no longer than this."""
_READY_BYTES_MAX = 64 << 10


@dataclass(frozen=True, slots=True)
class RuntimePaths:
    """The files of one version's agent; ``directory`` is private to the user."""

    directory: Path
    socket: Path
    lock: Path
    alive: Path
    log: Path
    note: str = ""
    """Why it is not where the environment says, "" when it is."""


def runtime_paths(configured: str | None, version: str) -> RuntimePaths:
    """Where the agent of ``version`` lives; creates nothing.

    ``configured`` (the setting) wins, then $XDG_RUNTIME_DIR/groupio unless that directory is
    another user's (as after su and sudo -E), then /tmp/groupio-<uid>. InvalidInput when
    ``configured`` is not an absolute path.
    """
    note = ""
    if configured is not None:
        directory = Path(configured)
        if not directory.is_absolute():
            raise InvalidInput(
                f"the runtime directory {configured!r} is not absolute; give the full path, since "
                "the agent does not share the working directory of its clients"
            )
    else:
        session = os.environ.get("XDG_RUNTIME_DIR", "")
        directory = Path(f"/tmp/groupio-{os.getuid()}")
        if os.path.isabs(session) and is_unicode(session):
            owner = _owner_of(session)
            if owner == os.getuid():
                directory = Path(session, "groupio")
            elif owner is not None:
                note = (
                    f"XDG_RUNTIME_DIR={session} is another user's than {os.getuid()} (as after su "
                    f"or sudo -E): the agent's place is {directory} instead; unset it"
                )
    stem = f"agent-{version}"
    return RuntimePaths(
        directory=directory,
        socket=directory / f"{stem}.sock",
        lock=directory / f"{stem}.lock",
        alive=directory / f"{stem}.alive",
        log=directory / f"{stem}.log",
        note=note,
    )


def _owner_of(directory: str) -> int | None:
    """The user of a directory, None when there is none."""
    try:
        status = os.stat(directory)
    except PermissionError:
        return -1  # whoever may not even look at it does not own it
    except OSError:
        return None
    return status.st_uid if stat.S_ISDIR(status.st_mode) else None


def make_runtime_dir(paths: RuntimePaths) -> None:
    """Create the runtime directory (mode 0700), or check the one that is there.

    InvalidInput when it is a link, is not a directory, belongs to somebody else or can be written
    by others: whoever can write there could pose as the agent.
    """
    directory = paths.directory
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        status = directory.lstat()
    except OSError as error:
        raise InvalidInput(
            f"the runtime directory {directory} cannot be made: {error.strerror}; set "
            "GROUPIO_RUNTIME_DIR to a directory of your own"
        ) from error
    if stat.S_ISLNK(status.st_mode) or not stat.S_ISDIR(status.st_mode):
        problem = "is a symbolic link or not a directory"
    elif status.st_uid != os.getuid():
        problem = f"belongs to user {status.st_uid}, not to {os.getuid()}"
    elif stat.S_IMODE(status.st_mode) & 0o022:
        problem = f"can be written by others (mode {stat.S_IMODE(status.st_mode):04o}, want 0700)"
    else:
        return
    raise InvalidInput(
        f"the runtime directory {directory} {problem}; correct it or set GROUPIO_RUNTIME_DIR to "
        "a directory of your own"
    )


# -- locks -----------------------------------------------------------------------------------------


def try_lock(path: Path) -> int | None:
    """A descriptor that holds the exclusive flock of ``path``, or None when another holds it.

    The lock lasts until :func:`unlock` or the end of the process. OSError when the file cannot
    be opened.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(path, flags, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextlib.contextmanager
def starter_lock(paths: RuntimePaths, deadline: float) -> Iterator[None]:
    """Hold the starter's lock; ``deadline`` is a reading of ``time.monotonic``.

    AgentLost when another process held it all the time.
    """
    while (fd := try_lock(paths.lock)) is None:
        if time.monotonic() >= deadline:
            raise AgentLost(
                f"another process kept starting an agent in {paths.directory} until the time ran "
                f"out; look into {paths.log}",
                log=str(paths.log),
            )
        time.sleep(_LOCK_POLL_S)
    try:
        yield
    finally:
        unlock(fd)


def unlock(fd: int) -> None:
    """Free a lock that :func:`try_lock` took.

    Closing alone would not do: a child forked meanwhile has the same open file.
    """
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def is_alive(paths: RuntimePaths) -> bool:
    """Whether an agent of this version holds its life lock."""
    fd = try_lock(paths.alive)
    if fd is None:
        return True
    unlock(fd)
    return False


def holder_pid(paths: RuntimePaths) -> int | None:
    """The process id that the last agent wrote into its life lock, if it can be read."""
    try:
        return int(paths.alive.read_text())
    except (OSError, ValueError):
        return None


# -- the agent's side ------------------------------------------------------------------------------


class Residence:
    """A running agent's hold on the runtime directory: its life lock and its listening socket."""

    def __init__(self, paths: RuntimePaths, alive_fd: int, listener: socket.socket) -> None:
        self.paths = paths
        self.listener = listener
        self._alive_fd = alive_fd
        self._spare = -1
        self.keep_spare()

    def keep_spare(self) -> None:
        """Hold a descriptor back, with which a client can be told that there are no more."""
        if self._spare < 0:
            with contextlib.suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def accept(self) -> tuple[socket.socket | None, OSError | None]:
        """The next connection, if there is one; with an error if it can only be refused.

        Call :meth:`keep_spare` once that connection is closed. OSError when none can be taken.
        """
        try:
            return self.listener.accept()[0], None
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return None, None
        except OSError as error:
            if error.errno not in NO_DESCRIPTOR or self._spare < 0:
                self.keep_spare()
                raise
            os.close(self._spare)
            self._spare = -1
            return self.listener.accept()[0], error

    @classmethod
    def take(cls, paths: RuntimePaths) -> Residence:
        """Take the life lock, then bind the socket (replacing that of a dead agent).

        AgentLost when another agent of this version lives.
        """
        deadline = time.monotonic() + _TAKE_S
        while (alive_fd := try_lock(paths.alive)) is None:
            if time.monotonic() >= deadline:
                raise AgentLost(
                    f"an agent (process {holder_pid(paths)}) already serves {paths.directory}; "
                    "use that one or stop it first",
                    log=str(paths.log),
                )
            time.sleep(_LOCK_POLL_S)
        try:
            os.ftruncate(alive_fd, 0)
            os.pwrite(alive_fd, f"{os.getpid()}\n".encode(), 0)
            # The name can only be a dead agent's: a living one would hold the life lock.
            paths.socket.unlink(missing_ok=True)
            listener = wire.listen(paths.socket)
        except BaseException:
            os.close(alive_fd)
            raise
        return cls(paths, alive_fd, listener)

    def retire(self) -> bool:
        """Take the socket's name away, so that new clients start another agent.

        False, and nothing is changed, while somebody is just starting one (who may be about to
        connect here): try again later. After True, accept once more: a client may have connected
        before the name went.
        """
        lock = try_lock(self.paths.lock)
        if lock is None:
            return False
        try:
            self.paths.socket.unlink(missing_ok=True)
        finally:
            unlock(lock)
        return True

    def close(self) -> None:
        """Close the socket and free the life lock; the last thing an agent does."""
        self.listener.close()
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
        os.close(self._alive_fd)


class ReadySignal:
    """The pipe through which a starting agent tells its starter how it went; used once."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.is_used = False
        os.set_inheritable(fd, False)

    def ready(self) -> None:
        """Say that clients can connect."""
        self._say({"ready": True, "pid": os.getpid()})

    def failed(self, reason: str) -> None:
        """Say that the agent ends, and why, in one sentence."""
        self._say({"ready": False, "reason": reason[:4000]})

    def _say(self, answer: dict[str, object]) -> None:
        self.is_used = True
        try:
            os.write(self._fd, json.dumps(answer).encode())
        except BrokenPipeError:
            pass  # the starter gave up waiting or died: the agent serves whoever comes next
        finally:
            os.close(self._fd)


def read_ready(fd: int, deadline: float) -> dict[str, object] | None:
    """What :class:`ReadySignal` said, or None when its process ended without a word.

    ``deadline`` is a reading of ``time.monotonic``; TimeoutError after it.
    """
    data = b""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while len(data) < _READY_BYTES_MAX:
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            raise TimeoutError("the agent did not get ready in time")
        piece = os.read(fd, _READY_BYTES_MAX)
        if not piece:
            break
        data += piece
    if not data:
        return None
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError):
        answer = None
    if isinstance(answer, dict):
        return answer
    return {"reason": f"it said {data[:80]!r}, which is no answer of an agent"}


def detach(*, double_fork: bool = True) -> None:
    """Leave the starter's session, process group, working directory and umask.

    Only while the process has one thread. With ``double_fork`` the caller goes on in a child
    whose parent is gone: the starter never has a zombie and the agent never gets a terminal.
    """
    if double_fork and os.fork() > 0:
        os._exit(0)
    # A process group's leader (a shell's job) cannot make a session; it is one already.
    if os.getpid() != os.getpgrp():
        os.setsid()
    os.chdir("/")
    os.umask(0o077)


def take_all_processors() -> tuple[int, int]:
    """Run on every processor that the cgroup allows, not only on those of the rank that started it.

    Only while the process has one thread. How many it had, and how many it has now.
    """
    before = len(os.sched_getaffinity(0))
    # Those outside the cpuset are left out by the system.
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    return before, len(os.sched_getaffinity(0))


def raise_fd_limit() -> int:
    """Raise the soft limit of open files to the hard one; returns the limit now in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
