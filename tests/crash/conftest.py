"""Fixtures of the crash tests: file systems that can be cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from loopdev import KINDS, LoopDisk, make_image, workplace


@pytest.fixture(scope="session")
def images() -> Iterator[Callable[[str], Path]]:
    """Empty images of each kind, made once."""
    with workplace() as folder:

        def image(kind: str) -> Path:
            path = folder / f"{kind}.img"
            return path if path.exists() else make_image(path, kind)

        yield image


@pytest.fixture(params=KINDS)
def disk(request: pytest.FixtureRequest, images: Callable[[str], Path]) -> Iterator[LoopDisk]:
    """A new disk of each kind, not mounted."""
    with workplace() as folder:
        yield LoopDisk(folder, request.param, images(request.param))
