"""A client, an agent that the test plays, and stores without an agent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from client_store import StoreBuilder
from fake_agent import Background, FakeAgent

import groupio
from groupio.agent import spawn


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeAgent]:
    fake = FakeAgent(tmp_path / "agent.sock")
    monkeypatch.setattr(spawn, "ensure_agent", fake.ensure)
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    yield fake
    fake.close()


@pytest.fixture
def connect(agent: FakeAgent, tmp_path: Path) -> Iterator[Callable[..., groupio.Client]]:
    """Connects clients of the store ``tmp_path / "store"``; leaves none behind."""
    made: list[groupio.Client] = []

    def make(**options: Any) -> groupio.Client:
        fields = {"close_timeout_s": 0.2, "runtime_dir": str(tmp_path)}
        settings = groupio.Settings(**fields | options.pop("settings", {}))
        made.append(groupio.connect(tmp_path / "store", settings=settings, **options))
        return made[-1]

    yield make
    for client in made:
        client.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreBuilder]:
    builder = StoreBuilder(tmp_path / "store")
    yield builder
    builder.close()


@pytest.fixture
def background() -> Background:
    return Background()
