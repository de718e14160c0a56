"""Fixtures of the backend tests, and the crash helpers on the import path."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "crash"))


@contextmanager
def mounted(where: Path, *options: str) -> Iterator[Path]:
    """``mount OPTIONS where`` for the time of a test."""
    subprocess.run(["mount", *options, str(where)], check=True, timeout=30)
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", str(where)], check=True, timeout=30)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    where = tmp_path / "small"
    where.mkdir()
    with mounted(where, "-t", "tmpfs", "-o", "size=4m", "tmpfs"):
        yield where


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
