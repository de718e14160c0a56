"""Kills a rank of the demonstration by SIGKILL, in the middle of copying its state."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from groupio.client.sources import Flat


def die_while_copying(after_bytes: int, last_words: Callable[[int], None]) -> None:
    """Arm this process: once ``after_bytes`` of tensors were copied to the agent, it kills itself.

    By then the group is open, this rank holds its lease, and it has not said that its copy is
    complete. ``last_words`` gets the bytes copied so far.
    """
    original = Flat.copy_range
    copied = 0

    def copy_range(self: Flat, lo: int, hi: int, address: int) -> None:
        nonlocal copied
        if copied >= after_bytes:
            last_words(copied)
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, lo, hi, address)
        copied += hi - lo

    Flat.copy_range = copy_range  # type: ignore[method-assign]
