"""Fixtures of the crash tests: file systems that can be cut, and jobs of real processes."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from loopdev import KINDS, LoopDisk, make_image, workplace


def _end_to_end() -> ModuleType:
    """The helpers of the end-to-end tests: ranks and agents as processes of their own."""
    path = Path(__file__).parents[1] / "e2e" / "conftest.py"
    sys.path.insert(0, str(path.parent))  # its own helpers lie beside it
    spec = importlib.util.spec_from_file_location("end_to_end_helpers", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make_node = _end_to_end().make_node


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
