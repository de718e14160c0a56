"""What the simulated network tells of processes that end, to real links."""

from __future__ import annotations

from dataclasses import replace

import pytest

from groupio.protocol.following import RECONNECT_S
from groupio.protocol.linkconfig import LinkConfig
from groupio.testing.sim.faults import Options
from groupio.testing.sim.runner import guarded
from groupio.testing.sim.world import Sim

CALM = Options(members=6, agents=3, epochs=40, replicas=2, train_s=0.1, real_links=True)
SILENCE_S = LinkConfig().silence_s
SOON_S = 2.5


def in_flight(seed: int) -> Sim:
    """All nodes have joined, and the job goes on."""
    sim = Sim(seed, replace(CALM))
    sim.begin()
    while not sim.controls or len(sim.controls[-1].machine.nodes.alive) < CALM.agents:
        sim.engine.run(sim.engine.now + 0.1, 100_000)
    return sim


def pass_time(sim: Sim, seconds: float) -> None:
    sim.engine.run(sim.engine.now + seconds, 1_000_000)


@pytest.mark.parametrize("seed", range(4))
def test_an_agent_that_dies_is_missed_soon(seed: int) -> None:
    sim = in_flight(seed)
    control = sim.controls[-1]
    dead = next(node for node in sim.nodes.values() if node is not control.node)
    dead.crash("killed")
    pass_time(sim, SOON_S)
    assert dead.name not in control.machine.nodes.alive
    assert len(control.machine.nodes.alive) == CALM.agents - 1


@pytest.mark.parametrize("how", ["power", "cut"])
def test_without_power_or_network_only_silence_tells(how: str) -> None:
    sim = in_flight(1)
    control = sim.controls[-1]
    dead = next(node for node in sim.nodes.values() if node is not control.node)
    if how == "power":
        dead.crash("its power failed", power=False)
    else:
        others = [name for name in sim.nodes if name != dead.name]
        sim.network.cut([pair for o in others for pair in ((o, dead.name), (dead.name, o))])
        dead.crash("killed")
    pass_time(sim, SOON_S)
    assert dead.name in control.machine.nodes.alive
    pass_time(sim, SILENCE_S)
    assert dead.name not in control.machine.nodes.alive


def test_a_connection_that_breaks_costs_nothing() -> None:
    sim = in_flight(2)
    control = sim.controls[-1]
    for _ in range(20):
        for link in sim.network.links:
            link.disconnect()
        pass_time(sim, 0.5)
    assert sim.controls == [control]
    assert len(control.machine.nodes.alive) == CALM.agents
    with guarded(sim):
        sim.live()
        sim.heal()
    assert sim.violation is None
    assert sim.controls == [control]


@pytest.mark.parametrize("seed", range(4))
def test_a_controller_that_dies_is_replaced_soon(seed: int) -> None:
    sim = in_flight(seed)
    dead = sim.controls[-1]
    dead.node.crash("killed")
    pass_time(sim, SOON_S + 1)
    assert SOON_S + 1 < RECONNECT_S
    (control,) = sim.controls
    assert control.term > dead.term
    assert len(control.machine.nodes.alive) == CALM.agents - 1
    assert control.machine.resume.gone == {dead.host}
