"""One simulated world: nodes, a store, a network and a job, under the faults of one seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

from groupio.model import DecisionKey, Level
from groupio.plan.cache import PlanCache
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol import lineage as lines
from groupio.protocol.controller import EPOCHS_IN_FLIGHT, Controller
from groupio.protocol.storing import make_plan
from groupio.testing.sim.content import Place
from groupio.testing.sim.disk import Disk
from groupio.testing.sim.engine import Engine, Process, Violated
from groupio.testing.sim.faults import BUGGIFY, STEPS, Cells, Options
from groupio.testing.sim.following import WATCH_S, Rule
from groupio.testing.sim.loading import Loads
from groupio.testing.sim.network import AnySession, Network
from groupio.testing.sim.node import Node
from groupio.testing.sim.oracle import Oracle
from groupio.testing.sim.ranks import Launch, Rank
from groupio.testing.sim.store import STRIKES, Commit
from groupio.testing.sim.trouble import Trouble

if TYPE_CHECKING:
    from groupio.testing.sim.control import Control

EVENTS_MAX = 12_000
"""Phase 1 of a seed ends after so many events, whatever the job has reached."""

CONVERGE_S = 900.0
"""After the faults stop, everything that is under way comes to its end within so many seconds."""

CONVERGE_EVENTS = 200_000

GROUPS_OF_A_TERM = 1 << 32
"""The numbers of a term's groups start at so many times the term."""


@dataclass(slots=True)
class Result:
    """What a seed came to."""

    seed: int
    events: int
    seconds: float
    """Simulated time."""
    commits: int
    violation: Violated | None = None
    cells: dict[tuple[str, str], int] = field(default_factory=dict)
    loads: int = 0
    """Loads of ranks that went through agents."""
    clean_loads: int = 0
    """Those of them in which nothing failed: each chunk left the store once."""
    lines: list[str] = field(default_factory=list)


class Sim:
    """Everything of one world; the machines are the real ones."""

    def __init__(
        self,
        seed: int,
        options: Options,
        *,
        guards: frozenset[str] = frozenset(),
        trace: bool = False,
    ) -> None:
        self.seed = seed
        self.options = options
        self.guards = guards
        """The guards that are removed, to see that their loss is noticed."""
        self.engine = Engine(seed, trace=trace)
        self.rng = self.engine.rng
        self.disk = Disk()
        self.cells = Cells()
        self.network = Network(self)
        self.oracle = Oracle(self)
        self.loads = Loads(self)
        self.controls: list[Control] = []
        self.ranks: dict[str, Rank] = {}
        """Every client that ever was, by its name."""
        self.launch: Launch | None = None
        self.launches = 0
        self.last_epoch = options.epochs
        self.healed = False
        self.away_until = 0.0
        """Until when nothing in the store can be reached."""
        self.store_made = False
        """Somebody has opened the store to write: it exists."""
        self.violation: Violated | None = None
        self.trouble = Trouble(self)
        self.marks = count(1)
        """Numbers of marks in the store: none comes twice."""
        self._names = count(1)
        self._pids = count(1000)
        self._groups = count(1)
        self._chunks: dict[DecisionKey, dict[bytes, Place]] = {}
        domains = options.domains or options.agents
        self.nodes = {
            f"n{i}": Node(self, f"n{i}", f"d{i % domains}") for i in range(options.agents)
        }
        self._caches = PlanCache[Any](1 if "plan_cache_of_one" in options.rows else 64)
        self._buggify = tuple(row for row in BUGGIFY if row in options.rows)
        self.oracle.begin()

    # -- small services -------------------------------------------------

    def trace(self, where: str, text: str) -> None:
        """A line of the timeline."""
        if self.engine.tracing:
            self.engine.note(where, text)

    def new_name(self, rank: Rank) -> str:
        """A name for a new connection of a rank."""
        name = f"c{next(self._names)}"
        self.ranks[name] = rank
        return name

    def new_pid(self) -> int:
        """A process number that was never used."""
        return next(self._pids)

    def new_controller(self, node: Node, term: int) -> Controller:
        """A controller machine for a node."""
        if self.options.local:
            return Controller(numbers=self._groups)
        at_once = 1 if "queue_of_one" in self.options.rows else EPOCHS_IN_FLIGHT
        # Agents keep groups of earlier terms: their numbers must not come again.
        return Controller(
            epochs_in_flight=at_once,
            node=node.name,
            resumes=True,
            proves="store proof" not in self.guards,
            numbers=count(term * GROUPS_OF_A_TERM),
        )

    def announce(self, rule: Rule) -> None:
        """A new rule stands; all agents learn of it in a while."""
        for node in self.nodes.values():
            if node.up:
                delay = self.rng.random() * WATCH_S
                self.engine.post(delay, node.process, node.follower.hear, rule)

    def ranks_on(self, node: Node) -> list[Rank]:
        """The ranks that are connected to the agent of a node."""
        found = (rank for rank in self.ranks.values() if rank.node is node and rank.connected)
        return list(dict.fromkeys(found))

    def plan(self, effect: fx.MakePlan) -> ev.Planned:
        """Make the plan that a controller asks for."""
        planned = make_plan(effect, cache=self._caches)
        self.oracle.planned(effect, planned)
        return planned

    def hop(self, process: Process, *, remote: bool = False) -> float:
        """How long a message of a process takes, in seconds."""
        base = self.options.latency_s if remote else 5e-5
        return base * (0.5 + self.rng.random()) * process.slow

    def life_of(self, session: AnySession) -> str:
        """The life of the agent at the other end of a controller's session."""
        return getattr(session.ends[1], "life", "")

    def newest_chunks(self) -> list[dict[bytes, Place]]:
        """Where the chunks of the newest two epochs of the line are."""
        shown = self.shown()
        return [self._index(shown[e], str(shown[e])) for e in sorted(shown)[-2:][::-1]]

    def _index(self, key: DecisionKey, name: str) -> dict[bytes, Place]:
        if key not in self._chunks:
            manifest = self.disk.folders["epochs"][name].content.manifest
            chunks = manifest.chunks
            refs = [type(ref)(ref.name, ref.bytes, False, ref.age) for ref in manifest.segments]
            rows = zip(
                chunks.digests, chunks.segments.tolist(), chunks.offsets.tolist(), strict=True
            )
            self._chunks[key] = {d.tobytes(): Place(refs[s], o) for d, s, o in rows}
        return self._chunks[key]

    def shown(self) -> dict[int, DecisionKey]:
        """The epochs of the present line, as a reader finds them."""
        table = lines.by_number(f.content for f in self.disk.folders["lineages"].values())
        commits = []
        for file in self.disk.folders["epochs"].values():
            if isinstance(file.content, Commit):
                header = file.content.manifest.header
                commits.append(DecisionKey(header.lineage, header.epoch, header.attempt))
        return lines.visible(commits, table, lines.current(table))

    def latest(self) -> int:
        """The newest epoch of the line, -1 when there is none."""
        return max(self.shown(), default=-1)

    # -- faults -------------------------------------------------

    def steps(self) -> list[str]:
        """The steps in which groups are now."""
        found = {step for control in self.controls for step in control.steps_now()}
        if self.launch is not None and any(rank.loading for rank in self.launch.ranks):
            found.add("reading")
        found &= set(STEPS)
        return sorted(found) or ["idle"]

    def hit(self, row: str) -> None:
        """A fault strikes now."""
        self.cells.hit(row, self.steps())
        self.trace("FAULT", row)

    def store_fault(self, step: str) -> str:
        """What strikes this step of a store call, or ""."""
        options = self.options
        if self.engine.now < self.away_until and step in STRIKES:
            return "unavailable"
        # Folders are listed rarely: what can strike there strikes more often.
        rate = options.store_rate * (4 if step == "list" else 1)
        if self.healed or not rate or self.rng.random() >= rate:
            return ""
        row = options.pick(self.rng, STRIKES.get(step, ()))
        if row:
            self.hit(row)
            self.oracle.stale |= row == "stale_list"
        return row

    def network_fault(self) -> str:
        """What happens to this message, or ""."""
        options = self.options
        if self.healed or not options.network_rate or self.rng.random() >= options.network_rate:
            return ""
        row = options.pick(self.rng, ("drop", "duplicate", "delay", "reorder"))
        if row:
            self.hit(row)
        return row

    def sample(self) -> None:
        """The sizes at the edge are in force in the present steps, and what else goes on there."""
        if self._buggify and self.engine.events % 4 == 0 and not self.healed:
            for row in self._buggify:
                self.cells.hit(row, self.steps())
        if "stale_list" in self.options.rows and not self.healed and self.rng.random() < 0.02:
            # Agents look from time to time whether somebody else rules.
            self.rng.choice(list(self.nodes.values())).follower.watch()

    # -- the job -------------------------------------------------

    def load(self) -> None:
        """The job reads its newest epoch: what it gets is what was saved, or an error."""
        shown = self.shown()
        if shown:
            self.oracle.read(shown[max(shown)])

    def relaunch(self) -> None:
        """Start the job's processes, to go on after the newest epoch."""
        self.load()
        up = [node for node in self.nodes.values() if node.up]
        if not up:
            self.engine.post(1.0, None, self._restart, self.launch)
            return
        rng = self.rng
        if self.launch is not None:
            for rank in self.launch.alive:
                if self.healed or rng.random() < 0.8:
                    self.kill(rank, relaunch=False)
                else:
                    self.engine.post(rng.random() * 30, None, self.kill, rank, False)
        self.launches += 1
        start = self.latest()
        rewind, loaded = None, None
        draw = rng.random() if start > 1 and not self.healed else 1.0
        if draw < 0.1:
            rewind = start = max(0, start - 1)
            if rewind not in self.shown():
                rewind, start = None, self.latest()
        elif draw < 0.3:
            shown = self.shown()
            start = sorted(shown)[int(draw * 1000) % len(shown)]
            loaded = shown[start]
        world = self.options.members
        if rng.random() < 0.1 and not self.healed:
            world = rng.randint(1, world)
        placement = [up[i * len(up) // world] for i in range(world)]
        self.launch = Launch(
            self,
            self.launches,
            placement,
            first_epoch=max(1, start + 1),
            rewind=rewind,
            resumed_from=loaded,
        )
        self.trace("launcher", f"launch {self.launches} of {world} ranks after epoch {start}")

    def kill(self, rank: Rank, relaunch: bool = True) -> None:
        """A rank's process ends; what it sent before still arrives."""
        if not rank.process.alive:
            return
        rank.process.alive = False
        self.trace("launcher", f"{rank.process} ends")
        self.say_gone(rank, process_gone=True)
        if relaunch and rank.launch is self.launch:
            self.engine.post(0.1 + self.rng.random() * 8, None, self._restart, rank.launch)

    def say_gone(self, rank: Rank, *, process_gone: bool) -> None:
        """The system of a node tells its agent that a connection, or its process, ended."""
        node = rank.node
        # Its first message may be on its way still, and comes before this.
        names = {rank.name} if rank.connected or rank.name in node.seen else set()
        rank.connected = False
        if not node.up:
            return
        if process_gone:
            names |= {name for name in node.seen if self.ranks[name] is rank}
        for name in sorted(names):
            at = max(rank.last_at, self.engine.now)
            gone = ev.MemberGone(name, process_gone)
            self.engine.post_at(at, node.process, node.from_rank, rank, name, gone)

    def _restart(self, launch: Launch | None) -> None:
        if launch is self.launch:
            self.relaunch()

    @property
    def done(self) -> bool:
        """The present launch has saved all epochs, and all its members know how it went."""
        launch = self.launch
        return (
            launch is not None
            and len(launch.done) == launch.world == len(launch.alive)
            and all(save.over for rank in launch.ranks for save in rank.saves.values())
        )

    # -- the run -------------------------------------------------

    def begin(self) -> None:
        """Start agents and the job."""
        for node in self.nodes.values():
            node.start()
        self.relaunch()
        self.trouble.begin()

    def live(self) -> None:
        """Phase 1: the job saves while everything goes wrong."""
        engine = self.engine
        while engine.events < EVENTS_MAX and not self.done and engine.next_at is not None:
            engine.run(float("inf"), 100)

    def heal(self) -> None:
        """Phase 2: the faults stop, and everything comes to its end."""
        self.trouble.end()
        self.healed = True
        self.last_epoch = 0
        self.trace("world", "the faults stop")
        self.converge()
        self.oracle.check_rest()
        # Whoever looks for the newest epoch first decides what an error left undecided.
        for control in self.controls:
            control.look()
        self.converge()
        self.relaunch()
        assert self.launch is not None
        self.last_epoch = self.launch.first_epoch
        self.launch.deadline_s = 600.0
        self.launch.when_full = "wait"
        self.converge()
        self.oracle.check_rest()
        for rank in self.launch.ranks:
            for save in rank.saves.values():
                if Level.DURABLE not in save.levels:
                    raise Violated(13, f"after the faults, {rank.name} got {save.error!r}")
            if not rank.saves:
                raise Violated(13, f"after the faults, rank {rank.rank} could not save")
        self.oracle.check_store()

    def converge(self) -> None:
        """Let everything that is under way come to its end."""
        engine = self.engine
        last, end = engine.events + CONVERGE_EVENTS, engine.now + CONVERGE_S
        resting = 0
        while engine.now < end and engine.next_at is not None and resting < 2:
            if not engine.run(min(end, engine.now + 2.0), last - engine.events):
                raise Violated(13, f"no rest after {CONVERGE_EVENTS} events")
            # Twice, for what is on its way at the first look.
            resting = resting + 1 if self._at_rest() else 0

    def _at_rest(self) -> bool:
        """Nobody waits for anything any more."""
        if any(control.busy for control in self.controls) or not self.controls:
            return False
        if any(node.machine.groups or node.follower.seeking for node in self.nodes.values()):
            return False
        if any(rank.process.alive and not rank.idle for rank in self.ranks.values()):
            return False
        return self.launch is None or len(self.launch.done) >= len(self.launch.alive)

    def result(self) -> Result:
        """What came of it."""
        commits = sum(isinstance(f.content, Commit) for f in self.disk.folders["epochs"].values())
        return Result(
            self.seed,
            self.engine.events,
            self.engine.now,
            commits,
            self.violation,
            self.cells.hits,
            self.loads.loads,
            self.loads.clean,
            self.engine.lines,
        )


def options_rng(seed: int) -> random.Random:
    """What draws the options of a seed; another stream than that of its events."""
    return random.Random(f"options {seed}")
