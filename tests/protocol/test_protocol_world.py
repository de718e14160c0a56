"""The machines in a small world in which everything may happen in any order, and goes wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from model_ranks import FlushJob
from world import World

from groupio.model import Level
from groupio.protocol import effects as fx
from groupio.protocol.controller import Controller
from groupio.protocol.members import Incarnation

MIB = 1 << 20
KINDS = ("store", "order", "report", "message", "copy", "job")
SIZES = (0, MIB, 3 * MIB, 9 * MIB, 40 * MIB)


def faults(rng: random.Random, rate: float) -> Callable[[Any], str]:
    """What goes wrong in the store and in flush jobs."""

    def fault(effect: Any) -> str:
        if rng.random() >= rate:
            return ""
        if isinstance(effect, FlushJob):
            return rng.choice(("", "before", "away"))
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
        elif dice < 0.9 * rate and world.shown() and not any(r.busy for r in world.current()):
            world.reload(rng.choice(list(world.shown().values())))
        elif dice < 0.22 and any(not r.busy for r in ranks):
            save(world, rng, rate)
        elif dice < 0.25 and ranks:
            world.expect(rng.choice(ranks), rng.choice(SIZES))
        elif pending:
            chosen = rng.choices(pending, [weights[kind] for kind, _ in pending])
            chosen[0][1]()


def relaunch(world: World, rng: random.Random) -> None:
    """The job begins again, perhaps at an older epoch, perhaps with other ranks."""
    rewind = rng.choice((None, None, world.latest(), max(-1, world.latest() - 2)))
    shown = world.shown()
    loads = rng.choice([None, *shown.values()]) if rewind is None else None
    world.launch(
        rng.choice((1, 2, 2, 3, 4)),
        back=rng.choice((0, 1, 1)),
        rewind_to=None if rewind == -1 else rewind,
        zombies=rng.random() < 0.3,
        loads=loads,
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
    # Whoever looks for the newest epoch first decides what an error left undecided.
    world.reopen(rng.randrange)
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
    for seed in range(50):
        rng = random.Random(seed)
        world = World(nodes=nodes, budget=rng.choice((24, 48, 200)) * MIB)
        try:
            live(world, rng, rng.choice((40, 400)), rate)
            finish(world, rng)
        except BaseException as error:
            error.add_note(f"seed {seed}, {nodes} node(s), rate {rate}")
            raise


PICK = st.integers(0, 63)


class AnyOrder(RuleBasedStateMachine):
    """The same world, driven by Hypothesis, which makes a failure as short as it can."""

    @initialize(
        nodes=st.sampled_from([1, 2]),
        budget=st.sampled_from([24, 48, 200]),
        node_local=st.booleans(),
        world=st.integers(1, 4),
    )
    def begin(self, nodes: int, budget: int, node_local: bool, world: int) -> None:
        self.world = World(nodes=nodes, budget=budget * MIB)
        self.world.store.node_local = node_local
        self.world.store.fault = self.fault
        self.next_fault = ""
        self.world.launch(world)

    def fault(self, effect: Any) -> str:
        """A fault happens once, in the first step that can have it."""
        kind = self.next_fault
        if kind.startswith("stranger") and not isinstance(effect, fx.Decide):
            return ""
        if isinstance(effect, FlushJob) != (kind == "away") and kind != "before":
            return ""
        self.next_fault = ""
        return kind

    @rule(kind=st.sampled_from(["before", "after", "away", "full", "stranger", "stranger-abort"]))
    def fail_next(self, kind: str) -> None:
        self.next_fault = kind

    @rule(picks=st.lists(PICK, min_size=1, max_size=40))
    def go_on(self, picks: list[int]) -> None:
        for pick in picks:
            pending = self.world.pending()
            if pending:
                pending[pick % len(pending)][1]()

    @rule(steps=st.integers(1, 200), seed=st.integers(0, 7))
    def carry_on(self, steps: int, seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(steps):
            pending = self.world.pending()
            if pending:
                rng.choice(pending)[1]()

    @rule(
        size=st.sampled_from(SIZES),
        variant=st.integers(0, 1),
        when_full=st.sampled_from(["wait", "wait", "skip"]),
    )
    def all_save(self, size: int, variant: int, when_full: str) -> None:
        for rank in self.world.current():
            if not rank.busy:
                self.world.open(rank, size=size, variant=variant, when_full=when_full)

    @precondition(lambda self: any(not r.busy for r in self.world.active()))
    @rule(pick=PICK, size=st.sampled_from(SIZES))
    def one_saves(self, pick: int, size: int) -> None:
        idle = [r for r in self.world.active() if not r.busy]
        self.world.open(idle[pick % len(idle)], size=size)

    @precondition(lambda self: self.world.active())
    @rule(pick=PICK, size=st.sampled_from(SIZES))
    def one_expects(self, pick: int, size: int) -> None:
        ranks = self.world.active()
        self.world.expect(ranks[pick % len(ranks)], size)

    @precondition(lambda self: self.world.active())
    @rule(pick=PICK, how=st.sampled_from(["kill", "hang_up"]))
    def lose(self, pick: int, how: str) -> None:
        ranks = self.world.active()
        getattr(self.world, how)(ranks[pick % len(ranks)])

    @precondition(lambda self: any(r.busy for r in self.world.active()))
    @rule(pick=PICK)
    def withdraw(self, pick: int) -> None:
        busy = [r for r in self.world.active() if r.busy]
        self.world.withdraw(busy[pick % len(busy)])

    @precondition(lambda self: self.world.timers)
    @rule(pick=PICK)
    def run_out(self, pick: int) -> None:
        names = sorted(self.world.timers)
        self.world.fire(names[pick % len(names)])

    @rule(
        world=st.integers(1, 4),
        back=st.integers(0, 1),
        rewind=st.sampled_from([None, None, 0, 1]),
        zombies=st.booleans(),
    )
    def relaunch(self, world: int, back: int, rewind: int | None, zombies: bool) -> None:
        latest = self.world.latest()
        target = None if rewind is None or latest < rewind else latest - rewind
        self.world.launch(world, back=back, rewind_to=target, zombies=zombies)

    @rule()
    def repeat(self) -> None:
        self.world.repeat()

    @invariant()
    def memory_is_bounded(self) -> None:
        for machine in self.world.machines.values():
            assert machine.ledger.total() <= machine.ledger.budget

    def teardown(self) -> None:
        finish(self.world, random.Random(0))


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def run_worlds(seeds: range) -> int:
    """Lines that saves began in these worlds."""
    begun = 0
    for seed in seeds:
        rng = random.Random(seed)
        world = World(nodes=rng.choice((1, 2)))
        live(world, rng, 2000, 0.02)
        begun += sum(1 for line in world.store.lineages.values() if line.number in world.begun)
    return begun


def test_saves_begin_lines_in_the_worlds() -> None:
    assert run_worlds(range(20)) > 10


@pytest.mark.parametrize("guard", ["the others have ended", "own commits stay"])
def test_a_line_that_begins_without_a_guard_is_noticed(
    guard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if guard == "the others have ended":
        monkeypatch.setattr(Controller, "_not_ended", lambda self, event: None)
    else:
        monkeypatch.setattr(Incarnation, "newest", property(lambda self: -1, lambda *_: None))
    with pytest.raises(AssertionError, match=r"begins|rewinds"):
        run_worlds(range(60))
