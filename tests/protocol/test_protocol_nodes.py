"""Several agents and a controller that is replaced, in a world in which anything may happen."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from model_flush import PlannedJob
from world_nodes import NodesWorld

from groupio.model import Level
from groupio.protocol import effects as fx
from groupio.protocol import proving

MIB = 1 << 20
KINDS = ("store", "order", "report", "message", "copy", "job", "plan")
SEEDS = 8
SIZES = (0, MIB, 3 * MIB, 9 * MIB, 40 * MIB)


def faults(rng: random.Random, rate: float) -> Callable[[Any], str]:
    def fault(effect: Any) -> str:
        if rng.random() >= rate:
            return ""
        if isinstance(effect, PlannedJob):
            return rng.choice(("", "before", "away", "away", "lacks", "lacks", "lies"))
        if isinstance(effect, fx.PrepareEpoch | fx.PublishInflight):
            return rng.choice(("before", "after", "full"))
        return rng.choice(("before", "after"))

    return fault


def live(
    world: NodesWorld, rng: random.Random, steps: int, rate: float, *, copies: float = 0.0
) -> None:
    world.store.fault = faults(rng, rng.choice((0, rate, rate)))
    rate *= rng.choice((0.05, 0.2, 1.0))
    world.store.node_local = rng.random() < 0.3
    weights: dict[str, float] = {}
    for step in range(steps):
        if step % 50 == 0:
            weights = {kind: rng.choice((0.02, 1.0)) for kind in KINDS}
        if copies and rng.random() < copies:
            world.turn(rng.choice(sorted(world.machines)[1:]), copy=rng.random() < 0.5)
        looks = sorted(name for name in world.timers if name.startswith("proof"))
        if copies and looks and rng.random() < 0.1:
            world.fire(rng.choice(looks))
        dice = rng.random()
        pending = world.pending()
        ranks = world.active()
        if not world.current() or dice < 0.1 * rate:
            world.launch(
                rng.choice((1, 2, 3, 4, 6)), back=rng.choice((0, 1, 1)), zombies=rng.random() < 0.3
            )
        elif dice < 0.2 * rate:
            world.kill(rng.choice(ranks))
        elif dice < 0.3 * rate:
            world.lose_node(rng.choice(sorted(world.machines)))
        elif dice < 0.5 * rate:
            world.cut_off(rng.choice(sorted(world.machines)))
        elif dice < 0.6 * rate:
            world.new_controller()
        elif dice < 0.7 * rate and any(r.busy for r in ranks):
            world.withdraw(rng.choice([r for r in ranks if r.busy]))
        elif dice < 0.85 * rate and world.timers:
            world.fire(rng.choice(sorted(world.timers)))
        elif dice < 0.22 and any(not r.busy for r in ranks):
            idle = [r for r in ranks if not r.busy]
            rng.shuffle(idle)
            rank = min(idle, key=lambda r: r.next_epoch)
            world.open(
                rank, size=rng.choice(SIZES), when_full="fail" if rank.launch % 5 == 0 else "wait"
            )
        elif pending:
            rng.choices(pending, [weights[kind] for kind, _ in pending])[0][1]()


def finish(world: NodesWorld, rng: random.Random) -> None:
    world.store.fault = lambda effect: ""
    for node in sorted(world.copies):
        world.turn(node, copy=False)
    world.settle(rng.randrange)
    world.reopen(rng.randrange)
    world.check_rest()
    world.launch(3)
    world.settle(rng.randrange)
    ranks = world.current()
    for rank in ranks:
        world.open(rank)
    world.settle(rng.randrange)
    world.check_rest()
    for rank in ranks:
        assert rank.saves[1].levels[-1] is Level.DURABLE, rank.saves[1].error


@pytest.mark.parametrize("rate", [0.0, 0.02, 0.15])
@pytest.mark.parametrize(("nodes", "replicas"), [(1, 2), (2, 1), (2, 2), (4, 2), (4, 3)])
def test_anything_may_happen_to_nodes(nodes: int, replicas: int, rate: float) -> None:
    for seed in range(SEEDS):
        rng = random.Random(seed)
        budget = rng.choice((24, 48, 400)) * MIB
        world = NodesWorld(
            nodes=nodes, budget=budget, replicas=replicas, domains=rng.choice((2, 64))
        )
        try:
            live(world, rng, rng.choice((40, 400)), rate)
            finish(world, rng)
        except BaseException as error:
            error.add_note(f"seed {seed}, {nodes} node(s), {replicas} replicas, rate {rate}")
            raise


@pytest.mark.parametrize("rate", [0.0, 0.02, 0.15])
def test_nodes_may_see_a_copy_of_the_store(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they write is not there when the record is made; their members hear it, and no other."""
    monkeypatch.setattr(proving, "PROOF_S", 0.04)
    refused = told = 0
    for seed in range(3 * SEEDS):
        rng = random.Random(seed)
        world = NodesWorld(nodes=3, budget=48 * MIB, replicas=rng.choice((1, 2)))
        try:
            live(world, rng, 400, rate, copies=rng.choice((0.01, 0.05)))
            finish(world, rng)
        except BaseException as error:
            error.add_note(f"seed {seed}, rate {rate}")
            raise
        refused += world.refused
        errors = [s.error for r in world.ranks.values() for s in r.saves.values() if s.error]
        told += sum("is not the store" in error.message for error in errors)
    assert refused > 10
    assert told > 5
