"""Checks the design's invariants on the machines, as far as they can be seen."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from groupio.errors import GroupIOError, Outcome
from groupio.format.records import parse_key, parse_segment_name
from groupio.model import DecisionKey, Level, Lineage, Manifest
from groupio.protocol import effects as fx
from groupio.protocol.ledger import Use
from groupio.testing import invariants as inv
from groupio.testing import node_invariants as nodes
from groupio.testing.sim.disk import TORN, File
from groupio.testing.sim.engine import Violated
from groupio.testing.sim.store import STORE_ID, Abort, Commit, Segment

if TYPE_CHECKING:
    from groupio.testing.sim.control import Control
    from groupio.testing.sim.node import Node
    from groupio.testing.sim.ranks import Rank, Save
    from groupio.testing.sim.world import Sim

AWAY = frozenset(("away",))

Seats = dict[int, tuple[str, int]]


class Oracle:
    """Watches one simulated world and raises :class:`Violated` at the first broken promise."""

    def __init__(self, sim: Sim) -> None:
        self.sim = sim
        self.acks: list[inv.Ack] = []
        self.rotted: set[tuple[str, bytes]] = set()
        """Damage that a fault did: segment and chunk."""
        self.detected = 0
        self.seats: dict[DecisionKey, Seats] = {}
        self.lives: dict[DecisionKey, dict[str, int]] = {}
        self.group_of: dict[DecisionKey, tuple[int, int]] = {}
        self.known: set[DecisionKey] = set()
        self.newest: dict[int, int] = {}
        self.refused: list[tuple[DecisionKey, str]] = []
        self.unwritten: set[DecisionKey] = set()
        """Attempts whose chunks could not be written at once, while their members copied."""
        self.stale = False
        """Someone was shown an old listing: order cannot be asked for any more."""
        self.levels = 0
        self.arenas: list[list[nodes.ArenaStep]] = []
        """What happened to the memory of each life of each agent."""
        sim.disk.on_name = self._named
        sim.disk.on_unlink = self._unlinked

    # -- the store -------------------------------------------------

    def published(self, key: DecisionKey) -> None:
        """An attempt became visible in the store."""
        self.known.add(key)
        for attempt in range(1, key.attempt):
            earlier = DecisionKey(key.lineage, key.epoch, attempt)
            file = self.sim.disk.get("epochs", str(earlier))
            if file is None:
                raise Violated(7, f"{key} begins before attempt {attempt} is decided")
            if isinstance(file.content, Commit):
                raise Violated(7, f"{key} begins after attempt {attempt} is committed")

    def taken(self, key: DecisionKey, group: int) -> None:
        """A group chose an attempt that is another's: a stale listing did not show it."""
        if self.group_of.get(key, (0, 0))[1] != group:
            return  # it is that of the other one: what was noted last is right
        self.seats.pop(key, None)
        self.lives.pop(key, None)
        self.group_of.pop(key, None)

    def dropping(self, key: DecisionKey) -> None:
        """The segments of an attempt are given up on a full disk."""
        file = self.sim.disk.get("epochs", str(key))
        if file is not None and isinstance(file.content, Commit):
            raise Violated(7, f"the segments of {key} are dropped, and it is committed")

    def _named(self, folder: str, name: str, file: File) -> None:
        if folder != "epochs":
            return
        key = parse_key(name)
        assert key is not None
        known = self._decided.get(name)
        if known is not None and known is not file:
            raise Violated(7, f"{key} was decided twice")
        self._decided[name] = file
        if isinstance(file.content, Commit):
            if key.epoch <= self.newest.get(key.lineage, -1) and not self.stale:
                detail = f"{key} came after epoch {self.newest[key.lineage]}"
                raise Violated(7, detail)
            self.newest[key.lineage] = max(key.epoch, self.newest.get(key.lineage, -1))

    def _unlinked(self, folder: str, name: str) -> None:
        """9: a segment goes away."""
        if folder != "segments":
            return
        needed: dict[DecisionKey, list[str]] = {}
        for kind in ("epochs", "prepared"):
            for record, file in self.sim.disk.folders[kind].items():
                key = parse_key(record)
                if key is not None and isinstance(file.content, Commit):
                    # An attempt that is not committed may give up its own segments.
                    refs = file.content.manifest.segments
                    both = kind == "epochs"
                    needed.setdefault(key, []).extend(r.name for r in refs if both or not r.own)
        refuse(nodes.check_gc_safe((name,), needed))

    _decided: dict[str, File]

    def after_cut(self) -> None:
        """Names may be gone that nobody was told of."""
        self._decided = dict(self.sim.disk.folders["epochs"])
        self.newest = {}
        for name, file in self._decided.items():
            key = parse_key(name)
            assert key is not None
            if isinstance(file.content, Commit):
                self.newest[key.lineage] = max(key.epoch, self.newest.get(key.lineage, -1))

    def begin(self) -> None:
        """The world begins."""
        self._decided = {}

    def begins(self, control: Control, line: Lineage) -> None:
        """8: a line that a save begins abandons nothing of its own launch, or of one that runs."""
        machine = control.machine
        group = machine.groups.get(machine._begins)
        if group is None:
            return  # its launch asked for it
        launch = self.sim.ranks[group.first.client].launch
        for name, known in machine._clients.items():
            other = self.sim.ranks[name]
            saved = known.has_saved or known.incarnation
            if saved and other.launch is not launch and other.process.alive:
                raise Violated(8, f"{line} begins, and {name} of launch {other.launch.number} runs")
        for rank in launch.ranks:
            for save in rank.saves.values():
                if Level.DURABLE in save.levels and save.epoch > line.after_epoch:
                    raise Violated(8, f"{line} abandons {save.key} of its own launch")

    # -- groups -------------------------------------------------

    def admits(self, control: Control, effect: fx.AdmitGroup) -> None:
        """A controller lets members into a group."""
        if not effect.store:
            # The epoch stands already, by other members: these only compare theirs with it.
            for seat in effect.seats:
                rank = self.sim.ranks.get(seat.client)
                if rank is not None and seat.save_id in rank.saves:
                    rank.saves[seat.save_id].key = effect.key
            return
        number = (control.term, effect.group)
        if self.group_of.get(effect.key) != number:
            # The number of an attempt that nobody saw is used again.
            self.group_of[effect.key] = number
            self.seats[effect.key], self.lives[effect.key] = {}, {}
            self.refused = [one for one in self.refused if one[0] != effect.key]
        seats, lives = self.seats[effect.key], self.lives[effect.key]
        seats.update({s.rank: (s.client, s.save_id) for s in effect.seats})
        lives[effect.node] = self.sim.nodes[effect.node].lives
        for seat in effect.seats:
            rank = self.sim.ranks.get(seat.client)
            if rank is not None and seat.save_id in rank.saves:
                rank.saves[seat.save_id].key = effect.key

    def saves_of(self, key: DecisionKey) -> dict[int, Save]:
        """The saves of an attempt by rank."""
        return {
            rank: self.sim.ranks[client].saves[save_id]
            for rank, (client, save_id) in self.seats.get(key, {}).items()
        }

    def preparing(self, effect: fx.PrepareEpoch, manifest: Manifest) -> None:
        """3, 5, 10: an epoch is made of all members of one launch, with the bytes they saved."""
        saves = self.saves_of(effect.key)
        found = sorted(member.rank for member in manifest.members)
        if not found == list(range(effect.world_size)) == sorted(saves):
            raise Violated(5, f"{effect.key} of {effect.world_size} has ranks {found}")
        if len({save.launch for save in saves.values()}) != 1:
            launches = {rank: save.launch for rank, save in saves.items()}
            raise Violated(3, f"{effect.key} mixes launches: {launches}")
        table = manifest.chunks.digests
        for member in manifest.members:
            save = saves[member.rank]
            if table[member.refs].tobytes() != b"".join(save.member.chunks):
                raise Violated(10, f"{effect.key} has other bytes of rank {member.rank}")
            if save.epoch != effect.key.epoch:
                raise Violated(3, f"{effect.key} has epoch {save.epoch} of rank {member.rank}")

    def tells(self, control: Control, effect: Any) -> None:
        """A controller tells a member something: it must be true now."""
        if not isinstance(effect, fx.TellReached):
            return
        seat = effect.seat
        rank = self.sim.ranks.get(seat.client)
        save = rank.saves.get(seat.save_id) if rank is not None else None
        if save is None or save.key is None:
            return
        self.levels += 1
        mine = self.seats.get(save.key, {}).get(save.member.rank)
        if mine != (seat.client, seat.save_id) and effect.level is not Level.DURABLE:
            return  # the epoch stands already: what these members have is only compared with it
        if effect.level is Level.STAGED:
            self._staged(save.key)
        elif effect.level is Level.REPLICATED:
            self._replicated(save.key)
        elif effect.level is Level.DURABLE:
            self._durable(save.key, effect)

    def _staged(self, key: DecisionKey) -> None:
        copied = {rank: save.copied for rank, save in self.saves_of(key).items()}
        refuse(nodes.check_staged(key, copied))

    def _replicated(self, key: DecisionKey) -> None:
        sim = self.sim
        lives = self.lives.get(key, {})
        if any(
            sim.nodes[name].lives != life or not sim.nodes[name].up for name, life in lives.items()
        ):
            return  # a loss that the controller cannot know yet
        domains: dict[bytes, set[str]] = {}
        for node in sim.nodes.values():
            if node.up:
                for chunks in node.memory.values():
                    for name in chunks:
                        domains.setdefault(name, set()).add(node.domain)
        wanted = {rank: save.member.chunks for rank, save in self.saves_of(key).items()}
        refuse(nodes.check_replicated(key, wanted, domains, sim.options.replicas))

    def planned(self, effect: fx.MakePlan, planned: Any) -> None:
        """4: a plan is made, or taken from the cache."""
        if planned.plan is not None:
            found = nodes.check_plan(
                effect.reports,
                planned.plan.orders,
                lost=effect.lost,
                done=effect.done,
                copies=effect.copies,
                earlier=[plan.orders for plan in effect.earlier],
            )
            refuse(found)

    def _durable(self, key: DecisionKey, effect: fx.TellReached) -> None:
        disk = self.sim.disk
        commits = [
            name
            for name in disk.folders["epochs"]
            if name.startswith(str(key)[:-7]) and self._is_commit(name)
        ]
        if not commits:
            raise Violated(2, f"{key} is told DURABLE and is not committed")
        name = commits[0]
        file = disk.durable("epochs", name)
        if file is None:
            raise Violated(2, f"{key} is told DURABLE, and a power cut may take its record")
        for ref in file.content.manifest.segments:
            if disk.durable("segments", ref.name) is None:
                raise Violated(2, f"{key} is told DURABLE, and a power cut may take {ref.name}")

    def _is_commit(self, name: str) -> bool:
        return isinstance(self.sim.disk.folders["epochs"][name].content, Commit)

    def unreachable(self, effect: Any) -> None:
        """A member was told that a level cannot be reached."""

    def agent_lost(self, node: Node) -> None:
        """An agent ended with all that it held."""

    # -- members -------------------------------------------------

    def saving(self, rank: Rank, save: Save) -> None:
        """A rank calls save."""

    def reached(self, rank: Rank, save: Save, level: Level) -> None:
        """A rank was told of a level."""
        if save.key is not None:
            self.acks.append(
                inv.Ack(save.key.lineage, save.epoch, save.member.rank, save.world, 0, level)
            )

    def failed(self, rank: Rank, save: Save, error: GroupIOError) -> None:
        """A rank was told that its save failed."""
        late = Level.STAGED in save.levels and save.key not in self.unwritten
        if self.sim.options.rows == AWAY and late:
            raise Violated(13, f"{rank.name}: time alone failed staged {save.key}: {error!r}")
        key = save.key
        if key is None or error.outcome is not Outcome.NOT_COMMITTED:
            return
        if self.seats.get(key, {}).get(rank.rank) != (rank.name, save.save_id):
            return  # nobody saw this attempt: its number belongs to another group now
        file = self.sim.disk.get("epochs", str(key))
        if file is not None and isinstance(file.content, Commit):
            raise Violated(2, f"{rank.name}: {key} is committed, and was told lost: {error!r}")
        self.refused.append((key, rank.name))

    def read(self, key: DecisionKey) -> None:
        """10: a member reads an epoch and verifies each chunk before it uses it."""
        file = self.sim.disk.get("epochs", str(key))
        if file is None or not isinstance(file.content, Commit):
            # It was seen before its directory was flushed, and a power cut took it: nobody may
            # have been told that it stands.
            at = (key.lineage, key.epoch)
            durable = [a for a in self.acks if a.level is Level.DURABLE]
            if any((ack.lineage, ack.epoch) == at for ack in durable):
                raise Violated(2, f"{key} was DURABLE, and its record is gone")
            return
        manifest = file.content.manifest
        chunks = manifest.chunks
        for row, number in enumerate(chunks.segments.tolist()):
            name = manifest.segments[number].name
            segment = self.sim.disk.get("segments", name)
            if segment is None or not isinstance(segment.content, Segment):
                raise Violated(1, f"{key} cannot be read: {name} is gone")
            digest = chunks.digests[row].tobytes()
            if digest not in segment.content.bad:
                continue
            if "digest check" in self.sim.guards:
                raise Violated(10, f"{key} was read with wrong bytes")
            self.detected += 1

    # -- at the end -------------------------------------------------

    def observe(self) -> inv.Observed:
        """The store as the pure invariants see it."""
        disk = self.sim.disk
        decisions, manifests, segments = [], {}, {}
        for name, file in disk.folders["epochs"].items():
            key = parse_key(name)
            assert key is not None
            if isinstance(file.content, Commit):
                header = file.content.manifest.header
                decisions.append(inv.Decision(key, True, header.incarnation, header.write_id))
                manifests[key] = file.content.manifest
            elif isinstance(file.content, Abort):
                content = file.content
                decisions.append(inv.Decision(key, False, content.incarnation, content.write_id))
        used = {ref.name for manifest in manifests.values() for ref in manifest.segments}
        for name in used:
            there = disk.folders["segments"].get(name)
            if there is not None and isinstance(there.content, Segment):
                segments[name] = _summary(name, there, self.rotted)
        lines = tuple(f.content for f in disk.folders["lineages"].values() if f.content is not TORN)
        return inv.Observed(tuple(decisions), manifests, segments, lines)

    def check_store(self) -> None:
        """All that the store and the acks can show; the damage that faults did is expected."""
        store = self.observe()
        refuse(inv.check_store(store, [a for a in self.acks if a.level is Level.DURABLE]))
        for key, name in self.refused:
            file = self.sim.disk.get("epochs", str(key))
            if file is not None and isinstance(file.content, Commit):
                raise Violated(2, f"{name}: {key} was told lost, and is committed")

    def check_rest(self) -> None:
        """13, 11: every member was told, every group is decided, no memory is held."""
        sim = self.sim
        fates = []
        for rank in sim.ranks.values():
            there = rank.process.alive and rank.connected
            for save in rank.saves.values():
                told = save.over or save.lost or not there
                fates.append(nodes.Fate(rank.name, save.epoch, told, sim.engine.now - save.at))
        refuse(nodes.check_live(fates, 0.0))
        for steps in self.arenas:
            refuse(nodes.check_arena_fence(steps))
        for control in sim.controls:
            if control.machine.groups:
                raise Violated(13, f"groups are left: {list(control.machine.groups.values())[:1]}")
        for node in sim.nodes.values():
            for group in node.machine.groups.values():
                raise Violated(13, f"{node.name} still holds {group.order.key}")
            if held := node.machine.ledger.total(Use.LEASED):
                raise Violated(11, f"{node.name} still has {held} bytes leased")
            for client, save_id in node.machine._held:
                rank = sim.ranks[client]
                if not rank.process.alive or (rank.connected and rank.name == client):
                    raise Violated(12, f"{node.name} keeps memory of {client}/{save_id}")
            if node.jobs:
                raise Violated(13, f"{node.name} still has jobs {sorted(node.jobs)}")


def refuse(found: Iterable[inv.Violation]) -> None:
    """Raise the first violation, if there is one."""
    for violation in found:
        where = f"{violation.key}: " if violation.key is not None else ""
        raise Violated(violation.invariant, f"{where}{violation.detail} {violation.path or ''}")


def _summary(name: str, file: File, rotted: set[tuple[str, bytes]]) -> inv.SegmentSummary:
    import numpy as np

    content: Segment = file.content
    owner = parse_segment_name(name)
    assert owner is not None
    bad = frozenset(d for d in content.bad if (name, d) not in rotted)
    return inv.SegmentSummary(
        name=name,
        store_id=STORE_ID,
        key=content.key,
        total_bytes=file.size,
        digests=np.frombuffer(b"".join(content.digests), np.uint8).reshape(-1, 32),
        offsets=np.array(content.offsets, np.int64),
        lengths=np.array(content.lengths, np.int64),
        bad=bad,
    )
