"""What an agent's memory budget includes."""

from __future__ import annotations

import pytest

from groupio.agent import process
from groupio.agent.driver import Driver
from groupio.fabric.open import fabric_bytes
from groupio.settings import Settings

MIB = 1 << 20


@pytest.mark.parametrize(
    ("fabric", "own"), [("tcp", 0), ("mooncake", 64 * MIB), ("mooncake-keyless", 64 * MIB)]
)
def test_arenas_get_what_the_fabric_leaves(
    paths: process.RuntimePaths, fabric: str, own: int
) -> None:
    settings = Settings(fabric=fabric, memory_bytes=1024 * MIB)
    residence = process.Residence.take(paths)
    driver = Driver(settings, residence)
    try:
        assert fabric_bytes(settings, driver.budget) == own
        assert driver.budget == 1024 * MIB
        assert driver.machine.ledger.available == driver.budget - own
    finally:
        driver.workers.close(timeout_s=5.0)
        driver.memory.shut()
        residence.close()
