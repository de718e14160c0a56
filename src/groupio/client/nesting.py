"""Calls that interrupt another call of groupio in the same thread.

A signal handler, a callback of a handle, or a finalizer that the garbage collector runs can come
between any two instructions, also while its thread holds locks of this package. Such a nested call
must not take these locks, nor wait for another thread that needs them. It is recognised by the
stack: an interrupted call of groupio is among the frames below it. There is no state that an
exception out of a handler could leave wrong.
"""

from __future__ import annotations

import importlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar

from groupio.exhaustion import start_some

_Function = TypeVar("_Function", bound=Callable[..., Any])

_IMPORT_S = 30.0
_POLL_S = 0.01

_calls: set[CodeType] = set()
_threads: set[CodeType] = set()


def call(function: _Function) -> _Function:
    """Mark a function that takes locks on the thread of a caller."""
    _calls.add(function.__code__)
    return function


def thread(function: _Function) -> _Function:
    """Mark the main function of a thread that takes locks which callers also need."""
    _threads.add(function.__code__)
    return function


def is_nested() -> bool:
    """Whether the function that asks was called inside another marked one of its thread."""
    frame = sys._getframe(1).f_back
    while frame is not None:
        if frame.f_code in _calls or frame.f_code in _threads:
            return True
        frame = frame.f_back
    return False


def is_inside(function: Callable[..., Any]) -> bool:
    """Whether the function that asks was called inside ``function``, which may be itself."""
    frame = sys._getframe(1).f_back
    while frame is not None:
        if frame.f_code is function.__code__:
            return True
        frame = frame.f_back
    return False


def start(work: Callable[[], object]) -> None:
    """Run ``work`` in a thread of its own. Takes no lock, so that a nested call may use it."""
    prepare()
    _orders.put(work)


def start_after_call(work: Callable[[], object], limit_s: float) -> None:
    """As :func:`start`, but only once the call that is interrupted now is over, or ``limit_s``."""
    ident = threading.get_ident()
    outer: FrameType | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _calls:
            outer = frame
        frame = frame.f_back

    def run() -> None:
        end = time.monotonic() + limit_s
        while outer is not None and _is_running(outer, ident) and time.monotonic() < end:
            time.sleep(_POLL_S)
        work()

    start(run)


def _is_running(wanted: FrameType, ident: int) -> bool:
    frame = sys._current_frames().get(ident)
    while frame is not None and frame is not wanted:
        frame = frame.f_back
    return frame is not None


def imported(name: str) -> None:
    """Import a module in another thread, and wait for it.

    Imported by the caller itself, a nested call would find it half imported.
    """
    if name in _imported:
        return
    answer: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def run() -> None:
        try:
            importlib.import_module(name)
        except BaseException as error:  # noqa: BLE001  raised where the module is needed
            answer.put(error)
        else:
            answer.put(None)

    start(run)
    try:
        error = answer.get(timeout=_IMPORT_S)
    except queue.Empty:
        # It waits for a module that the caller is importing itself.
        importlib.import_module(name)
    else:
        if error is not None:
            raise error
        _imported.add(name)


def prepare() -> None:
    """Have the thread that starts the others: to start one takes locks of the interpreter.

    GroupAborted when no thread can be started.
    """
    global _starter
    if _starter is None or not _starter.is_alive():
        made = threading.Thread(target=_serve, name="groupio-starter", daemon=True)
        start_some([made])
        _starter = made


def _serve() -> None:
    while True:
        work = _orders.get()
        try:
            threading.Thread(target=work, name="groupio-nested", daemon=True).start()
        except RuntimeError:  # the interpreter ends
            work()


def _after_fork_in_child() -> None:
    global _orders, _starter
    _orders, _starter = queue.SimpleQueue(), None


_imported: set[str] = set()
_orders: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
_starter: threading.Thread | None = None
os.register_at_fork(after_in_child=_after_fork_in_child)
