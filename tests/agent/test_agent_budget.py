"""What an agent's memory budget includes."""

from __future__ import annotations

from pathlib import Path

import pytest

from groupio.agent import memory, process
from groupio.agent.driver import Driver
from groupio.errors import InvalidInput
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


def test_a_budget_that_the_machine_or_its_cgroup_does_not_have_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, limit, used in (("job", 900, 100), ("job/step", 1 << 62, 50), ("", 2000, 1500)):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "memory.max").write_text(f"{limit * MIB}\n")
        (tmp_path / folder / "memory.current").write_text(f"{used * MIB}\n")
    monkeypatch.setattr(memory, "_V2", tmp_path)
    monkeypatch.setattr(memory, "cgroup_of", lambda pid: "0::/job/step\n")
    assert memory.cgroup_room() == 500 * MIB
    assert memory.available() <= 500 * MIB
    memory.check_budget(900 * MIB)
    memory.check_budget(None)
    with pytest.raises(InvalidInput, match=f"{901 * MIB} bytes, and this machine or its cgroup"):
        memory.check_budget(901 * MIB)
    monkeypatch.setattr(memory, "cgroup_of", lambda pid: "")
    assert memory.cgroup_room() is None
    memory.check_budget(901 * MIB)
    with pytest.raises(InvalidInput):
        memory.check_budget(1 << 50)
