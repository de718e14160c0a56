"""Fixtures of the backend tests, and the crash helpers on the import path."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from backend_tools import mounted

sys.path.insert(0, str(Path(__file__).parents[1] / "crash"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    where = tmp_path / "small"
    where.mkdir()
    with mounted(where, "-t", "tmpfs", "-o", "size=4m", "tmpfs"):
        yield where
