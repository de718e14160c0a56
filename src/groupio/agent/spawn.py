"""Finds the node's agent for a client, and starts it when there is none.

Any number of ranks may come at the same time: one of them starts the agent, under a lock, the
others find it. Imports little, because every rank runs it before its first save.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import msgspec

import groupio
from groupio import wire
from groupio.agent import process
from groupio.errors import AgentLost

log = logging.getLogger(__name__)

_POLL_S = 0.01
_CONNECT_S = 5.0


class AgentSettings(Protocol):
    """The settings, a dataclass, of which this module itself reads only the runtime directory."""

    @property
    def runtime_dir(self) -> str | None:
        """The runtime directory, or None for the default."""
        ...


def agent_paths(settings: AgentSettings) -> process.RuntimePaths:
    """Where this release's agent of this user lives under ``settings``; creates nothing."""
    return process.runtime_paths(settings.runtime_dir, groupio.__version__)


def ensure_agent(settings: AgentSettings, timeout_s: float = 30.0) -> Path:
    """The socket of a running agent of this release, which is started when there is none.

    A started agent gets ``settings`` as JSON. It may end between this call and the caller's
    connection, when it was idle: call again then. AgentLost, naming the log, when none is up
    after ``timeout_s``; InvalidInput when the runtime directory cannot be trusted.
    """
    deadline = time.monotonic() + timeout_s
    paths = agent_paths(settings)
    process.make_runtime_dir(paths)
    if paths.note:
        _say_once(paths.note)
    while not _answers(paths):
        with process.starter_lock(paths, deadline):
            # Another client may have started one while this one waited for the lock.
            if _answers(paths):
                break
            if not process.is_alive(paths):
                _start(paths, settings, deadline)
                break
        # One lives but does not listen: it is just ending. Its successor can start after that.
        if time.monotonic() >= deadline:
            raise AgentLost(
                f"the agent (process {process.holder_pid(paths)}) does not answer at "
                f"{paths.socket} and does not end; look into {paths.log} or stop that process",
                log=str(paths.log),
            )
        time.sleep(_POLL_S)
    return paths.socket


@lru_cache
def _say_once(note: str) -> None:
    log.warning("%s", note)


def _answers(paths: process.RuntimePaths) -> bool:
    try:
        wire.connect(paths.socket, timeout_s=_CONNECT_S).close()
    except (FileNotFoundError, ConnectionRefusedError):
        return False
    except (TimeoutError, BlockingIOError):
        return True  # its queue is full: it lives and is busy
    return True


def _start(paths: process.RuntimePaths, settings: AgentSettings, deadline: float) -> None:
    reader, writer = os.pipe()
    try:
        try:
            launcher = _launch(paths, settings, writer)
        finally:
            os.close(writer)
        with launcher:
            try:
                answer = process.read_ready(reader, deadline)
                # It has forked the agent proper and left; this only reaps it.
                launcher.wait(max(deadline - time.monotonic(), 1.0))
            except (TimeoutError, subprocess.TimeoutExpired):
                launcher.kill()
                answer = {"reason": "it did not get ready in time"}
    finally:
        os.close(reader)
    if answer is None:
        answer = {"reason": f"it ended at once (exit code {launcher.returncode})"}
    if not answer.get("ready"):
        raise AgentLost(
            f"the agent did not start: {answer.get('reason')}; look into {paths.log}",
            log=str(paths.log),
        )


def _launch(
    paths: process.RuntimePaths, settings: AgentSettings, ready_fd: int
) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-P",  # with the working directory "/", "-m" must not look for modules there
        "-m",
        "groupio.agent",
        "--runtime-dir",
        str(paths.directory),
        "--ready-fd",
        str(ready_fd),
        "--settings",
        msgspec.json.encode(settings).decode(),
    ]
    log = os.open(paths.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env=_environment(),
            start_new_session=True,
            close_fds=True,
            pass_fds=(ready_fd,),
        )
    except OSError as error:
        raise AgentLost(
            f"the agent did not start: {sys.executable} cannot be run ({error.strerror})",
            log=str(paths.log),
        ) from error
    finally:
        os.close(log)


def _environment() -> dict[str, str]:
    """The caller's environment, in which Python finds this very groupio from any directory.

    numpy's linear algebra, which the agent never uses, would start threads for every CPU.
    """
    ours = str(Path(groupio.__file__).resolve().parent.parent)
    given = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    path = [ours, *(os.path.abspath(p) for p in given)]
    return {
        "OPENBLAS_NUM_THREADS": "1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)),
    }
