"""Python's garbage collector, while very many objects are made that are all needed."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.RLock()
"""Reentrant: a nested call may come while its thread counts."""

_paused = [0]
_was_enabled = [False]


@contextmanager
def collection_paused() -> Iterator[None]:
    """Within it the collector does not run, in any thread.

    It would go through all objects of the process again and again: with 20,000 tensors that is a
    third of the work of a load.
    """
    with _lock:
        if not _paused[0]:
            _was_enabled[0] = gc.isenabled()
            gc.disable()
        _paused[0] += 1
    try:
        yield
    finally:
        with _lock:
            _paused[0] -= 1
            if not _paused[0] and _was_enabled[0]:
                gc.enable()
