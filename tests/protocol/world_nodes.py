"""The small world with several agents: nodes are lost and cut off, controllers are replaced."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

from model_flush import CHUNK, PlannedJob, away, bad_block, chunks_of, run_order
from model_ranks import Rank
from world import STORE_EFFECTS, World

from groupio.errors import Outcome, StorageError
from groupio.model import DecisionKey, Level, NodeLink
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol.agent import AgentMachine
from groupio.protocol.controller import Controller
from groupio.protocol.ledger import Ledger, Use
from groupio.protocol.storing import make_plan

MARKS = (fx.LeaveMark, fx.FindMark, fx.RemoveMarks)
TOLD = (fx.TellReached, fx.TellFailed, fx.TellUnreachable)
LATER = (ev.MemberGone, ev.MemberFailed)
"""What an agent tells again after it was cut off."""


class NodesWorld(World):
    """Nodes n0, n1, ...; the controller runs apart from them, or dies without any of them."""

    def __init__(self, *, nodes: int, budget: int, replicas: int = 1, domains: int = 64) -> None:
        super().__init__(nodes=nodes, budget=budget)
        self.budget, self.replicas, self.domains = budget, replicas, domains
        self.lives = dict.fromkeys(self.machines, 1)
        self.opens: dict[tuple[str, int], ev.MemberOpened] = {}
        self.durable: dict[DecisionKey, set[bytes]] = {}
        self.held_ever: dict[DecisionKey, dict[str, set[bytes]]] = {}
        self.numbers = count(1)
        self.plans: list[fx.MakePlan] = []
        self.orphaned: list[fx.Effect] = []
        """Store tasks of earlier controllers; nobody hears their answers."""
        self.terms = 0
        self.marks: dict[str, bytes] = {}
        """What is in the store under the names of marks, of both sides."""
        self.copies: set[str] = set()
        """Nodes whose path leads to a copy of the store."""
        self.refused = 0
        for machine in self.machines.values():
            machine.keeps_content = True
        self.new_controller()

    # -- what goes wrong ---------------------------------------------------------

    def new_controller(self) -> None:
        """The controller is lost; another one begins, and all agents join it."""
        self.terms += 1
        self.controller = Controller(numbers=self.numbers, resumes=True, proves=True)
        self.timers.clear()
        self.plans.clear()
        self.orphaned += [task for task in self.tasks if not isinstance(task, MARKS)]
        self.tasks.clear()
        for node, machine in self.machines.items():
            self.machine(node, ev.ControllerLeft(tuple(machine.groups)))
            self.cut_off(node)
            for opened in self.joined(node).opens:
                # It begins anew, under a key that is still to be found.
                self.ranks[opened.client].saves[opened.save_id].key = None

    def cut_off(self, node: str) -> None:
        """What is on its way is lost; the agent joins again."""
        later = [e for e in self.reports[node] if isinstance(e, LATER)]
        for order in self.orders[node]:
            if isinstance(order, fx.TellFailed):
                self.machines[node].forget(order.seat.client, order.seat.save_id)
        self.orders[node].clear()
        self.reports[node].clear()
        self._tell_loss(node, str(self.lives[node]))
        self.reports[node].append(self.joined(node))
        self.reports[node] += later

    def turn(self, node: str, *, copy: bool) -> None:
        """From now on the node sees a copy of the store, or the store itself again."""
        if copy != (node in self.copies):
            self.copies ^= {node}
            self.reports[node].append(ev.NodeReopened(node))

    def _tell_loss(self, node: str, life: str) -> None:
        """The controller learns that the life it knows of the node is over."""
        known = self.controller.nodes.life(node)
        if known not in ("", life):
            self.reports[node].append(ev.NodeLost(node, known, "its machine failed"))

    def joined(self, node: str) -> ev.NodeJoined:
        """What the agent says of itself when it joins."""
        machine = self.machines[node]
        held = machine.held(tuple(machine.groups))
        inside = {(o.client, o.save_id) for h in held for o in h.opened}
        here = [r for r in self.ranks.values() if r.node == node and r.alive and r.connected]
        names = {r.name for r in here}
        number = int(node[1:])
        return ev.NodeJoined(
            node=node,
            life=str(self.lives[node]),
            address=f"tcp://{node}",
            link=NodeLink(node, 1e9, 1e10, f"d{number % self.domains}"),
            store_id="s",
            held=held,
            clients=tuple(
                ev.ClientArrived(r.name, r.process, r.rank, r.world, "job", str(r.launch))
                for r in here
                if not any(isinstance(e, ev.ClientArrived) for e in r.outbox)
            ),
            opens=tuple(
                o
                for k, o in self.opens.items()
                if o.node == node and o.client in names and k not in inside
            ),
        )

    def lose_node(self, node: str) -> None:
        """The machine is gone; its successor of the same name joins with empty memory."""
        for rank in self.ranks.values():
            if rank.node == node and rank.alive:
                rank.alive, rank.connected, rank.copying = False, False, None
            if rank.node == node:
                rank.outbox.clear()
        self.orders[node].clear()
        self.reports[node].clear()
        self._tell_loss(node, "gone")
        self.opens = {k: o for k, o in self.opens.items() if o.node != node}
        for at in [at for at in self.jobs if at[0] == node]:
            del self.jobs[at]
        self.arenas[node].clear()
        self.machines[node] = AgentMachine(node, Ledger(self.budget))
        self.machines[node].keeps_content = True
        self.lives[node] += 1
        self.reports[node].append(self.joined(node))

    # -- ranks ---------------------------------------------------------

    def open(self, rank: Rank, *, size: int = 1 << 20, variant: int = 0, **fields: Any) -> None:
        super().open(rank, size=size, variant=variant, replicas=self.replicas, **fields)
        opened, asked = rank.outbox.pop(), rank.outbox.pop()
        total = max(asked.layout.total_bytes, 3 * CHUNK)
        opened = ev.MemberOpened(
            **{n: getattr(opened, n) for n in opened.__struct_fields__} | {"total_bytes": total}
        )
        if rank.rewind_to is not None and any(
            Level.DURABLE in s.levels for s in rank.saves.values()
        ):
            opened = ev.MemberOpened(
                **{n: getattr(opened, n) for n in opened.__struct_fields__} | {"rewind_to": None}
            )
        asked = ev.LeaseAsked(asked.client, asked.save_id, asked.rank, asked.layout, opened)
        rank.outbox += [asked, opened]

    def deliver(self, rank: Rank, event: Any) -> None:
        if isinstance(event, ev.MemberOpened):
            self.opens[event.client, event.save_id] = event
        if isinstance(event, ev.MemberGone):
            self.opens = {k: o for k, o in self.opens.items() if o.client != event.client}
        if isinstance(event, ev.ClientArrived):
            event = ev.ClientArrived(
                **{n: getattr(event, n) for n in event.__struct_fields__} | {"node": rank.node}
            )
        super().deliver(rank, event)

    # -- marks ---------------------------------------------------------

    def _store_step(self, effect: fx.Effect) -> None:
        if isinstance(effect, MARKS):
            self.tasks.remove(effect)
            answer = self._mark(effect)
            if answer is not None:
                self.control(answer)
            return
        lost = isinstance(effect, fx.PrepareEpoch) and not _placed(effect) <= self.durable.get(
            effect.key, set()
        )
        if lost:
            # As the driver looks every segment up before it makes the record.
            assert isinstance(effect, fx.PrepareEpoch)
            self.tasks.remove(effect)
            self.control(ev.Prepared(effect.group, error=StorageError("it is not there")))
            return
        super()._store_step(effect)

    def _mark(self, effect: fx.Effect) -> Any:
        fault = self.store.fault(effect)
        error = (away() if fault == "before" else bad_block()) if fault else None
        match effect:
            case fx.LeaveMark(proof=number):
                name = f"{self.terms}-{number}"
                if error is None:
                    self.marks[name] = name.encode()
                return ev.MarkLeft(number, name if error is None else "", name.encode(), "", error)
            case fx.FindMark(proof=number, name=name):
                return ev.MarkFound(number, self.marks.get(name, b""), error)
            case fx.RemoveMarks(own=own, shown=shown):
                for name in (*own, *shown):
                    self.marks.pop(name, None)
        return None

    def _show(self, order: fx.ShowStore) -> None:
        node, name = order.node, order.name
        fault = self.store.fault(order)
        found = b"" if node in self.copies else self.marks.get(name, b"")
        shown = ev.StoreShown(node, name, found)
        if fault:
            shown = ev.StoreShown(node, name, error=away() if fault == "before" else bad_block())
        elif found:
            own = f"{node}-{name}"
            self.marks[own] = own.encode()
            shown = ev.StoreShown(node, name, found, own, own.encode())
        self.reports[node].append(shown)

    # -- steps ---------------------------------------------------------

    def pending(self) -> list[tuple[str, Callable[[], None]]]:
        steps = [s for s in super().pending() if s[0] not in ("order", "job")]
        for node in self.machines:
            if self.orders[node]:
                steps.append(("order", lambda n=node: self._order_step(n)))
        for at, job in self.jobs.items():
            if job.has_work:
                steps.append(("job", lambda a=at, j=job: self._job_step(a, j)))
        for plan in self.plans:
            steps.append(("plan", lambda p=plan: self._plan_step(p)))
        for task in self.orphaned[:1]:
            steps.append(("store", lambda t=task: self._orphan_step(t)))
        return steps

    def _plan_step(self, plan: fx.MakePlan) -> None:
        self.plans.remove(plan)
        self.control(make_plan(plan))

    def _orphan_step(self, task: fx.Effect) -> None:
        self.orphaned.remove(task)
        if not isinstance(task, fx.OpenStore | fx.ForgetInflight):
            self.store.execute(task)

    def _order_step(self, node: str) -> None:
        effect = self.orders[node].popleft()
        if isinstance(effect, TOLD):
            self._tell(effect)
        elif isinstance(effect, fx.ShowStore):
            self._show(effect)
        else:
            self.machine(node, effect)

    def _tell(self, effect: Any) -> None:
        seat = effect.seat
        save = self.ranks[seat.client].saves[seat.save_id]
        if isinstance(effect, fx.TellUnreachable):
            # A new controller cannot know what the members were told already.
            assert Level.REPLICATED not in save.levels or self.terms > 1
            return
        if isinstance(effect, fx.TellReached):
            if effect.level is Level.DURABLE:
                self.opens.pop((seat.client, seat.save_id), None)
            assert (
                save.error is None
                or save.error.outcome is not Outcome.NOT_COMMITTED
                or (effect.level is not Level.DURABLE)
            ), f"{save} was told lost, and now {effect}"
            if save.over or effect.level in save.levels:
                return
            if save.levels and effect.level is Level.STAGED:
                return
            self._told_level(seat, effect.level)
            return
        self.opens.pop((seat.client, seat.save_id), None)
        if save.over:
            if Level.DURABLE in save.levels:
                assert effect.error.outcome is not Outcome.NOT_COMMITTED
            return
        self._told_failure(effect)

    def _job_step(self, at: tuple[str, int], job: Any) -> None:
        node, group = at
        if job.cancelled:
            job.waves.clear()
            job.ended, job.order = True, None
            self.machine(node, ev.JobIdle(group))
            return
        fault = self.store.fault(job)
        if fault in ("lacks", "lies"):
            if job.order is not None and job.order.order.fetch:
                self._short(node, group, job, lies=fault == "lies")
                return
        elif fault and job.store:
            job.order = None
            job.ended = not job.planned
            error = away() if fault == "away" else bad_block()
            if job.ended or fault != "away" or job.hashed:
                self.machine(node, ev.JobFailed(group, error))
            return
        if job.waves:
            wave = job.waves.popleft()
            word = self.ranks[wave.client].saves[wave.save_id].content
            job.content[wave.rank] = word
            if wave.eager:
                job.eager |= set(chunks_of(wave.rank, word))
            self.machine(node, ev.WaveStored(group, wave.rank, wave.number))
        elif not job.hashed:
            job.hashed = True
            if job.store:
                own = {d for r, w in job.content.items() for d in chunks_of(r, w)}
                self._write(job, job.eager if job.planned else own)
            if job.planned:
                self._note_held(job)
                self.machine(node, ev.JobHashed(group, job.report()))
            else:
                job.ended = True
                self.machine(node, ev.JobStored(group, job.report()))
        else:
            before = set(job.written)
            peers = {n: j.in_memory() for (n, _), j in self.jobs.items() if j.key == job.key}
            event = run_order(job, group, peers)
            self._write(job, job.written - before)
            self._note_held(job)
            self.machine(node, event)

    def _short(self, node: str, group: int, job: PlannedJob, *, lies: bool) -> None:
        """The first source that the order names gives nothing, or wrong bytes."""
        assert job.order is not None
        told, part = job.order, job.order.order.fetch[0]
        job.order = None
        asked = tuple({part.source} - {node})
        liars = asked if lies else ()
        self.machine(node, ev.JobShort(group, told.round, part.digests, asked, liars))

    def _write(self, job: PlannedJob, digests: set[bytes]) -> None:
        job.written |= digests
        if job.node in self.copies:
            return
        self.durable.setdefault(job.key, set()).update(digests)

    def _note_held(self, job: PlannedJob) -> None:
        self.held_ever.setdefault(job.key, {}).setdefault(job.node, set()).update(job.in_memory())

    # -- effects ---------------------------------------------------------

    def control(self, event: Any) -> None:
        self.last = ("", ev.TimerFired(""))
        for effect in self.controller.handle(event):
            self._execute(effect)

    def machine(self, node: str, event: Any) -> None:
        super().machine(node, event)
        self.last = ("", ev.TimerFired(""))

    def _execute(self, effect: fx.Effect) -> None:
        match effect:
            case fx.TellReached(seat=seat, level=level):
                if level is Level.REPLICATED:
                    self._check_replicated(seat)
                self._to(self.ranks[seat.client].node, effect)
            case fx.TellFailed(seat=seat) | fx.TellUnreachable(seat=seat):
                self._to(self.ranks[seat.client].node, effect)
            case fx.MakePlan():
                self.plans.append(effect)
            case fx.AdoptGroup(key=key, group=group):
                seats = next((m for m in self.groups.values() if self._key_of(m) == key), {})
                self.groups.setdefault(group, seats)
                self._to(effect.node, effect)
            case fx.RefuseNode(node=node):
                assert "is not the store" in effect.error.message
                self.refused += 1
                assert node in self.copies or any(
                    isinstance(e, ev.NodeReopened) for e in self.reports[node]
                )
                self.reports[node].append(self.joined(node))
            case _ if isinstance(effect, MARKS):
                self.tasks.append(effect)
            case (
                fx.ShowStore(node=node)
                | fx.StoreChunks(node=node)
                | fx.StoreAgain(node=node)
                | fx.TakeRoom(node=node)
                | fx.RetractGroup(node=node)
                | fx.DropHeld(node=node)
                | fx.StartCopy(node=node)
                | fx.AbortGroup(node=node)
                | fx.CloseGroup(node=node)
            ):
                self._to(node, effect)
            case fx.PrepareEpoch():
                self._check_durable(effect)
                super()._execute(effect)
            case fx.AdmitGroup(node=node):
                super()._execute(effect)
                if not self._reaches(node):
                    self.orders[node].pop()
            case _:
                super()._execute(effect)

    def _key_of(self, members: dict[int, tuple[str, int]]) -> DecisionKey | None:
        for client, save_id in members.values():
            return self.ranks[client].saves[save_id].key
        return None

    def _to(self, node: str, effect: fx.Effect) -> None:
        if self._reaches(node):
            self.orders[node].append(effect)

    def _reaches(self, node: str) -> bool:
        """An order reaches only the life that is meant, over the connection that it joined by."""
        again = any(isinstance(e, ev.NodeJoined) for e in self.reports[node])
        return not again and self.controller.nodes.life(node) == str(self.lives[node])

    def _execute_on(self, node: str, effect: fx.Effect) -> None:
        match effect:
            case fx.OpenArena(arena=arena, client=client):
                assert not client or self.ranks[client].alive or self.ranks[client].outbox
                self.arenas[node].add(arena)
            case fx.StartJob(group=group):
                assert (node, group) not in self.jobs
                self.jobs[node, group] = PlannedJob(
                    node, str(self.lives[node]), effect.key, effect.store, effect.planned
                )
            case fx.RunOrder(group=group):
                job = self.jobs[node, group]
                assert job.order is None
                assert job.hashed
                job.order, job.told_copies = effect, False
            case fx.EndJob(group=group, delete_segments=delete):
                job = self.jobs.pop((node, group))
                assert not job.has_work, "a job ends while it still works"
                record = self.store.records.get(job.key)
                assert not (delete and job.store and record is not None and record.commit)
            case fx.KeepContent() | fx.DropContent():
                pass
            case _:
                super()._execute_on(node, effect)

    def repeat(self) -> None:
        """Links repeat nothing in this world."""

    # -- promises ---------------------------------------------------------

    def _digests(self, members: dict[int, tuple[str, int]]) -> set[bytes]:
        return {
            d
            for rank, (client, save_id) in members.items()
            for d in chunks_of(rank, self.ranks[client].saves[save_id].content)
        }

    def _check_durable(self, effect: fx.PrepareEpoch) -> None:
        members = self.groups[effect.group]
        assert self._digests(members) <= _placed(effect)

    def _check_replicated(self, seat: fx.MemberSeat) -> None:
        members = next(m for m in self.groups.values() if (seat.client, seat.save_id) in m.values())
        key = self._key_of(members)
        assert key is not None
        for digest in self._digests(members):
            holders = {
                int(node[1:]) % self.domains
                for node, held in self.held_ever[key].items()
                if digest in held
            }
            assert len(holders) >= self.replicas

    def _check_memory(self, node: str) -> None:
        super()._check_memory(node)
        for extent in self.machines[node].ledger.extents:
            assert extent.content is None or extent.use is Use.FREE

    def check_rest(self) -> None:
        """Every group is decided, every member told, no memory held."""
        assert not self.controller.groups, self.controller.groups
        assert not self.controller.resume.attempts
        assert not self.controller.resume.held
        assert not self.controller.waiting
        for rank in self.ranks.values():
            for save in rank.saves.values():
                heard = rank.alive and rank.connected
                assert save.over or not heard, f"{rank} was never told of {save}"
        for machine in self.machines.values():
            assert not machine.groups, machine.groups
            assert machine.ledger.total(Use.LEASED) == 0
            alive = {r.name for r in self.ranks.values() if r.alive}
            assert set(machine.arenas) <= alive
        assert not self.jobs
        self._check_history()


def _placed(effect: fx.PrepareEpoch) -> set[bytes]:
    """The chunks that the epoch finds in segments."""
    return {
        row.tobytes()
        for report in effect.reports
        for row in report.chunks.digests[report.chunks.segments >= 0]
    }


__all__ = ["STORE_EFFECTS", "NodesWorld"]
