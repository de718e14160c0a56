"""The agents of a job come, go and come back; and what an earlier controller left with them.

An agent that was cut off for a while joins again with all that it holds. Its reports count, what
it may have missed is said again. A new controller takes undecided attempts over whose bytes are all
on living nodes, and aborts the others before anything else of their epochs begins.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import msgspec

from groupio.errors import GroupIOError, Outcome
from groupio.model import Level
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol import reasons
from groupio.protocol.group import HOLDS_MEMORY, Group, Phase
from groupio.protocol.lives import Lives
from groupio.protocol.resume import RESUME_S, RESUME_TIMER, Rest


@dataclass(slots=True)
class AgentsOfJob(Lives):
    """The agents that take part in a job."""

    # -- joining ---------------------------------------------------------

    def _on_joined(self, event: ev.NodeJoined) -> list[fx.Effect]:
        error = self.nodes.refuse(event, self.store_id)
        if error is not None:
            return [fx.RefuseNode(event.node, event.life, error)]
        self.nodes.join(event)
        effects = self._unprove(event.node) + self._compare(event)
        effects += self._greet(event)
        for opened in event.opens:
            effects += self._reopen(opened)
        if self.resume.held and not self.store_open:
            effects += self.open_store(create=True)
        return effects + self._judge()

    def _compare(self, event: ev.NodeJoined) -> list[fx.Effect]:
        """What the node holds, against the groups that are in flight here."""
        effects: list[fx.Effect] = []
        left = {held.key: held for held in event.held}
        touched = []
        for group in list(self.groups.values()):
            held = left.get(group.key) if group.key is not None else None
            if held is not None and not _is_of(held, group):
                held = None
            if group.phase in HOLDS_MEMORY:
                effects += group.rejoin(event.node, held)
                touched.append(group)
            if held is not None:
                del left[held.key]
        for held in left.values():
            self.resume.add(event.node, held)
        return effects + self._advance(*touched)

    def _greet(self, event: ev.NodeJoined) -> list[fx.Effect]:
        """The node's clients, as they are now."""
        effects: list[fx.Effect] = []
        here = {arrived.client for arrived in event.clients}
        before = {arrived.client for arrived in self.presence.on_node(event.node)}
        before |= {n for n, c in self._clients.items() if c.node == event.node and c.alive}
        for client in sorted(before - here):
            effects += self._on_gone(ev.MemberGone(client, process_gone=False))
        for arrived in event.clients:
            self.presence.revive(arrived.client)
            known = self._clients.get(arrived.client)
            if known is not None and known.node_lost:
                known.alive, known.node_lost = True, False
                known.gone_at = 0
            effects += self._on_arrived(msgspec.structs.replace(arrived, node=event.node))
        return effects

    def _reopen(self, opened: ev.MemberOpened) -> list[fx.Effect]:
        """A save that the node knows no group of: it may be new here, or over already."""
        known = self._clients.get(opened.client)
        if known is None or opened.save_id not in known.opened:
            return self._on_opened(opened)
        if self.find(opened.client, opened.save_id) is not None or self.waiting.has(opened):
            return []
        error = self.refusals.of(opened.client, opened.save_id) or reasons.unheard(opened.epoch)
        return [fx.TellFailed(fx.MemberSeat(opened.rank, opened.client, opened.save_id), error)]

    # -- proving ---------------------------------------------------------

    def _unprove(self, node: str) -> list[fx.Effect]:
        """Which store the node sees has to be proved, also if it was before."""
        if not self.proves or node not in self.nodes:
            return []
        self.nodes.unproved.add(node)
        return self.proofs.end(node) + self._prove(node)

    def _prove(self, node: str) -> list[fx.Effect]:
        """Begin the node's proof if the store is open, and it is not under way."""
        if not self.store_open or self.proofs.under_way(node):
            return []
        return self.proofs.begin(node)

    def _on_proof(self, event: ev.MarkLeft | ev.StoreShown | ev.MarkFound) -> list[fx.Effect]:
        match event:
            case ev.MarkLeft():
                effects, verdict = self.proofs.on_left(event)
            case ev.StoreShown(node=node):
                effects, verdict = self.proofs.on_shown(event, self.nodes.paths.get(node, ""))
            case _:
                effects, verdict = self.proofs.on_found(event, self.nodes.paths)
        if verdict is None:
            return effects
        if verdict.error is not None:
            return effects + self._disprove(verdict.node, verdict.error, verdict.other_store)
        self.nodes.unproved.discard(verdict.node)
        effects += self._judge()
        return effects + self._retry_waiting() + self._advance()

    def _disprove(self, node: str, error: GroupIOError, other_store: bool) -> list[fx.Effect]:
        """The node does not see this store, or cannot say: its members cannot save now.

        One with another store is not kept. The agent with the controller is: it would not hear.
        """
        opens = [opened for opened in self.waiting.opens if opened.node == node]
        epochs = {opened.epoch for opened in opens}
        gathering = [
            g for g in self.groups.values() if g.phase is Phase.GATHERING and g.epoch in epochs
        ]
        seated = {g.epoch: set(g.seats) for g in gathering}
        effects = self.waiting.refuse(lambda _: error, node)
        effects += self._give_up(gathering, lambda _: error)
        going = [g for g in self.groups.values() if node in g.admission.orders]
        if other_store and node != self.node:
            life = self.nodes.life(node)
            for group in going:
                effects += group.doubt(error)
            effects += self._advance(*going)
            # Members that it holds of groups that are over would never hear it otherwise.
            for key, held in sorted(self.resume.held.get(node, {}).items()):
                effects += [] if key in self.resume.attempts else self._drop(node, held)
            effects.append(fx.RefuseNode(node, life, error))
            effects += self._on_node_lost(ev.NodeLost(node, life, error.message))
        else:
            effects += self._give_up(going, lambda _: error) + self._judge()
        self.missed.refused(opens, error, seated)
        return effects

    # -- losing ---------------------------------------------------------

    def _on_node_lost(self, event: ev.NodeLost) -> list[fx.Effect]:
        """An agent is gone, and all of its clients with it.

        Of a life that never joined here nobody waits for what an earlier controller left with it.
        """
        if not self.nodes.lose(event.node, event.life):
            self.resume.gone.add(event.node)
            return self._judge()
        effects: list[fx.Effect] = self.proofs.end(event.node)
        touched = []
        self.resume.held.pop(event.node, None)
        ranks = {arrived.rank for arrived in self._members_on(event.node)}
        for group in self.groups.values():
            effects += group.lose_node(event.node, event.why)
            awaited = tuple(sorted(ranks.intersection(group.missing)))
            if group.phase is Phase.GATHERING and awaited:
                effects += group.fail(
                    reasons.node_lost(group.epoch, event.node, awaited, event.why)
                )
            touched.append(group)
        names = {arrived.client for arrived in self.presence.on_node(event.node)}
        names |= {n for n, c in self._clients.items() if c.node == event.node and c.alive}
        for client in sorted(names):
            effects += self._lose_client(client)
        return effects + self._advance(*touched) + self._judge()

    def _members_on(self, node: str) -> list[ev.ClientArrived]:
        """The members of the present life of the job that are connected there."""
        if self.incarnation is None:
            return []
        life = self._life()
        return [a for a in self.presence.on_node(node) if life.includes(a)]

    def _lose_client(self, client: str) -> list[fx.Effect]:
        """Its agent is lost: it is not waited for, but it may come back through another one."""
        self.presence.lose(client, process_gone=True)
        self.missed.lose(client)
        known = self._clients.get(client)
        if known is not None:
            known.alive, known.node_lost = False, True
            known.gone_at = known.gone_at or self.presence.moment
        return self.waiting.lose(client)

    # -- resuming ---------------------------------------------------------

    def _begin_resume(self, state: ev.StoreState) -> list[fx.Effect]:
        """The store is open: look at what it left undecided, and at who came with another one."""
        effects: list[fx.Effect] = []
        for node, life, error in self.nodes.strangers(state.store_id):
            effects.append(fx.RefuseNode(node, life, error))
            effects += self._on_node_lost(ev.NodeLost(node, life, error.message))
        for node in sorted(self.nodes.unproved):
            effects += self._prove(node)
        going = {group.key for group in self.groups.values()}
        self.resume.attempts = {a.key: a for a in state.undecided if a.key not in going}
        if self.resume.attempts:
            effects.append(fx.StartTimer(RESUME_TIMER, RESUME_S))
        return effects + self._judge()

    def _judge(self, *, over: bool = False) -> list[fx.Effect]:
        """Take over or abort the attempts of which enough is known; ``over``: all of them."""
        if not self.store_open or (self.proofs.busy and not over):
            return []
        effects: list[fx.Effect] = []
        judged = []
        for key in sorted(self.resume.attempts):
            attempt = self.resume.attempts[key]
            rest = self.resume.rest(attempt)
            sure = over or self.resume.is_all(attempt)
            if rest.complete and (sure or rest.record is None):
                judged.append(self._restore(attempt, rest))
                effects += judged[-1].take_over()
            elif sure:
                judged.append(self._restore(attempt, rest))
                effects += judged[-1].give_up_earlier(rest.why)
        if self.resume.attempts:
            return effects + self._advance(*judged)
        if judged:
            effects.append(fx.StopTimer(RESUME_TIMER))
        for node, held in self.resume.leftovers():
            effects += self._drop(node, held)
        effects += self._advance(*judged)
        return effects + (self._retry_waiting() if judged else [])

    def _restore(self, attempt: ev.UndecidedAttempt, rest: Rest) -> Group:
        """The group of an attempt that an earlier controller began."""
        self.resume.take(attempt.key, rest)
        group = Group(
            number=next(self.numbers),
            epoch=attempt.key.epoch,
            incarnation=attempt.incarnation,
            lineage=attempt.key.lineage,
            world_size=attempt.world_size,
            node_local=self.node_local,
            table=self.nodes,
        )
        self.groups[group.number] = group
        group.restore(attempt.key, rest)
        return group

    def _drop(self, node: str, held: ev.HeldGroup) -> list[fx.Effect]:
        """A node holds a group that is decided, or that nobody else knows of."""
        key = held.key
        committed = held.store and key in self.committed
        decided = key.attempt <= self._attempts.get((key.lineage, key.epoch), 0)
        effects: list[fx.Effect] = []
        for opened in held.opened:
            seat = fx.MemberSeat(opened.rank, opened.client, opened.save_id)
            if committed:
                effects += [
                    fx.TellReached(seat, Level.STAGED),
                    fx.TellReached(seat, Level.REMOTE),
                    fx.TellReached(seat, Level.DURABLE),
                ]
            else:
                effects.append(fx.TellFailed(seat, self._why_dropped(opened, held)))
        keep = committed or not decided or not held.store
        return [*effects, fx.DropHeld(node, key, committed, keep, held.group)]

    def _why_dropped(self, opened: ev.MemberOpened, held: ev.HeldGroup) -> GroupIOError:
        told = self.refusals.of(opened.client, opened.save_id)
        error = told or reasons.not_resumed(held.key.epoch, "it was given up")
        # What was only compared stands, whatever became of the comparison.
        return error if held.store else copy.copy(error).with_outcome(Outcome.COMMITTED)


def _is_of(held: ev.HeldGroup, group: Group) -> bool:
    """The node holds a part of this very group: parts of two lives are never one group."""
    same = (held.incarnation, held.world_size) == (group.incarnation, group.world_size)
    return held.group == group.number or (group.resumed and same)
