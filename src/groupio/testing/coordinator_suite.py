"""The conformance suite of coordinators: subclass it, say how to open one, and run pytest.

::

    class TestMine(CoordinatorSuite):
        def open_coordinator(self, place: Path, on_lost: OnLost) -> Coordinator:
            return MyCoordinator(place, on_lost=on_lost)

        def silence(self, coordinator: Coordinator) -> None:
            ...

        def cut_off(self, place: Path) -> None:
            ...

Coordinators opened with the same place are agents of one job.
"""

from __future__ import annotations

import abc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from groupio.controller.coordinator import Coordinator, OnLost, Rule
from groupio.errors import ControllerLost, InvalidInput, StorageError
from groupio.format.limits import TERM_MAX

Opener = Callable[..., Coordinator]


def soon(seconds: float = 15.0) -> float:
    """A deadline so many seconds from now."""
    return time.monotonic() + seconds


def life(number: int) -> str:
    """The life of the agent process ``number``."""
    return f"{number:032x}"


def run_for(coordinator: Coordinator, number: int, over: int = 0, within: float = 15.0) -> Rule:
    """Let the agent ``number`` campaign."""
    return coordinator.campaign(
        f"node{number}", life(number), f"tcp://10.0.0.{number}:7000", soon(within), over=over
    )


def race(agents: Sequence[Coordinator], over: int) -> dict[int, Rule]:
    """Let all ``agents`` campaign at one moment; what each of them learned, by its number."""
    learned: dict[int, Rule] = {}
    barrier = threading.Barrier(len(agents))

    def run(number: int) -> None:
        barrier.wait(timeout=30)
        learned[number] = run_for(agents[number], number, over)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(agents))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return learned


def until(condition: Callable[[], bool], seconds: float = 15.0) -> bool:
    """Whether ``condition`` comes true in time."""
    deadline = soon(seconds)
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.01)
    return True


class CoordinatorSuite(abc.ABC):
    """Tests that every coordinator passes; see the module for how to use them."""

    @abc.abstractmethod
    def open_coordinator(self, place: Path, on_lost: OnLost) -> Coordinator:
        """Open the coordinator of one more agent process of this test's job."""

    @abc.abstractmethod
    def silence(self, coordinator: Coordinator) -> None:
        """From now on ``coordinator`` is paused or cut off, if that matters to its driver."""

    @abc.abstractmethod
    def cut_off(self, place: Path) -> None:
        """From now on the service does not answer anybody of this test."""

    @pytest.fixture
    def losses(self) -> list[str]:
        """Why rules of this test ended."""
        return []

    @pytest.fixture
    def opened(self, tmp_path: Path, losses: list[str]) -> Iterator[Opener]:
        """Opens coordinators on the place of this test; closes them at the end."""
        coordinators: list[Coordinator] = []

        def open_one() -> Coordinator:
            coordinators.append(self.open_coordinator(tmp_path, losses.append))
            return coordinators[-1]

        yield open_one
        for coordinator in coordinators:
            coordinator.close()

    def test_nobody_rules_at_first(self, opened: Opener) -> None:
        one = opened()
        assert one.current(soon()) is None
        assert one.held is None
        assert not one.keep()
        one.resign()
        assert one.watch(0, 0.05) is None
        assert one.current(soon()) is None

    def test_a_ruler_is_seen_by_all(self, opened: Opener, losses: list[str]) -> None:
        one, two = opened(), opened()
        rule = run_for(one, 1)
        assert rule == Rule(rule.term, "tcp://10.0.0.1:7000", "node1", life(1))
        assert rule.term >= 1
        assert one.current(soon()) == two.current(soon()) == rule == one.held
        assert one.keep()
        assert not two.keep()
        assert two.watch(0, 5.0) == rule
        assert run_for(two, 2) == rule
        assert two.held is None
        assert run_for(one, 1) == rule
        assert losses == []

    def test_one_of_many_wins(self, opened: Opener) -> None:
        agents = [opened() for _ in range(8)]
        over = 0
        for _ in range(3):
            learned = race(agents, over)
            assert len(learned) == len(agents)
            assert len(set(learned.values())) == 1
            rule = learned[0]
            assert rule.term > over
            holders = [agent for agent in agents if agent.keep()]
            assert [agent.held for agent in holders] == [rule]
            assert rule.life == life(agents.index(holders[0]))
            holders[0].resign()
            over = rule.term

    def test_terms_only_grow(self, opened: Opener) -> None:
        one, two = opened(), opened()
        terms = []
        for number, agent in enumerate((one, two, one, two), 1):
            terms.append(run_for(agent, number).term)
            agent.resign()
        terms.append(run_for(one, 5, over=terms[-1] + 40).term)
        assert terms == sorted(set(terms))
        assert terms[-1] > terms[-2] + 40
        one.resign()
        assert run_for(opened(), 6).term > terms[-1]

    def test_resigning_frees_the_place(self, opened: Opener, losses: list[str]) -> None:
        one, two = opened(), opened()
        rule = run_for(one, 1)
        one.resign()
        assert not one.keep()
        assert one.held is None
        assert two.current(soon()) is None
        assert two.watch(rule.term, 10.0) is None
        began = time.monotonic()
        assert run_for(two, 2, over=rule.term).life == life(2)
        assert time.monotonic() - began < 5
        assert losses == []

    def test_a_silent_holder_loses(self, opened: Opener, losses: list[str]) -> None:
        one, two = opened(), opened()
        first = run_for(one, 1)
        self.silence(one)
        second = run_for(two, 2, over=first.term)
        assert second.term > first.term
        assert second.life == life(2)
        assert not one.keep()
        assert one.held is None
        assert two.keep()
        assert until(lambda: len(losses) == 1)
        assert str(first.term) in losses[0]
        one.resign()
        assert not one.keep()
        assert two.current(soon()) == second
        assert len(losses) == 1

    def test_a_watcher_hears_of_the_next_rule(self, opened: Opener) -> None:
        one, two = opened(), opened()
        began = time.monotonic()
        assert two.watch(0, 0.3) is None
        assert 0.25 <= time.monotonic() - began < 5
        heard: list[Rule | None] = []
        thread = threading.Thread(target=lambda: heard.append(two.watch(0, 30.0)))
        thread.start()
        time.sleep(0.2)
        rule = run_for(one, 1)
        thread.join(timeout=30)
        assert heard == [rule]
        began = time.monotonic()
        assert two.watch(rule.term, 0.3) is None
        assert 0.25 <= time.monotonic() - began < 5

    def test_a_closed_ruler_leaves_its_rule_behind(self, opened: Opener, losses: list[str]) -> None:
        one, two = opened(), opened()
        rule = run_for(one, 1)
        one.close()
        one.close()
        assert not one.keep()
        assert two.current(soon()) == rule
        assert run_for(two, 2, over=rule.term).term > rule.term
        assert losses == []

    @pytest.mark.parametrize(
        ("node", "its_life", "address", "over"),
        [
            ("a/b", life(1), "tcp://h:1", 0),
            ("n", "short", "tcp://h:1", 0),
            ("n", life(1), "", 0),
            ("n", life(1), "tcp://h:1\n", 0),
            ("n", life(1), "tcp://h:1", TERM_MAX),
            ("n", life(1), "tcp://h:1", -1),
        ],
    )
    def test_nobody_rules_who_cannot_be_recorded(
        self, opened: Opener, node: str, its_life: str, address: str, over: int
    ) -> None:
        one = opened()
        with pytest.raises(InvalidInput):
            one.campaign(node, its_life, address, soon(), over=over)
        assert one.current(soon()) is None

    def test_a_service_that_is_away_is_an_error_in_time(
        self, opened: Opener, tmp_path: Path
    ) -> None:
        one = opened()
        self.cut_off(tmp_path)
        calls: list[Callable[[], object]] = [
            lambda: one.current(soon(0.5)),
            lambda: run_for(one, 1, within=0.5),
            lambda: one.watch(0, 0.5),
        ]
        for call in calls:
            began = time.monotonic()
            with pytest.raises((ControllerLost, StorageError)) as caught:
                call()
            assert time.monotonic() - began < 5
            assert len(caught.value.message) > 30
        assert not one.keep()
