"""Runs protocol transcripts: readable commands in, the effects of the machines out.

A transcript is a text file of blocks: command lines, then ``----``, then the effects of these
commands up to an empty line. Lines that start with ``#`` are for the reader. Orders of the
controller reach the nodes at once and in order, and so do their reports; everything else waits
for a command. With GROUPIO_REWRITE=1 the test writes what it sees into the file.
"""

from __future__ import annotations

import shlex
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from protocol_help import layout_of, opened, report_of
from wording import key_of, size_of, spoken, status_lines

from groupio.errors import GroupAborted, StorageError, StorageFull
from groupio.model import Lineage
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol.agent import AgentMachine
from groupio.protocol.controller import Controller
from groupio.protocol.ledger import Ledger

MIB = 1 << 20
ON_NODE = (
    fx.OpenArena,
    fx.CloseArena,
    fx.Populate,
    fx.Punch,
    fx.StartJob,
    fx.AddWave,
    fx.FinishJob,
    fx.CancelJob,
    fx.RepeatJob,
    fx.EndJob,
    fx.RunOrder,
    fx.KeepContent,
    fx.DropContent,
)


@dataclass
class Client:
    """What the transcript said of a client: it keeps it for the next command."""

    name: str
    node: str
    process: ev.Process
    saves: int = 0


@dataclass
class Line:
    """A parsed command: words without ``=`` are in ``flags``."""

    name: str
    flags: list[str] = field(default_factory=list)
    given: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Line:
        name, *words = shlex.split(text)
        line = cls(name)
        for word in words:
            key, equals, value = word.partition("=")
            if equals:
                line.given[key] = value
            else:
                line.flags.append(word)
        return line

    def number(self, key: str, default: float) -> float:
        return float(self.given.get(key, default))

    def error(self) -> Any:
        """The error that the command reports, or None."""
        if "error" not in self.flags and "full" not in self.flags:
            return None
        if "full" in self.flags:
            return StorageFull("There is no room in /store.", path="/store", needed=9, free=1)
        return StorageError("The disk of /store does not answer.", path="/store", errno=5)


class Interpreter:
    """One controller, its nodes, and what the commands made of them."""

    def __init__(self) -> None:
        self.controller = Controller()
        self.machines: dict[str, AgentMachine] = {}
        self.clients: dict[str, Client] = {}
        self.contents: dict[tuple[str, int], str] = {}
        self.members: dict[tuple[str, int], list[fx.MemberSeat]] = {}
        self.orders: list[fx.Effect] = []
        self.group = 0
        self.line: Lineage | None = None
        self.out: list[str] = []
        self.queue: deque[Callable[[], None]] = deque()
        self.again: Callable[[], None] = lambda: None
        self.do_nodes(Line("nodes", ["n0"]))

    def run(self, text: str) -> list[str]:
        """Execute one command line; the effects, one per line."""
        line = Line.parse(text)
        self.out = []
        getattr(self, "do_" + line.name.replace("-", "_"))(line)
        while self.queue:
            self.queue.popleft()()
        return self.out

    # -- machines ---------------------------------------------------------

    def control(self, event: Any) -> None:
        def step() -> None:
            self.take("", self.controller.handle(event))

        self.again = step
        self.queue.append(step)

    def machine(self, node: str, event: Any) -> None:
        def step() -> None:
            self.take(node, self.machines[node].handle(event))

        self.again = step
        self.queue.append(step)

    def take(self, node: str, effects: list[fx.Effect]) -> None:
        for effect in effects:
            self.queue.append(lambda e=effect: self.execute(node, e))  # type: ignore[misc]

    def execute(self, node: str, effect: fx.Effect) -> None:
        again = self.again
        prefix = f"{node}: " if isinstance(effect, ON_NODE) else ""
        self.out.append(prefix + spoken(effect))
        match effect:
            case fx.Report(event=event):
                self.control(event)
            case fx.AdmitGroup(group=group):
                self.group = group
                self.members[effect.node, group] = list(effect.seats)
                self.orders.append(effect)
                self.machine(effect.node, effect)
            case fx.StartCopy() | fx.StoreAgain() | fx.AbortGroup() | fx.CloseGroup():
                self.machine(effect.node, effect)
                self.orders.append(effect)
            case fx.CreateLineage(lineage=line):
                self.line = line
            case fx.TellFailed(seat=seat):
                self.machines[self.clients[seat.client].node].forget(seat.client, seat.save_id)
        self.again = again

    # -- commands: the setting ---------------------------------------------------------

    def do_nodes(self, line: Line) -> None:
        budget = size_of(line.given.get("budget", "64M"))
        self.machines = {name: AgentMachine(name, Ledger(budget)) for name in line.flags}

    def do_again(self, line: Line) -> None:
        """The last event comes a second time."""
        self.queue.append(self.again)

    def do_orders_again(self, line: Line) -> None:
        """A node hears all its orders of the past a second time."""
        for order in self.orders:
            if not isinstance(order, fx.AdmitGroup) or order.group in self.controller.groups:
                self.machine(order.node, order)

    def do_status(self, line: Line) -> None:
        reader = line.given.get("reader", "")
        self.out += status_lines(self.controller, list(self.machines.values()), reader)

    # -- commands: ranks ---------------------------------------------------------

    def _client(self, line: Line) -> tuple[Client, int]:
        """The client that a line speaks of, and its rank."""
        given = line.given
        rank = int(given.get("rank", "0"))
        name = given.get("client", f"c{rank}")
        pid = int(given.get("pid", 100 + rank))
        client = self.clients.setdefault(
            name, Client(name, given.get("node", next(iter(self.machines))), ev.Process(pid, 1))
        )
        return client, rank

    def do_hello(self, line: Line) -> None:
        """A client connects."""
        given = line.given
        client, rank = self._client(line)
        gave_up = tuple(int(word) for word in given.get("gave-up", "").split(",") if word)
        arrived = ev.ClientArrived(
            client=client.name,
            process=client.process,
            rank=rank,
            world_size=int(given.get("world", "1")),
            job=given.get("job"),
            launch_id=given.get("launch"),
            gave_up=gave_up,
            has_saved="saved" in line.flags,
        )
        self.control(arrived)

    def do_open(self, line: Line) -> None:
        given = line.given
        client, rank = self._client(line)
        name = client.name
        client.saves += 1
        self.contents[name, client.saves] = given.get("content", "x")
        layout = layout_of(size_of(given.get("size", "1M")))
        self.machine(client.node, ev.LeaseAsked(name, client.saves, rank, layout))
        replicated = given.get("replicated", "")
        self.control(
            opened(
                rank,
                int(given.get("world", "1")),
                int(given.get("epoch", "1")),
                node=client.node,
                client=name,
                process=client.process,
                save_id=client.saves,
                deadline_s=line.number("deadline", 600),
                elapsed_s=line.number("elapsed", 0),
                at=line.number("at", 0),
                replicated=tuple(replicated.split(",")) if replicated else (),
                when_full=given.get("when-full", "wait"),
                rewind_to=int(given["rewind"]) if "rewind" in given else None,
                launch_id=given.get("launch"),
                job=given.get("job"),
                metadata={"note": given["note"]} if "note" in given else {},
                door=given.get("door", ""),
                replicas=int(given.get("replicas", "1")),
                total_bytes=layout.total_bytes,
                resumed_from=key_of(given["loaded"]) if "loaded" in given else None,
                begin_after=int(given["after"]) if "after" in given else None,
                side=given.get("side", "core"),
            )
        )

    def _save(self, line: Line) -> tuple[Client, int]:
        client = self.clients[line.flags[0]]
        return client, int(line.given.get("save", client.saves))

    def do_copied(self, line: Line) -> None:
        client, save_id = self._save(line)
        wave = int(line.number("wave", 1)) - 1
        self.machine(client.node, ev.WaveCopied(client.name, save_id, wave))

    def do_released(self, line: Line) -> None:
        client, save_id = self._save(line)
        self.machine(client.node, ev.WriterStopped(client.name, save_id))

    def do_withdraw(self, line: Line) -> None:
        client, save_id = self._save(line)
        self.machine(client.node, ev.WriterStopped(client.name, save_id))
        self.control(ev.MemberFailed(client.name, save_id, GroupAborted("it was interrupted")))

    def do_gone(self, line: Line) -> None:
        """A process ended: the controller and the node hear of it."""
        client = self.clients[line.flags[0]]
        self.control(ev.MemberGone(client.name, process_gone=True))
        self.machine(client.node, ev.MemberGone(client.name, process_gone=True))

    def do_hung_up(self, line: Line) -> None:
        """A connection ended, its process lives on."""
        client = self.clients[line.flags[0]]
        self.control(ev.MemberGone(client.name, process_gone=False))
        self.machine(client.node, ev.MemberGone(client.name, process_gone=False))

    def do_node_loses(self, line: Line) -> None:
        """A process ended, and only its node knows it yet."""
        known = self.clients.get(line.flags[0])
        node = known.node if known is not None else next(iter(self.machines))
        self.machine(node, ev.MemberGone(line.flags[0], process_gone=True))

    def do_bye(self, line: Line) -> None:
        """A client closes: it writes no more, but its process lives on."""
        client = self.clients[line.flags[0]]
        self.machine(client.node, ev.MemberGone(client.name, process_gone=True))
        self.control(ev.MemberGone(client.name, process_gone=False, closed=True))

    def do_mapped(self, line: Line) -> None:
        """A client has mapped what it got ahead: ``at`` an offset, so many bytes."""
        name, given = line.flags[0], line.given
        node = next(iter(self.machines))
        self.machine(node, ev.AheadMapped(name, size_of(given["at"]), size_of(given["size"])))

    def do_expect(self, line: Line) -> None:
        """A client, or its newest epoch, says how much it is going to save."""
        known = self.clients.get(line.flags[0])
        node = known.node if known is not None else next(iter(self.machines))
        self.machine(node, ev.SaveExpected(line.flags[0], size_of(line.given["size"])))

    # -- commands: nodes ---------------------------------------------------------

    def _at(self, line: Line) -> tuple[str, int]:
        node = next((word for word in line.flags if word in self.machines), None)
        return node or next(iter(self.machines)), int(line.number("g", self.group))

    def do_wave_stored(self, line: Line) -> None:
        node, group = self._at(line)
        rank, wave = int(line.number("rank", 0)), int(line.number("wave", 1)) - 1
        self.machine(node, ev.WaveStored(group, rank, wave))

    def do_stored(self, line: Line) -> None:
        node, group = self._at(line)
        if (error := line.error()) is not None:
            self.machine(node, ev.JobFailed(group, error))
            return
        seats = self.members.get((node, group), [])
        words = {s.rank: self.contents[s.client, s.save_id] for s in seats}
        self.machine(node, ev.JobStored(group, report_of(node, words)))

    def do_idle(self, line: Line) -> None:
        node, group = self._at(line)
        self.machine(node, ev.JobIdle(group))

    # -- commands: the store and the clock ---------------------------------------------------------

    def do_look(self, line: Line) -> None:
        """A client said Hello: open the store if there is one."""
        self.take("", self.controller.open_store(create=False))

    def do_store_opened(self, line: Line) -> None:
        given = line.given
        commits = [word.split(":") for word in given.get("commits", "").split(",") if word]
        aborts = [word for word in given.get("aborts", "").split(",") if word]
        lineages = [word.split(":") for word in given.get("lineages", "").split(",") if word]
        state = ev.StoreState(
            job="job",
            lineages=tuple(Lineage(*map(int, words)) for words in lineages),
            committed=tuple(ev.CommittedEpoch(key_of(k), 1, c.encode()) for k, c in commits),
            aborted=tuple(map(key_of, aborts)),
            incarnation=int(given.get("incarnation", "0")),
            node_local="remote" not in line.flags,
        )
        self.control(ev.StoreOpened(state))

    def do_store_unavailable(self, line: Line) -> None:
        error = StorageError("The disk of /store does not answer.", path="/store", errno=5)
        self.control(ev.StoreUnavailable(error))

    def do_store_closed(self, line: Line) -> None:
        self.controller.store_closed()

    def do_lineage_created(self, line: Line) -> None:
        error = line.error()
        self.control(ev.LineageCreated(self.line if error is None else None, error))

    def do_published(self, line: Line) -> None:
        self.control(ev.InflightPublished(self._at(line)[1], line.error()))

    def do_prepared(self, line: Line) -> None:
        error = line.error()
        content = b"" if error is not None else line.given.get("content", "x").encode()
        self.control(ev.Prepared(self._at(line)[1], content, error))

    def do_compared(self, line: Line) -> None:
        self.control(ev.Compared(self._at(line)[1], "equal" in line.flags, line.error()))

    def do_decided(self, line: Line) -> None:
        commit, ours = "commit" in line.flags, "theirs" not in line.flags
        error = line.error()
        self.control(ev.Decided(self._at(line)[1], commit, ours and error is None, error))

    def do_timer(self, line: Line) -> None:
        self.control(ev.TimerFired(line.flags[0]))

    def do_drain(self, line: Line) -> None:
        self.control(ev.Drain(abort_unstaged=False))

    def do_stop(self, line: Line) -> None:
        self.control(ev.Drain(abort_unstaged=True))

    def do_epochs_in_flight(self, line: Line) -> None:
        self.controller.epochs_in_flight = int(line.flags[0])

    def do_limit_waiting(self, line: Line) -> None:
        self.controller.waiting.limit = int(line.flags[0])


def replay(path: Path, interpreter: Interpreter) -> str:
    """Run a transcript; the text that it should have."""
    result: list[str] = []
    commands: list[str] = []
    lines = iter(path.read_text(encoding="utf-8").splitlines())
    for text in lines:
        if text == "----":
            seen = [effect for command in commands for effect in interpreter.run(command)]
            result += ["----", *(seen or ["nothing"])]
            commands = []
            for expected in lines:
                if not expected:
                    break
            result.append("")
        else:
            if text and not text.startswith("#"):
                commands.append(text)
            result.append(text)
    assert not commands, f"{path.name}: the last commands have no ----"
    return "\n".join(result).rstrip("\n") + "\n"
