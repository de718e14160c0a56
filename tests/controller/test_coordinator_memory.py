"""The coordinator for tests of controllers passes the suite too."""

from __future__ import annotations

from pathlib import Path

import pytest

from groupio.controller.coordinator import Coordinator, OnLost
from groupio.testing.coordinator_suite import CoordinatorSuite
from groupio.testing.memory_coordinator import MemoryCoordinator, MemoryRules


class TestInMemory(CoordinatorSuite):
    @pytest.fixture(autouse=True)
    def rules(self) -> None:
        self.shared = MemoryRules()

    def open_coordinator(self, place: Path, on_lost: OnLost) -> Coordinator:
        return MemoryCoordinator(self.shared, on_lost=on_lost)

    def silence(self, coordinator: Coordinator) -> None:
        pass  # whoever campaigns over a rule ends it

    def cut_off(self, place: Path) -> None:
        self.shared.is_reachable = False
