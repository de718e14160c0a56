"""A small world of nodes and ranks around the pure machines, with a model of the store.

Every channel keeps its own order and nothing else: which of them goes on is the caller's choice.
All promises that concern a single step are checked in that step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import count, pairwise
from typing import Any

from model_flush import away, bad_block
from model_ranks import FlushJob, Rank, Save, hand_over
from model_store import ModelStore
from protocol_help import layout_of, opened, report_of

from groupio.errors import GroupAborted, Outcome
from groupio.model import DecisionKey, Level, Lineage
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol import lineage as lines
from groupio.protocol.agent import AgentMachine
from groupio.protocol.controller import Controller
from groupio.protocol.group import Phase
from groupio.protocol.ledger import Ledger, Use

NODE_ORDERS = (fx.StartCopy, fx.StoreAgain, fx.AbortGroup, fx.CloseGroup)
STORE_EFFECTS = (
    fx.OpenStore,
    fx.CreateLineage,
    fx.PublishInflight,
    fx.PrepareEpoch,
    fx.CompareEpoch,
    fx.Decide,
    fx.ForgetInflight,
)

NOT_REPEATED = (ev.StoreOpened, ev.StoreUnavailable, ev.LeaseAsked)
"""Answers of calls, and what travels inside the process: these are no messages."""


class World:
    """Nodes with one agent machine each, one controller, one store, and launches of ranks."""

    def __init__(self, *, nodes: int = 1, budget: int = 64 << 20) -> None:
        self.controller = Controller()
        self.machines = {f"n{i}": AgentMachine(f"n{i}", Ledger(budget)) for i in range(nodes)}
        self.store = ModelStore()
        self.ranks: dict[str, Rank] = {}
        self.tasks: list[fx.Effect] = []
        self.orders: dict[str, deque[fx.Effect]] = {node: deque() for node in self.machines}
        self.reports: dict[str, deque[Any]] = {node: deque() for node in self.machines}
        self.jobs: dict[tuple[str, int], FlushJob] = {}
        self.timers: dict[str, float] = {}
        self.arenas: dict[str, set[int]] = {node: set() for node in self.machines}
        self.groups: dict[int, dict[int, tuple[str, int]]] = {}
        """Who sits in each group that was admitted: client and save by rank."""
        self.heard: dict[str, tuple[int, int]] = {}
        """When the controller heard of each client's arrival and of its process's end (0: not)."""
        self.launches = 0
        self.loads: dict[int, DecisionKey | None] = {}
        """The older epoch that each launch loaded by its number."""
        self.reloaded: set[int] = set()
        """Launches that loaded an epoch again after they had saved."""
        self.begun: set[int] = set()
        """Lineages that saves began."""
        self.last: tuple[str, Any] = ("", ev.TimerFired(""))
        self._pids = count(1000)
        self._names = count(1)
        self._moments = count(1)

    # -- what ranks do ---------------------------------------------------------

    def launch(
        self,
        world: int,
        *,
        back: int = 1,
        rewind_to: int | None = None,
        zombies: bool = False,
        loads: DecisionKey | None = None,
    ) -> None:
        """Start the job's processes, to go on after the newest epoch, or after the one it loads.

        The old ones end before, unless as ``zombies`` they do not know yet that they should.
        """
        for rank in list(self.ranks.values()):
            if not zombies:
                self.kill(rank)
        self.launches += 1
        start = self.latest() if rewind_to is None else rewind_to
        start = start if loads is None else loads.epoch
        self.loads[self.launches] = loads
        for number in range(world):
            node = f"n{number % len(self.machines)}"
            pid = next(self._pids)
            self._join(node, number, world, rewind_to, start + back, pid, self.launches)

    def _join(
        self,
        node: str,
        number: int,
        world: int,
        rewind: int | None,
        epoch: int,
        pid: int,
        launch: int,
        gave_up: tuple[int, ...] = (),
    ) -> None:
        name = f"c{next(self._names)}"
        process = ev.Process(pid, 1)
        self.ranks[name] = Rank(
            name=name,
            process=process,
            node=node,
            rank=number,
            world=world,
            launch=launch,
            rewind_to=rewind,
            next_epoch=max(0, epoch),
        )
        arrived = ev.ClientArrived(
            name, process, number, world, "job", launch_id=str(launch), gave_up=gave_up
        )
        self.ranks[name].outbox.append(arrived)

    def shown(self) -> dict[int, DecisionKey]:
        """The epochs of the line, as a reader of the store finds them."""
        table = lines.by_number(self.store.lineages.values())
        commits = [key for key, record in self.store.records.items() if record.commit]
        return lines.visible(commits, table, lines.current(table))

    def latest(self) -> int:
        """The newest epoch of the line, -1 if there is none."""
        return max(self.shown(), default=-1)

    def current(self) -> list[Rank]:
        """The ranks of the newest launch that can still act."""
        return [r for r in self.active() if r.launch == self.launches]

    def active(self) -> list[Rank]:
        """All ranks that can act, those of older launches too."""
        return [r for r in self.ranks.values() if r.alive and r.connected]

    def open(self, rank: Rank, *, size: int = 1 << 20, variant: int = 0, **fields: Any) -> None:
        """The rank saves its next epoch."""
        save_id = len(rank.saves) + 1
        content = f"{rank.next_epoch}/{variant}"
        rank.saves[save_id] = Save(save_id, rank.next_epoch, content)
        rank.next_epoch += 1
        layout = layout_of(size)
        others = [s for i, s in rank.saves.items() if i != save_id and s.error is None]
        if not others or rank.launch in self.reloaded:
            fields.setdefault("resumed_from", self.loads[rank.launch])
        rank.outbox.append(ev.LeaseAsked(rank.name, save_id, rank.rank, layout))
        rank.outbox.append(
            opened(
                rank.rank,
                rank.world,
                rank.saves[save_id].epoch,
                node=rank.node,
                client=rank.name,
                process=rank.process,
                save_id=save_id,
                rewind_to=rank.rewind_to,
                launch_id=str(rank.launch),
                **fields,
            )
        )

    def reload(self, key: DecisionKey) -> None:
        """The ranks load an older epoch, and go on after it."""
        self.loads[self.launches] = key
        self.reloaded.add(self.launches)
        for rank in self.current():
            rank.next_epoch = key.epoch + 1

    def expect(self, rank: Rank, size: int) -> None:
        """The rank says how much its first save will take."""
        rank.outbox.append(ev.SaveExpected(rank.name, size))

    def withdraw(self, rank: Rank) -> None:
        """The rank gives its open save up."""
        save = next(s for s in rank.saves.values() if not s.released)
        if rank.copying is None:
            save.withdrawn = True
            save.grants.clear()
            rank.outbox.append(ev.WriterStopped(rank.name, save.save_id))
            error = GroupAborted("it was interrupted")
            rank.outbox.append(ev.MemberFailed(rank.name, save.save_id, error))

    def kill(self, rank: Rank) -> None:
        """The process ends; what it sent before still arrives."""
        for one in self.ranks.values():
            if one.alive and one.process == rank.process:
                one.alive, one.connected, one.copying = False, False, None
                one.outbox.append(ev.MemberGone(one.name, process_gone=True))

    def hang_up(self, rank: Rank) -> None:
        """The connection ends, the process goes on and connects again."""
        rank.connected = False
        rank.outbox.append(ev.MemberGone(rank.name, process_gone=False))
        pid, epoch = rank.process.pid, rank.next_epoch
        gave_up = tuple(s.epoch for s in rank.saves.values() if not s.released)
        self._join(
            rank.node, rank.rank, rank.world, rank.rewind_to, epoch, pid, rank.launch, gave_up
        )

    # -- what may happen next ---------------------------------------------------------

    def pending(self) -> list[tuple[str, Callable[[], None]]]:
        """Everything that may happen next, with a word for its kind; timers left out."""
        steps: list[tuple[str, Callable[[], None]]] = []
        for task in self._runnable():
            steps.append(("store", lambda t=task: self._store_step(t)))
        for node in self.machines:
            if self.orders[node]:
                steps.append(("order", lambda n=node: self.machine(n, self.orders[n].popleft())))
            if self.reports[node]:
                steps.append(("report", lambda n=node: self.control(self.reports[n].popleft())))
        for rank in self.ranks.values():
            if rank.outbox:
                steps.append(("message", lambda r=rank: self.deliver(r, r.outbox.popleft())))
            if rank.can_copy:
                steps.append(("copy", rank.copy))
        for at, job in self.jobs.items():
            if job.has_work:
                steps.append(("job", lambda a=at, j=job: self._job_step(a, j)))
        return steps

    def fire(self, name: str) -> None:
        """Let a timer run out."""
        del self.timers[name]
        self.control(ev.TimerFired(name))

    def deliver(self, rank: Rank, event: Any) -> None:
        """An event of a rank arrives at its node: for the machine, the controller, or both."""
        to_controller = (ev.ClientArrived, ev.MemberOpened, ev.MemberFailed)
        if isinstance(event, (*to_controller, ev.MemberGone)):
            self.reports[rank.node].append(event)
        if not isinstance(event, to_controller):
            self.machine(rank.node, event)

    def _runnable(self) -> list[fx.Effect]:
        """Tasks of the store that may be next: in order for each key, and around an opening."""
        found: list[fx.Effect] = []
        keys: set[Any] = set()
        for task in self.tasks:
            if isinstance(task, fx.OpenStore):
                return found or [task]
            key = getattr(task, "key", None)
            if key not in keys:
                found.append(task)
            keys.add(key)
        return found

    def _store_step(self, effect: fx.Effect) -> None:
        self.tasks.remove(effect)
        if (answer := self.store.execute(effect)) is not None:
            self.control(answer)

    def _job_step(self, at: tuple[str, int], job: FlushJob) -> None:
        node, group = at
        if job.cancelled:
            job.waves.clear()
            job.ended = True
            self.machine(node, ev.JobIdle(group))
        elif fault := self.store.fault(job):
            job.ended = True
            self.machine(node, ev.JobFailed(group, away() if fault == "away" else bad_block()))
        elif job.waves:
            wave = job.waves.popleft()
            self.machine(node, ev.WaveStored(group, wave.rank, wave.number))
        else:
            job.ended = True
            words = {r: self.ranks[c].saves[s].content for r, (c, s) in job.members.items()}
            self.machine(node, ev.JobStored(group, report_of(node, words)))

    # -- the machines and their effects ---------------------------------------------------------

    def control(self, event: Any) -> None:
        """Feed the controller and execute its effects."""
        self.last = ("", event)
        if isinstance(event, ev.ClientArrived):
            self.heard[event.client] = (next(self._moments), 0)
        if isinstance(event, ev.MemberGone) and event.process_gone:
            self.heard[event.client] = (self.heard[event.client][0], next(self._moments))
        for effect in self.controller.handle(event):
            self._execute(effect)
        self._check_nobody_is_missed_in_vain()

    def machine(self, node: str, event: Any) -> None:
        """Feed a node's machine and execute its effects."""
        self.last = (node, event)
        for effect in self.machines[node].handle(event):
            self._execute_on(node, effect)
        self._check_memory(node)

    def repeat(self) -> None:
        """The last event comes again: it changes nothing, at most it is reported again."""
        node, event = self.last
        if isinstance(event, NOT_REPEATED):
            return
        if not node:
            assert self.controller.handle(event) == []
            return
        for effect in self.machines[node].handle(event):
            if isinstance(effect, fx.Punch):
                assert isinstance(event, ev.AheadMapped)
                continue
            assert isinstance(effect, fx.Report), f"{event} came again and caused {effect}"
            self.reports[node].append(effect.event)

    def _execute(self, effect: fx.Effect) -> None:
        match effect:
            case fx.StartTimer(name=name, delay_s=delay):
                self.timers[name] = delay
            case fx.StopTimer(name=name):
                self.timers.pop(name, None)
            case fx.TellReached(seat=seat, level=level):
                self._told_level(seat, level)
            case fx.TellFailed(seat=seat):
                self._told_failure(effect)
            case fx.AdmitGroup(node=node, group=group):
                seats = {s.rank: (s.client, s.save_id) for s in effect.seats}
                self.groups.setdefault(group, {}).update(seats)
                for seat in effect.seats:
                    self.ranks[seat.client].saves[seat.save_id].key = effect.key
                self.orders[node].append(effect)
            case _ if isinstance(effect, NODE_ORDERS):
                self.orders[effect.node].append(effect)
            case _:
                assert isinstance(effect, STORE_EFFECTS), effect
                if isinstance(effect, fx.PrepareEpoch):
                    self._check_whole(effect)
                if isinstance(effect, fx.CreateLineage):
                    self._check_line(effect.lineage)
                if isinstance(effect, fx.CompareEpoch):
                    known = self.controller.committed[effect.key]
                    assert known == self.store.records[effect.key].content
                self.tasks.append(effect)

    def _execute_on(self, node: str, effect: fx.Effect) -> None:
        match effect:
            case fx.Report(event=event):
                self.reports[node].append(event)
            case fx.OpenArena(arena=arena, client=client):
                assert self.ranks[client].alive or self.ranks[client].outbox
                self.arenas[node].add(arena)
            case fx.CloseArena(arena=arena):
                self.arenas[node].remove(arena)
            case fx.Punch(arena=arena, offset=offset):
                assert arena in self.arenas[node]
                there = [e.offset for e in self.machines[node].ledger.extents if e.arena == arena]
                assert offset not in there
            case fx.Populate(arena=arena, client=client):
                assert arena in self.arenas[node]
                if self.ranks[client].alive and self.ranks[client].connected:
                    mapped = ev.AheadMapped(client, effect.offset, effect.length)
                    self.ranks[client].outbox.append(mapped)
            case fx.GrantLease(client=client):
                assert effect.arena in self.arenas[node]
                rank = self.ranks[client]
                if rank.alive and rank.connected and not rank.saves[effect.save_id].over:
                    rank.granted(effect)
            case fx.StartJob(group=group):
                assert (node, group) not in self.jobs
                self.jobs[node, group] = FlushJob(effect.key, effect.store)
            case fx.AddWave(group=group):
                hand_over(self.jobs[node, group], effect)
            case fx.FinishJob(group=group):
                self.jobs[node, group].finished = True
            case fx.RepeatJob(group=group):
                self.jobs[node, group].repeat()
            case fx.CancelJob(group=group):
                job = self.jobs[node, group]
                job.cancelled, job.ended = True, False
            case fx.EndJob(group=group):
                assert self.jobs.pop((node, group)).ended, "a job ends while it still works"

    # -- promises ---------------------------------------------------------

    def _told_level(self, seat: fx.MemberSeat, level: Level) -> None:
        rank = self.ranks[seat.client]
        save = rank.saves[seat.save_id]
        save.reach(level)
        members = next(m for m in self.groups.values() if (seat.client, seat.save_id) in m.values())
        others = [self.ranks[c].saves[s] for c, s in members.values()]
        assert all(o.copied for o in others), f"{level} was told before all had copied"
        if level is Level.DURABLE:
            assert save.key is not None
            record = self.store.records[save.key]
            assert record.commit
            words = {r: self.ranks[c].saves[s].content.encode() for r, (c, s) in members.items()}
            assert record.content == repr(sorted(words.items())).encode()

    def _told_failure(self, effect: fx.TellFailed) -> None:
        seat = effect.seat
        rank = self.ranks[seat.client]
        save = rank.saves[seat.save_id]
        if rank.alive and rank.connected:
            rank.failed(seat.save_id, effect.error)
        else:
            save.fail(effect.error)
        self.machines[rank.node].forget(seat.client, seat.save_id)
        if save.key is not None and effect.error.outcome is not Outcome.UNKNOWN:
            self.store.check_told(save.key, effect.error.outcome)

    def _check_whole(self, effect: fx.PrepareEpoch) -> None:
        """An epoch is made of all members of one launch, and of no one else."""
        members = self.groups[effect.group]
        found = sorted(m.rank for report in effect.reports for m in report.members)
        assert found == list(range(effect.world_size)) == sorted(members)
        assert len({self.ranks[client].launch for client, _ in members.values()}) == 1

    def _check_line(self, line: Lineage) -> None:
        """A line that a save begins abandons nothing of its own launch, or of one that runs."""
        group = self.controller.groups.get(self.controller._begins)
        if group is None or group.first.begin_after is not None:
            return  # somebody asked for it
        launch = self.ranks[group.first.client].launch
        self.begun.add(line.number)
        assert group.first.resumed_from is not None
        assert line.after_epoch == group.first.resumed_from.epoch
        assert {self.ranks[s.opened.client].launch for s in group.seats.values()} == {launch}
        for rank in self.ranks.values():
            if rank.launch == launch:
                saved = [s.epoch for s in rank.saves.values() if Level.DURABLE in s.levels]
                assert max(saved, default=-1) <= line.after_epoch, f"{line} rewinds {saved}"
            elif rank.alive and any(s.key is not None for s in rank.saves.values()):
                assert rank.name not in self.controller._clients, f"{rank} runs, and {line} begins"

    def _check_nobody_is_missed_in_vain(self) -> None:
        """A group that waits for a rank whose end its members saw waits a short while only."""
        for group in self.controller.groups.values():
            seated = [self.ranks[seat.opened.client] for seat in group.seats.values()]
            if group.phase is not Phase.GATHERING or not all(one.alive for one in seated):
                continue  # in the second case the news is on its way
            lives = {one.process for one in seated}
            arrived = [
                self.heard[one.name][0]
                for one in self.ranks.values()
                if one.process in lives and one.name in self.heard
            ]
            for number in group.missing:
                known = [
                    self.heard[one.name]
                    for one in self.ranks.values()
                    if (one.launch, one.rank) == (seated[0].launch, number)
                    and one.name in self.heard
                ]
                if known and all(end > min(arrived) for _, end in known):
                    ended = f"ended-{group.number}-{number}"
                    assert ended in self.timers, f"{group} waits for {number}"

    def _check_memory(self, node: str) -> None:
        machine = self.machines[node]
        ledger = machine.ledger
        assert ledger.total() <= ledger.budget
        spans: dict[int, list[tuple[int, int]]] = {}
        for extent in ledger.extents:
            assert extent.arena in self.arenas[node]
            spans.setdefault(extent.arena, []).append(
                (extent.offset, extent.offset + extent.length)
            )
        for ranges in spans.values():
            ranges.sort()
            assert all(a[1] <= b[0] for a, b in pairwise(ranges))
        held = {(e.arena, e.offset): e.use for e in ledger.extents}
        for client, extent in machine._ahead.items():
            assert machine.arenas[client] == extent.arena
            assert held[extent.arena, extent.offset] is extent.use is Use.FREE
        for (where, group), job in self.jobs.items():
            for wave in job.waves if where == node else ():
                use = held[wave.arena, wave.offset]
                assert use is Use.LEASED, f"group {group} works on {use} memory"
        for rank in self.ranks.values():
            if rank.node == node and rank.copying is not None:
                use = held.get((rank.copying.arena, rank.copying.offset))
                assert use in (Use.LEASED, Use.QUARANTINED), f"{rank.name} writes to {use} memory"

    # -- the end ---------------------------------------------------------

    def settle(self, choose: Callable[[int], int], steps: int = 20_000) -> None:
        """Let everything happen that may; a timer runs out only when nothing else can."""
        for _ in range(steps):
            pending = self.pending()
            if pending:
                pending[choose(len(pending))][1]()
            elif self.timers:
                self.fire(sorted(self.timers)[choose(len(self.timers))])
            else:
                return
        raise AssertionError("the world does not come to rest")

    def reopen(self, choose: Callable[[int], int]) -> None:
        """Close the store and open it again, so that it is recovered."""
        self.controller.store_closed()
        for effect in self.controller.open_store(create=False):
            self._execute(effect)
        self.settle(choose)

    def check_rest(self) -> None:
        """Nothing is left over: every group is decided, every member told, no memory held."""
        assert not self.controller.groups
        assert not self.controller.presence._watches
        self._check_presence()
        assert not self.controller.waiting
        now = self.controller.incarnation
        if now is not None:
            for name, client in self.controller._clients.items():
                assert self.ranks[name].alive or client.incarnation == now.number
        for rank in self.ranks.values():
            for save in rank.saves.values():
                heard = rank.alive and rank.connected
                assert save.over or not heard, f"{rank} was never told of {save}"
        for node, machine in self.machines.items():
            assert not machine.groups
            assert machine.ledger.total(Use.LEASED) == 0
            alive = {r.name for r in self.ranks.values() if r.alive}
            assert set(machine.arenas) <= alive
            assert set(machine.arenas.values()) == self.arenas[node]
            silent = {r.name for r in self.ranks.values() if r.alive and not r.connected}
            assert {client for client, _ in machine._held} <= silent
            assert not machine._asked
            assert set(machine._ahead) <= alive - silent
            assert machine._gone == set()
        assert not self.jobs
        self._check_history()

    def _check_presence(self) -> None:
        """Of those whose process ended, nobody is kept whose end no living process saw."""
        persons = self.controller.presence._persons
        alive = {name for name in persons if self.ranks[name].alive}
        launches = {self.ranks[name].launch for name in alive}
        assert {self.ranks[name].launch for name in persons} <= launches
        ended = [(self.ranks[n].launch, self.ranks[n].rank) for n in persons.keys() - alive]
        assert len(ended) == len(set(ended))

    def _check_history(self) -> None:
        newest: dict[int, int] = {}
        for key, commit in self.store.decided:
            if commit:
                assert key.epoch > newest.get(key.lineage, -1), f"{key} came out of order"
                newest[key.lineage] = key.epoch
