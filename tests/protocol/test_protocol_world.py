"""The machines in a small world in which everything may happen in any order, and goes wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from model_ranks import FlushJob
from world import World

from groupio.model import Level
from groupio.protocol import effects as fx

MIB = 1 << 20
KINDS = ("store", "order", "report", "message", "copy", "job")
SIZES = (0, MIB, 3 * MIB, 9 * MIB, 40 * MIB)


def faults(rng: random.Random, rate: float) -> Callable[[Any], str]:
    """What goes wrong in the store and in flush jobs."""

    def fault(effect: Any) -> str:
        if rng.random() >= rate:
            return ""
        if isinstance(effect, FlushJob):
            return rng.choice(("", "before"))
        kinds = ["before", "after"]
        if isinstance(effect, fx.Decide):
            kinds += ["stranger", "stranger-abort"]
        if isinstance(effect, fx.PrepareEpoch | fx.PublishInflight):
            kinds += ["full"]
        return rng.choice(kinds)

    return fault


def live(world: World, rng: random.Random, steps: int, rate: float) -> None:
    """Let ranks save while processes end, connections break and timers run out."""
    world.store.fault = faults(rng, rng.choice((0, rate)))
    world.store.node_local = rng.random() < 0.5
    weights: dict[str, float] = {}
    for step in range(steps):
        if step % 50 == 0:
            # For a while, some kinds of steps are far slower than others.
            weights = {kind: rng.choice((0.02, 1.0)) for kind in KINDS}
        if rng.random() < rate:
            world.repeat()
        dice = rng.random()
        ranks = world.active()
        pending = world.pending()
        if not world.current() or dice < 0.2 * rate:
            relaunch(world, rng)
        elif dice < 0.4 * rate:
            world.kill(rng.choice(ranks))
        elif dice < 0.5 * rate:
            world.hang_up(rng.choice(ranks))
        elif dice < 0.6 * rate and any(r.busy for r in ranks):
            world.withdraw(rng.choice([r for r in ranks if r.busy]))
        elif dice < 0.8 * rate and world.timers:
            world.fire(rng.choice(sorted(world.timers)))
        elif dice < 0.25 and any(not r.busy for r in ranks):
            save(world, rng, rate)
        elif pending:
            chosen = rng.choices(pending, [weights[kind] for kind, _ in pending])
            chosen[0][1]()


def relaunch(world: World, rng: random.Random) -> None:
    """The job begins again, perhaps at an older epoch, perhaps with other ranks."""
    rewind = rng.choice((None, None, world.latest(), max(-1, world.latest() - 2)))
    world.launch(
        rng.choice((1, 2, 2, 3, 4)),
        back=rng.choice((0, 1, 1)),
        rewind_to=None if rewind == -1 else rewind,
        zombies=rng.random() < 0.3,
    )


def save(world: World, rng: random.Random, rate: float) -> None:
    """A rank that is free saves its next epoch; those that are behind first."""
    idle = [r for r in world.active() if not r.busy]
    rng.shuffle(idle)
    rank = min(idle, key=lambda r: r.next_epoch if rng.random() < 0.9 else 0)
    world.open(
        rank,
        size=rng.choice(SIZES),
        variant=int(rng.random() < 0.1 * rate),
        when_full="fail" if rank.launch % 5 == 0 else "wait",
    )


def finish(world: World, rng: random.Random) -> None:
    """Faults stop: everything comes to rest, and the next save of a new launch succeeds."""
    world.store.fault = lambda effect: ""
    world.settle(rng.randrange)
    world.check_rest()
    world.launch(2)
    ranks = world.current()
    for rank in ranks:
        world.open(rank)
    world.settle(rng.randrange)
    world.check_rest()
    for rank in ranks:
        assert rank.saves[1].levels[-1] is Level.DURABLE, rank.saves[1].error
    world.reopen(rng.randrange)
    assert not world.store.inflight
    assert not world.store.prepared


@pytest.mark.parametrize("rate", [0.0, 0.02, 0.15])
@pytest.mark.parametrize("nodes", [1, 2])
def test_anything_may_happen(nodes: int, rate: float) -> None:
    for seed in range(60):
        rng = random.Random(seed)
        world = World(nodes=nodes, budget=rng.choice((24, 48, 200)) * MIB)
        try:
            live(world, rng, rng.choice((40, 400)), rate)
            finish(world, rng)
        except BaseException as error:
            error.add_note(f"seed {seed}, {nodes} node(s), rate {rate}")
            raise
