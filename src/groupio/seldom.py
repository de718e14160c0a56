"""Says what repeats only once in a while: a stranger must not be able to fill a log."""

from __future__ import annotations

import threading
import time

KEPT = 1024

REFUSED_LOG_S = 10.0
"""A refusal that repeats is logged once in so many seconds."""


class Seldom:
    """Whether something about a subject is to be said again; from any thread."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._said: dict[str, float] = {}
        self._lock = threading.Lock()

    def is_due(self, subject: str) -> bool:
        """True when it was not for ``every_s`` seconds; KEPT subjects are remembered."""
        now = time.monotonic()
        with self._lock:
            if now - self._said.get(subject, -self._every_s) < self._every_s:
                return False
            if len(self._said) >= KEPT:
                self._said.clear()
            self._said[subject] = now
        return True
