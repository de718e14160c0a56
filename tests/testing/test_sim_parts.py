"""The parts of the simulator that its verdicts rest on: clock, disk, store steps, options."""

from __future__ import annotations

import random

import pytest

from groupio.testing.sim.disk import TORN, Disk
from groupio.testing.sim.engine import Engine, Process
from groupio.testing.sim.faults import ROWS, STEPS, Cells, draw


def test_events_come_in_the_order_of_time_and_wait_for_paused_processes() -> None:
    engine = Engine(0)
    seen: list[str] = []
    one, other = Process("one"), Process("other")
    engine.post(2.0, one, seen.append, "late")
    engine.post(1.0, one, seen.append, "early")
    engine.post(1.0, other, seen.append, "tie")
    engine.post(0.5, other, seen.append, "first")
    engine.run(0.7, 100)
    other.paused = True
    engine.run(3.0, 100)
    assert seen == ["first", "early", "late"]
    engine.resume(other)
    engine.run(4.0, 100)
    assert seen[-1] == "tie"


def test_a_dead_process_does_nothing_any_more() -> None:
    engine = Engine(0)
    process = Process("gone")
    engine.post(1.0, process, pytest.fail)
    process.alive = False
    assert engine.run(2.0, 100)
    assert engine.events == 1


def cut_often(make: bool, *, flush: bool, sync: bool) -> set[str]:
    """What a power cut leaves of one file, over many cuts."""
    left = set()
    for seed in range(60):
        disk = Disk()
        file = disk.create("n0", "epochs", "x", "whole", 10)
        if flush:
            disk.fsync(file)
        if sync:
            disk.sync_folder("epochs")
        if not make:
            disk.unlink("n0", "epochs", "x")
        disk.cut(random.Random(seed))
        found = disk.get("epochs", "x")
        left.add("none" if found is None else "torn" if found.content is TORN else "whole")
    return left


def test_a_power_cut_takes_what_was_not_flushed() -> None:
    assert cut_often(True, flush=False, sync=False) == {"none", "torn", "whole"}
    assert cut_often(True, flush=True, sync=False) == {"none", "whole"}
    assert cut_often(True, flush=False, sync=True) == {"torn", "whole"}
    assert cut_often(True, flush=True, sync=True) == {"whole"}
    assert cut_often(False, flush=True, sync=True) == {"none", "whole"}


def test_a_cut_of_one_node_spares_what_others_wrote() -> None:
    disk = Disk()
    disk.create("n1", "segments", "x", "whole", 10)
    for seed in range(20):
        assert disk.cut(random.Random(seed), ["n0"]) == []
    found = disk.get("segments", "x")
    assert found is not None
    assert found.content == "whole"
    assert disk.durable("segments", "x") is None


def test_a_second_flush_after_a_failed_one_saves_nothing() -> None:
    disk = Disk()
    file = disk.create("n0", "segments", "x", "whole", 10)
    disk.fsync_fails(file)
    disk.fsync(file)
    disk.sync_folder("segments")
    assert disk.durable("segments", "x") is None


def test_a_name_is_given_once() -> None:
    disk = Disk()
    one = disk.create("n0", "temporary", "1", "one", 1)
    other = disk.create("n0", "temporary", "2", "other", 1)
    assert disk.link("n0", "epochs", "x", one)
    assert disk.link("n0", "epochs", "x", one)
    assert not disk.link("n0", "epochs", "x", other)


def test_seeds_draw_different_worlds_within_the_sizes() -> None:
    drawn = [draw(random.Random(seed), 16, 8, 20) for seed in range(200)]
    assert {options.members for options in drawn} >= {1, 16}
    assert {options.agents for options in drawn} == set(range(1, 9))
    assert all(options.agents <= options.members <= 16 for options in drawn)
    assert all(1 <= options.epochs <= 20 for options in drawn)
    assert set().union(*(options.rows for options in drawn)) == set(ROWS)
    assert any(not options.rows for options in drawn)


def test_cells_are_counted_and_shown() -> None:
    cells = Cells()
    cells.hit("drop", ["copying", "storing"])
    cells.merge({("drop", "copying"): 2})
    assert cells.hits["drop", "copying"] == 3
    assert len(cells.missed) == len(ROWS) * len(STEPS) - 2
    assert len(cells.table()) == len(ROWS) + 1
