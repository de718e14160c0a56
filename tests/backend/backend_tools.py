"""Mounts and users for the backend tests."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def mounted(where: Path, *options: str) -> Iterator[Path]:
    """``mount OPTIONS where`` for the time of a test."""
    subprocess.run(["mount", *options, str(where)], check=True, timeout=30)
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", str(where)], check=True, timeout=30)


@contextmanager
def unprivileged() -> Iterator[None]:
    """Act as a user whom permission bits bind; root obeys none."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        if before == 0:
            os.seteuid(0)
