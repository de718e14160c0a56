"""Who rules, asked for one agent: elected, named by a launcher, or started by hand."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from groupio.agent.election import Election, is_elsewhere
from groupio.controller.discover import Kind, Where
from groupio.errors import ControllerLost, InvalidInput
from groupio.testing.memory_coordinator import MemoryCoordinator, MemoryRules

STORE = Where(Kind.STORE, "", "the settings")
BY_HAND = Where(Kind.TCP, "tcp://10.0.0.1:7000", "GROUPIO_CONTROLLER")
LAUNCHER = Where(Kind.TCP, "tcp://10.0.0.1:7000", "torchrun", False)


@pytest.fixture
def rules() -> MemoryRules:
    return MemoryRules()


@pytest.fixture
def coordinator(rules: MemoryRules) -> Iterator[MemoryCoordinator]:
    with MemoryCoordinator(rules) as made:
        yield made


def election(coordinator: MemoryCoordinator, where: Where, life: str = "a" * 32) -> Election:
    return Election(coordinator, where, path="/store", node="n0", life=life)


def test_an_elected_one(coordinator: MemoryCoordinator) -> None:
    mine = election(coordinator, STORE)
    assert mine.current() is None
    rule = mine.campaign("tcp://h:1", 0)
    assert (rule.term, rule.node, rule.life) == (1, "n0", "a" * 32)
    assert mine.current() == rule
    assert mine.keep()
    assert not is_elsewhere(STORE)
    mine.leave(ruling=True)


def test_one_that_somebody_starts_by_hand_is_not_replaced(
    rules: MemoryRules, coordinator: MemoryCoordinator
) -> None:
    assert is_elsewhere(BY_HAND)
    mine = election(coordinator, BY_HAND)
    with pytest.raises(ControllerLost, match="groupio controller run"):
        mine.current()
    with MemoryCoordinator(rules) as other:
        rule = election(other, STORE, "b" * 32).campaign("tcp://0.0.0.0:7000", 0)
        found = mine.current()
        assert found is not None
        assert found.address == BY_HAND.address, "the address that was given, not the ruler's own"
        assert mine.campaign("", 0).term == rule.term
        with pytest.raises(ControllerLost):
            mine.campaign("", rule.term)
    mine.leave(ruling=False)


def test_the_node_that_a_launcher_named_has_time_to_begin(
    rules: MemoryRules, coordinator: MemoryCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("groupio.agent.election.FIRST_S", 0.05)
    mine = election(coordinator, LAUNCHER)
    assert mine.current() is None
    with MemoryCoordinator(rules) as named:
        rule = election(named, STORE, "b" * 32).campaign("tcp://h:2", 0)
        assert mine.current() == rule


def test_a_controller_that_wants_a_token_is_replaced_only_when_it_is_gone(
    coordinator: MemoryCoordinator,
) -> None:
    mine = election(coordinator, STORE)
    with socket.create_server(("127.0.0.1", 0)) as there:
        address = f"tcp://127.0.0.1:{there.getsockname()[1]}"
        with pytest.raises(InvalidInput, match="same GROUPIO_TOKEN"):
            mine.campaign("tcp://h:1", 0, locked=address)
        assert mine.current() is None
    assert mine.campaign("tcp://h:1", 0, locked=address).term == 1
    assert mine.campaign("tcp://h:1", 1, locked="nowhere").term == 2
