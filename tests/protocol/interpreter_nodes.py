"""The commands of transcripts that concern several nodes and the controllers of a job."""

from __future__ import annotations

from itertools import count
from typing import Any

from interpreter import Interpreter, Line
from model_flush import PlannedJob, as_array, away, digest_of, replaced, run_order
from wording import key_of, size_of

from groupio.errors import StorageError
from groupio.model import Level, NodeLink
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol.agent import AgentMachine
from groupio.protocol.controller import Controller
from groupio.protocol.ledger import Ledger
from groupio.protocol.storing import make_plan

ORDERS = (fx.RetractGroup, fx.StoreChunks, fx.TakeRoom, fx.AdoptGroup, fx.DropHeld)


class NodesInterpreter(Interpreter):
    """One controller after the other, and agents that join, are cut off, and are lost."""

    def __init__(self) -> None:
        self.jobs: dict[tuple[str, int], PlannedJob] = {}
        self.lives: dict[str, int] = {}
        self.domains: dict[str, str] = {}
        self.lost: set[str] = set()
        self.plan: fx.MakePlan | None = None
        self.proof = 0
        self.opens: dict[tuple[str, int], ev.MemberOpened] = {}
        self.arrived: dict[str, ev.ClientArrived] = {}
        self.numbers = count(1)
        super().__init__()
        self.controller.numbers = self.numbers

    # -- machines ---------------------------------------------------------

    def machine(self, node: str, event: Any) -> None:
        if isinstance(event, ev.LeaseAsked):
            self._asked = event
            return
        if node not in self.lost:
            super().machine(node, event)

    def control(self, event: Any) -> None:
        if isinstance(event, ev.MemberOpened):
            asked = self._asked
            self.opens[event.client, event.save_id] = event
            lease = ev.LeaseAsked(asked.client, asked.save_id, asked.rank, asked.layout, event)
            super().machine(event.node, lease)
        if isinstance(event, ev.ClientArrived):
            self.arrived[event.client] = event
        super().control(event)

    def execute(self, node: str, effect: fx.Effect) -> None:
        super().execute(node, effect)
        match effect:
            case fx.LeaveMark(proof=number):
                self.proof = number
            case fx.MakePlan():
                self.plan = effect
            case fx.TellFailed(seat=seat):
                self.opens.pop((seat.client, seat.save_id), None)
            case fx.TellReached(seat=seat, level=Level.DURABLE):
                self.opens.pop((seat.client, seat.save_id), None)
            case fx.StartJob(group=group):
                life = str(self.lives.get(node, 0))
                self.jobs[node, group] = PlannedJob(
                    node, life, effect.key, effect.store, effect.planned
                )
            case fx.AddWave(group=group, client=client, save_id=save_id):
                job = self.jobs[node, group]
                job.content[effect.rank] = self.contents[client, save_id]
            case fx.RunOrder(group=group):
                job = self.jobs[node, group]
                job.order, job.told_copies = effect, False
            case _ if isinstance(effect, ORDERS):
                self.machine(effect.node, effect)

    # -- commands: agents ---------------------------------------------------------

    def do_join(self, line: Line) -> None:
        """Agents join, with all that they hold; ``domain``, ``store``, ``life``, ``clients``."""
        given = line.given
        for node in line.flags:
            self.lost.discard(node)
            self.lives.setdefault(node, 1)
            self.domains[node] = given.get("domain", self.domains.get(node, node))
            machine = self.machines[node]
            held = machine.held(tuple(machine.groups))
            inside = {(o.client, o.save_id) for h in held for o in h.opened}
            clients = given.get("clients")
            names = self.clients if clients is None else clients.split(",")
            here = [n for n in names if n in self.clients and self.clients[n].node == node]
            self.control(
                ev.NodeJoined(
                    node=node,
                    life=given.get("life", str(self.lives[node])),
                    address=f"tcp://{node}",
                    link=NodeLink(node, 1e9, 1e10, self.domains[node]),
                    store_id=given.get("store", "s1"),
                    path=f"/store/of/{node}",
                    held=held,
                    clients=tuple(self.arrived[n] for n in here if n in self.arrived),
                    opens=tuple(
                        o for k, o in self.opens.items() if k[0] in here and k not in inside
                    ),
                )
            )

    def do_link(self, line: Line) -> None:
        """A node's links were measured."""
        node = line.flags[0]
        rate = line.number("fabric", 1e10)
        link = NodeLink(node, 1e9, rate, self.domains.get(node, node), "ok" in line.flags)
        self.control(ev.LinkMeasured(link))

    def do_node_lost(self, line: Line) -> None:
        """The machine is gone: its successor has empty memory."""
        node = line.flags[0]
        life = line.given.get("life", str(self.lives[node]))
        if "life" not in line.given:
            self.lives[node] += 1
            self.machines[node] = AgentMachine(node, Ledger(self.machines[node].ledger.budget))
            self.lost.add(node)
        self.control(ev.NodeLost(node, life, "its machine failed"))

    def do_connection_lost(self, line: Line) -> None:
        """The controller gives an agent up that lives."""
        node = line.flags[0]
        self.control(ev.NodeLost(node, str(self.lives[node]), "nothing was heard of it"))

    def do_unheard(self, line: Line) -> None:
        """From now on nothing reaches this node or the controller, until it joins."""
        self.lost.add(line.flags[0])

    def do_new_controller(self, line: Line) -> None:
        """Another controller begins; agents have still to join it."""
        self.controller = Controller(resumes=True, numbers=self.numbers)
        for node, machine in self.machines.items():
            self.machine(node, ev.ControllerLeft(tuple(machine.groups)))

    def do_left(self, line: Line) -> None:
        """The node hears that the controller of these groups is gone."""
        self.machine(line.flags[0], ev.ControllerLeft((int(line.given["g"]),)))

    def do_keeps_content(self, line: Line) -> None:
        for machine in self.machines.values():
            machine.keeps_content = True

    def do_found(self, line: Line) -> None:
        """The store is open; ``undecided`` attempts as key:incarnation:world:node+node."""
        words = [word.split(":") for word in line.given.get("undecided", "").split(",") if word]
        commits = [word.split(":") for word in line.given.get("commits", "").split(",") if word]
        state = ev.StoreState(
            job="job",
            lineages=(),
            committed=tuple(ev.CommittedEpoch(key_of(k), 1, c.encode()) for k, c in commits),
            aborted=tuple(key_of(k) for k in line.given.get("aborts", "").split(",") if k),
            incarnation=int(line.given.get("incarnation", "1")),
            node_local="local" in line.flags,
            undecided=tuple(
                ev.UndecidedAttempt(key_of(k), int(i), int(w), tuple(n.split("+")) if n else ())
                for k, i, w, n in words
            ),
            store_id=line.given.get("store", "s1"),
        )
        self.control(ev.StoreOpened(state))

    def do_away_store(self, line: Line) -> None:
        self.control(ev.StoreUnavailable(away()))

    def do_replaced_store(self, line: Line) -> None:
        self.control(ev.StoreUnavailable(replaced()))

    # -- commands: proofs ---------------------------------------------------------

    def do_proves(self, line: Line) -> None:
        """Agents have to prove from now on that they see the controller's store."""
        self.controller.proves = True

    def _failed(self, line: Line) -> Any:
        return away() if "away" in line.flags else line.error()

    def do_mark_left(self, line: Line) -> None:
        """The controller's mark of a proof is there, or could not be left."""
        number = line.number("proof", self.proof)
        error = self._failed(line)
        name = "" if error is not None else f"m{number:g}"
        self.control(ev.MarkLeft(int(number), name, name.encode(), "/store", error))

    def do_shows(self, line: Line) -> None:
        """A node answers: ``absent``, ``other``, an error, or what is under the mark."""
        node, *what = line.flags
        name = line.given.get("mark", f"m{self.proof}")
        error = self._failed(line)
        if error is not None or "absent" in what:
            self.control(ev.StoreShown(node, name, error=error))
            return
        content = b"other" if "other" in what else name.encode()
        own = f"s{name[1:]}"
        self.control(ev.StoreShown(node, name, content, own, own.encode()))

    def do_finds(self, line: Line) -> None:
        """The controller looks for the node's mark: ``absent``, ``other``, an error, or it."""
        number = int(line.number("proof", self.proof))
        found = b"" if "absent" in line.flags else f"s{number}".encode()
        found = b"other" if "other" in line.flags else found
        self.control(ev.MarkFound(number, found, self._failed(line)))

    def do_proved(self, line: Line) -> None:
        """All of the newest proof, without a word."""
        self.do_mark_left(line)
        self.do_shows(line)
        self.do_finds(line)

    def do_reopened(self, line: Line) -> None:
        """A node, or the controller, opened its store anew."""
        self.control(ev.NodeReopened(line.flags[0]) if line.flags else ev.StoreRenewed())

    # -- commands: planned groups ---------------------------------------------------------

    def _job(self, line: Line) -> tuple[str, int, PlannedJob]:
        node, group = self._at(line)
        found = [g for (n, g) in self.jobs if n == node and "g" not in line.given]
        group = max(found) if found else group
        return node, group, self.jobs[node, group]

    def do_hashed(self, line: Line) -> None:
        for node in line.flags:
            _, group, job = self._job(Line("hashed", [node], line.given))
            job.hashed = True
            self.machine(node, ev.JobHashed(group, job.report()))

    def do_plan(self, line: Line) -> None:
        """The newest plan that was asked for is made."""
        assert self.plan is not None
        if "error" in line.flags:
            error = StorageError("The planner failed.")
            self.control(ev.Planned(self.plan.group, self.plan.round, error=error))
        else:
            self.control(make_plan(self.plan))

    def do_run(self, line: Line) -> None:
        """Nodes do one step of their orders: keep what they fetched, or store all."""
        for node in line.flags:
            _, group, job = self._job(Line("run", [node], line.given))
            peers = {
                n: j.in_memory()
                for (n, _), j in self.jobs.items()
                if j.key == job.key and n not in self.lost
            }
            if job.order is not None:
                self.machine(node, run_order(job, group, peers))

    def do_lacks(self, line: Line) -> None:
        """Peers give a node nothing; ``asked``, ``liars``."""
        node, group, job = self._job(line)
        number = int(line.number("round", job.order.round if job.order is not None else 0))
        job.order = None
        asked = tuple(line.given.get("asked", "").split(","))
        liars = tuple(w for w in line.given.get("liars", "").split(",") if w)
        digests = as_array({digest_of("anything")})
        self.machine(node, ev.JobShort(group, number, digests, asked, liars))

    def do_away(self, line: Line) -> None:
        """The node cannot reach the store now."""
        node, group, job = self._job(line)
        job.order = None
        self.machine(node, ev.JobFailed(group, away()))

    def do_replaced(self, line: Line) -> None:
        """The path of the store leads to another one now."""
        node, group = self._at(line)
        self.machine(node, ev.JobFailed(group, replaced()))

    def do_published_away(self, line: Line) -> None:
        self.control(ev.InflightPublished(self._at(line)[1], away()))

    def do_prepared_away(self, line: Line) -> None:
        self.control(ev.Prepared(self._at(line)[1], error=away()))

    def do_decided_away(self, line: Line) -> None:
        self.control(ev.Decided(self._at(line)[1], False, False, away()))

    def do_compared_away(self, line: Line) -> None:
        self.control(ev.Compared(self._at(line)[1], False, away()))

    def do_budget(self, line: Line) -> None:
        self.machines[line.flags[0]].ledger.budget = size_of(line.flags[1])
