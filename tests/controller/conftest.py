"""What tests of controllers share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from controller_help import Running


@pytest.fixture
def start() -> Iterator[Any]:
    """Starts processes: ``start([arguments of Python], VARIABLE=value)``."""
    running: list[Running] = []

    def begin(command: list[str], **environment: str) -> Running:
        running.append(Running(command, **environment))
        return running[-1]

    yield begin
    for one in running:
        one.close()
