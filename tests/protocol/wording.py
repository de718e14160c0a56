"""How transcripts write effects, keys and sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from groupio.errors import GroupIOError
from groupio.model import DecisionKey
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol.agent import AgentMachine
from groupio.protocol.controller import Controller
from groupio.protocol.ledger import Use

MIB = 1 << 20


def size_of(text: str) -> int:
    """``3M`` or ``4096`` in bytes."""
    return int(text[:-1]) * MIB if text.endswith("M") else int(text)


def in_mib(nbytes: int) -> str:
    """Bytes as written in transcripts."""
    return f"{nbytes // MIB}M" if nbytes % MIB == 0 else str(nbytes)


def key_of(text: str) -> DecisionKey:
    """``L1-E5-A1`` as a key."""
    lineage, epoch, attempt = (int(part[1:]) for part in text.split("-"))
    return DecisionKey(lineage, epoch, attempt)


def short(key: DecisionKey) -> str:
    """A key without leading zeros."""
    return f"L{key.lineage}-E{key.epoch}-A{key.attempt}"


def ranks_of(seats: Sequence[fx.MemberSeat]) -> str:
    """Ranks of seats, separated by commas."""
    return ",".join(str(seat.rank) for seat in seats)


def told(error: GroupIOError) -> str:
    """An error as a member sees it."""
    fields = {k: v for k, v in error.fields().items() if v not in (None, ()) and k != "epoch"}
    shown = "".join(f" {k}={v}" for k, v in fields.items())
    return f"{type(error).__name__} {error.outcome} retry={error.retry}{shown}: {error.message}"


def spoken(effect: fx.Effect) -> str:
    """An effect in one line."""
    for speak in (_to_store, _to_node, _of_nodes, _to_member, _on_node):
        text = speak(effect)
        if text is not None:
            return text
    raise AssertionError(f"no words for {effect!r}")


def _to_store(effect: fx.Effect) -> str | None:
    match effect:
        case fx.StartTimer(name=name, delay_s=delay):
            return f"start timer {name} {delay:g}s"
        case fx.StopTimer(name=name):
            return f"stop timer {name}"
        case fx.OpenStore(held=held, create=create):
            kept = f", leaving {' '.join(map(short, held))} alone" if held else ""
            kept += ", and what other nodes may hold" if effect.resume else ""
            return f"store: {'open or create' if create else 'open if there'}{kept}"
        case fx.CreateLineage(lineage=line):
            return f"store: lineage {line.number} after epoch {line.after_epoch} of {line.parent}"
        case fx.PublishInflight(group=g, key=key):
            return f"store: publish g{g} {short(key)} incarnation={effect.incarnation}"
        case fx.PrepareEpoch(group=g, key=key):
            ranks = sorted(m.rank for r in effect.reports for m in r.members)
            text = f"store: prepare g{g} {short(key)} ranks={','.join(map(str, ranks))}"
            text += f" replicated={','.join(effect.replicated)}" if effect.replicated else ""
            text += f" metadata={effect.metadata}" if effect.metadata else ""
            return text + (f" door={effect.door}" if effect.door else "")
        case fx.CompareEpoch(group=g, key=key):
            return f"store: compare g{g} with {short(key)}"
        case fx.Decide(group=g, key=key, commit=True):
            return f"store: commit g{g} {short(key)}"
        case fx.Decide(group=g, key=key, members=members):
            text = f"store: abort g{g} {short(key)}"
            text += f" because of ranks {','.join(map(str, members))}" if members else ""
            return text + (", may drop its segments" if effect.drop_segments_if_full else "")
        case fx.ForgetInflight(group=g, key=key):
            return f"store: forget g{g} {short(key)}"
        case fx.LeaveMark(node=node, proof=number):
            return f"store: leave a mark for {node}, proof {number}"
        case fx.FindMark(node=node, proof=number, name=name):
            return f"store: find the mark {name} of {node}, proof {number}"
        case fx.RemoveMarks(own=own, shown=shown):
            return f"store: remove marks {' '.join((*own, *shown))}"
    return None


def _to_node(effect: fx.Effect) -> str | None:
    match effect:
        case fx.AdmitGroup(node=node, group=g, key=key, seats=seats):
            how = "" if effect.store else ", only to compare"
            full = "" if effect.when_full == "wait" else f", {effect.when_full} when full"
            door = f", door={effect.door}" if effect.door else ""
            door += ", planned" if effect.planned else ""
            door += f", {in_mib(effect.replica_bytes)} for copies" if effect.replica_bytes else ""
            door += "" if effect.wait else ", without waiting"
            door += ", again" if effect.again else ""
            return f"{node} <- admit g{g} {short(key)} ranks={ranks_of(seats)}{how}{full}{door}"
        case fx.StartCopy(node=node, group=g):
            return f"{node} <- start g{g}"
        case fx.AbortGroup(node=node, group=g):
            return f"{node} <- abort g{g}"
        case fx.CloseGroup(node=node, group=g):
            keep = "keep" if effect.keep_segments else "delete"
            return f"{node} <- close g{g}, {keep} its segments"
        case fx.Report(event=event):
            return _reported(event)
    return None


def _of_nodes(effect: fx.Effect) -> str | None:
    match effect:
        case fx.RetractGroup(node=node, group=g):
            return f"{node} <- retract g{g}"
        case fx.MakePlan(group=g):
            lost = f", without {' '.join(effect.lost)}" if effect.lost else ""
            done = f", done by {' '.join(r.node for r in effect.done)}" if effect.done else ""
            links = " ".join(n.node + ("" if n.fabric_ok else "!") for n in effect.nodes)
            return f"plan g{g} round {effect.round} for {links} x{effect.replicas}{lost}{done}"
        case fx.StoreChunks(node=node, group=g):
            return f"{node} <- store g{g} round {effect.round}: {_ordered(effect.order)}"
        case fx.StoreAgain(node=node, group=g):
            return f"{node} <- store g{g} again"
        case fx.ShowStore(node=node, name=name):
            return f"{node} <- show the store, mark {name}"
        case fx.TakeRoom(node=node, group=g):
            return f"{node} <- room for {in_mib(effect.replica_bytes)} of g{g}"
        case fx.AdoptGroup(node=node, key=key, group=g):
            return f"{node} <- adopt {short(key)} as g{g}"
        case fx.DropHeld(node=node, key=key):
            what = "committed" if effect.committed else "not committed"
            keep = "keep" if effect.keep_segments else "delete"
            return f"{node} <- drop {short(key)}, {what}, {keep} its segments"
        case fx.RefuseNode(node=node, life=life, error=error):
            return f"{node} of life {life} is refused: {told(error)}"
        case fx.TellUnreachable(seat=seat, level=level, error=error):
            return f"{seat.client}/{seat.save_id}: not {level}: {error.message}"
        case fx.RunOrder(group=g):
            ranges = [f"{in_mib(offset)}+{in_mib(length)}" for offset, length in effect.room]
            room = f", room at {' '.join(ranges)}" if ranges else ""
            return f"job g{g} round {effect.round}: {_ordered(effect.order)}{room}"
        case fx.KeepContent(group=g, key=key):
            return f"chunks of g{g} stay for readers of {short(key)}"
        case fx.DropContent(arena=arena):
            where = f"{in_mib(effect.offset)}+{in_mib(effect.length)}"
            return f"serve nothing from arena {arena} {where}"
    return None


def _ordered(order: Any) -> str:
    """What a node is to do in a round, by numbers of chunks."""
    parts = [f"write {len(order.write)}"] if len(order.write) else []
    for fetch in order.fetch:
        kept, moved = int(fetch.keep.sum()), int(fetch.write.sum())
        what = [f"keep {kept}"] * bool(kept) + [f"write {moved}"] * bool(moved)
        others = f" or {' '.join(fetch.others)}" if fetch.others else ""
        parts.append(f"from {fetch.source}{others} {' '.join(what)}")
    parts += ["record"] * order.record
    return ", ".join(parts) or "nothing"


def _reported(event: Any) -> str:
    match event:
        case ev.NodeBusy(group=g, node=node):
            return f"{node} -> busy g{g}"
        case ev.NodeRoom(group=g, node=node):
            return f"{node} -> room for {in_mib(event.replica_bytes)} of g{g}"
        case ev.NodeHashed(group=g, node=node):
            return f"{node} -> hashed g{g}"
        case ev.NodeReplicated(group=g, node=node):
            return f"{node} -> keeps {len(event.copies)} copies of g{g}, round {event.round}"
        case ev.NodeShort(group=g, node=node):
            lied = f", {' '.join(event.liars)} lied" if event.liars else ""
            asked = " ".join(event.asked)
            return f"{node} -> lacks {len(event.digests)} of g{g}, asked {asked}{lied}"
        case ev.NodeStored(group=g, node=node, round=n) if n:
            return f"{node} -> stored g{g} round {n}"
        case ev.NodeAdmitted(group=g, node=node):
            return f"{node} -> admitted g{g}"
        case ev.NodeRefused(group=g, node=node, error=error):
            return f"{node} -> refused g{g}: {type(error).__name__}"
        case ev.MemberCopied(group=g, rank=rank):
            return f"-> copied g{g} rank {rank}"
        case ev.NodeStored(group=g, node=node):
            return f"{node} -> stored g{g}"
        case ev.NodeFailed(group=g, node=node, error=error):
            return f"{node} -> failed g{g}: {type(error).__name__}"
        case ev.NodeIdle(group=g, node=node):
            return f"{node} -> idle g{g}"
    raise AssertionError(f"no words for {event!r}")


def _to_member(effect: fx.Effect) -> str | None:
    match effect:
        case fx.TellReached(seat=seat, level=level):
            arrivals = ""
            if effect.first_arrival is not None:
                arrivals = f" arrivals {effect.first_arrival:g}..{effect.last_arrival:g}"
            notes = f" ({'; '.join(effect.notes)})" if effect.notes else ""
            return f"{seat.client}/{seat.save_id}: {level.upper()}{arrivals}{notes}"
        case fx.TellFailed(seat=seat, error=error):
            return f"{seat.client}/{seat.save_id}: {told(error)}"
        case fx.GrantLease(client=client, save_id=save_id, wave=wave):
            return (
                f"{client}/{save_id}: grant wave {effect.number + 1} of {effect.waves} of "
                f"g{effect.group}, bytes {in_mib(wave.virt_lo)}..{in_mib(wave.virt_hi)} to arena "
                f"{effect.arena} at {in_mib(effect.offset)}"
            )
    return None


def _on_node(effect: fx.Effect) -> str | None:
    match effect:
        case fx.OpenArena(arena=arena, client=client):
            return f"open arena {arena} for {client}"
        case fx.CloseArena(arena=arena):
            return f"close arena {arena}"
        case fx.Populate(arena=arena, offset=offset, length=length):
            return f"populate arena {arena} {in_mib(offset)}+{in_mib(length)}"
        case fx.Punch(arena=arena, offset=offset, length=length):
            return f"punch arena {arena} {in_mib(offset)}+{in_mib(length)}"
        case fx.StartJob(group=g, store=store, door=door):
            how = "" if store else ", only to compare"
            how += ", planned" if effect.planned else ""
            return f"job g{g} starts{how}" + (f", with frames for {door}" if door else "")
        case fx.AddWave(group=g, rank=rank, number=number):
            how = "" if effect.eager else ", to hash"
            return f"job g{g} gets wave {number + 1} of rank {rank}{how}"
        case fx.FinishJob(group=g):
            return f"job g{g} has all"
        case fx.RepeatJob(group=g):
            return f"job g{g} begins anew"
        case fx.CancelJob(group=g):
            return f"job g{g} is cancelled"
        case fx.EndJob(group=g):
            return f"job g{g} ends" + (", its segments are deleted" * effect.delete_segments)
    return None


def status_lines(
    controller: Controller, machines: Sequence[AgentMachine], reader: str
) -> list[str]:
    """The state of the machines, as far as a reader of a transcript may ask for it."""
    now = controller.incarnation
    life = "no incarnation" if now is None else f"incarnation {now.number} of {now.world_size}"
    line = controller.lineage if controller.lineages else "-"
    store = "opening" if controller.opening else "open" if controller.store_open else "closed"
    lines = [
        f"store {store}, lineage {line}, latest {controller.latest}, {life}, "
        f"{len(controller.waiting.waiters)} waiting"
    ]
    for group in controller.groups.values():
        key = "" if group.key is None else f" {short(group.key)}"
        missing = "".join(f" {rank}" for rank in group.missing)
        wanted = f", missing{missing}" if missing else ""
        lines.append(f"g{group.number} epoch {group.epoch}{key} {group.phase}{wanted}")
    for machine in machines:
        uses = ", ".join(f"{use} {in_mib(machine.ledger.total(use))}" for use in Use)
        lines.append(f"{machine.node}: {uses}, {machine.copies_active} copying")
    if reader:
        lines.append(f"{reader} waits for {controller.undecided_for(reader)}")
    return lines
