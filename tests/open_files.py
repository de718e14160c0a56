"""What this process has open. Threads of other tests may open and close files at any time, so a
test that looks for leaks asks for its own files, not for a count."""

from __future__ import annotations

import os
from collections.abc import Iterator


def _open() -> Iterator[tuple[int, str]]:
    for name in os.listdir("/proc/self/fd"):
        try:
            yield int(name), os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            pass  # the listing's own, or another thread's


def open_files(part: str) -> dict[int, str]:
    """The descriptors whose file has ``part`` in its name, and these names."""
    return {number: name for number, name in _open() if part in name}
