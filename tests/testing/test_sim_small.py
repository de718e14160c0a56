"""The small world with each single fault at each of its places, and a part of the pairs."""

from __future__ import annotations

import pytest

from groupio.testing.sim.small import (
    AT_EVENTS,
    AT_MESSAGES,
    AT_STEPS,
    Point,
    later,
    run,
    run_case,
)


def test_without_faults_the_epoch_is_saved() -> None:
    sim, places = run_case(())
    assert sim.violation is None
    assert sim.launches == 2
    assert {point.what for point in places} == {*AT_EVENTS, *AT_STEPS, *AT_MESSAGES}


def test_places_are_those_that_make_a_difference() -> None:
    _, places = run_case(())
    assert len(set(places)) == len(places)
    events = max(point.at for point in places)
    crashes = [point for point in places if point.what == "crash n0"]
    assert 20 < len(crashes) < events
    _, after = run_case((Point("crash n1", 40),))
    gone = [p for p in after if p.what == "crash n1" and p.at > 40]
    assert all(p.at > 60 for p in gone)  # it has to come back first


def test_many_single_faults() -> None:
    walk = run(1, every=6)
    assert walk.bad == []
    assert walk.points > 60


def test_second_faults_are_not_seen_twice() -> None:
    _, places = run_case(())
    pairs = [frozenset((a, b)) for a in places for b in later(places, a)]
    assert len(set(pairs)) == len(pairs) == len(places) * (len(places) - 1) // 2


def test_some_pairs_of_faults() -> None:
    walk = run(2, every=900)
    assert walk.bad == []
    assert walk.points > 80


@pytest.mark.proof
def test_every_pair_of_faults() -> None:
    walk = run(2, jobs=2)
    assert walk.bad == []
    assert walk.points > 100_000
