"""Grouped reads, a backend that is away, and real bytes on the wire, in the simulated world."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from groupio.model import Level
from groupio.testing.sim import publish
from groupio.testing.sim.faults import Options
from groupio.testing.sim.ranks import Save
from groupio.testing.sim.runner import Sizes, guarded, run_many
from groupio.testing.sim.world import Sim

CALM = Options(members=6, agents=3, epochs=3, replicas=2, rereads=0.5, train_s=0.1)


def run(sim: Sim) -> None:
    with guarded(sim):
        sim.begin()
        sim.live()
        sim.heal()


@pytest.mark.parametrize("wire", [False, True])
@pytest.mark.parametrize("real_links", [False, True])
def test_chunks_leave_the_store_once_when_nothing_fails(wire: bool, real_links: bool) -> None:
    for seed in range(5):
        sim = Sim(seed, replace(CALM, wire=wire, real_links=real_links))
        run(sim)
        assert sim.violation is None
        assert sim.loads.loads >= sim.loads.clean > 3
        fine = {at: n for at, n in sim.loads.counts.items() if at[0] not in sim.loads.spoiled}
        assert set(fine.values()) <= {1}


def test_cold_reads_take_all_from_the_store() -> None:
    sim = Sim(3, CALM)
    sim.begin()
    sim.live()
    for node in sim.nodes.values():
        node.crash("to forget all")
        node.start()
    with guarded(sim):
        sim.heal()
    assert sim.violation is None
    newest = max(name for name, _ in sim.loads.counts)
    assert sum(count for (name, _), count in sim.loads.counts.items() if name == newest) > 5


def test_lying_peers_are_noticed_and_avoided() -> None:
    seen = 0
    for seed in range(20):
        sim = Sim(seed, replace(CALM, rows=frozenset({"bit_rot"}), evictions=0.5))
        sim.begin()
        sim.nodes["n1"].liar = True
        with guarded(sim):
            sim.live()
            sim.heal()
        assert sim.violation is None
        seen += sim.oracle.detected
    assert seen > 0


@pytest.mark.parametrize("away_s", [30.0, 900.0])
def test_what_is_staged_outlasts_a_backend_that_is_away(away_s: float) -> None:
    for seed in range(4):
        options = replace(CALM, epochs=6, rereads=0.0, rows=frozenset({"away"}))
        sim = Sim(seed, options)
        sim.begin()
        while not (staged := [one for one in saves_of(sim) if one.levels and not one.over]):
            sim.engine.run(sim.engine.now + 0.001, 1000)
        sim.away_until = end = sim.engine.now + away_s
        sim.engine.run(end - 1.0, 100_000)
        assert not any(save.over for save in staged)
        assert all(Level.REPLICATED in save.levels for save in staged)
        run_on(sim)
        assert sim.violation is None
        assert all(Level.DURABLE in save.levels for save in staged)


@pytest.mark.parametrize("local", [False, True])
def test_what_one_node_has_written_outlasts_a_backend_that_is_away(local: bool) -> None:
    options = Options(members=3, agents=1, epochs=4, train_s=0.1, rows=frozenset({"away"}))
    options = replace(options, local=local, chaos_events=300, weights={"away": 1.0})
    for seed in range(12):
        sim = Sim(seed, options)
        run(sim)
        assert sim.violation is None


def saves_of(sim: Sim) -> list[Save]:
    return [save for rank in sim.ranks.values() for save in rank.saves.values()]


def run_on(sim: Sim) -> None:
    with guarded(sim):
        sim.live()
        sim.heal()


def test_reads_are_held_to_their_digests() -> None:
    summary = run_many(range(400), Sizes(), guards=frozenset({"digest check"}), stop_after=1)
    assert summary.bad
    assert summary.bad[0].violation is not None
    assert summary.bad[0].violation.number == 10


def test_the_figures_come_into_the_document(tmp_path: Path) -> None:
    summary = run_many(range(3), Sizes(4, 2, 2))
    figures, document = tmp_path / "sim.json", tmp_path / "doc.md"
    figures.write_text(json.dumps(summary.as_json()))
    document.write_text(f"before\n{publish.BEGIN}\nold\n{publish.END}\nafter\n")
    assert publish.main([str(figures), str(document)]) == 0
    text = document.read_text()
    assert text.startswith("before")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| drop |" in text
    assert "3 seeds, starting with 0" in text
    assert publish.main([]) == 2
    with pytest.raises(ValueError, match="no lines"):
        publish.publish("nothing", summary.as_json())
