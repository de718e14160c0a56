"""Agents prove that they see the very store of their controller, whatever its id says.

An id is copied with the store. So the controller leaves a mark in its store for each agent that
joins, under a name that was never used: the agent has to read it, and to leave one of its own that
the controller has to read. Network file systems may show new names late, so each side looks for a
while. A store that cannot be reached proves nothing, and is tried again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from groupio.errors import GroupIOError
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol import reasons

PROOF_S = 10.0
"""The marks of one proof are looked for so long in all."""

LOOK_FIRST_S, LOOK_LAST_S = 0.05, 1.0
"""The first wait between two looks, and the longest."""

AWAY_S = 5.0
"""While the store of either side cannot be reached, the proof begins again so often."""

_TIMER = "proof-"


class Step(StrEnum):
    """How far a proof is."""

    LEAVING = "leaving"
    SHOWING = "showing"
    FINDING = "finding"
    AWAY = "away"


@dataclass(slots=True)
class Proof:
    """One agent's proof that is under way; ``mark`` is the controller's, ``shown`` the agent's."""

    node: str
    number: int
    step: Step = Step.LEAVING
    path: str = ""
    """The controller's path of the store."""
    mark: str = ""
    content: bytes = b""
    shown: str = ""
    shown_content: bytes = b""
    waited_s: float = 0.0
    wait_s: float = LOOK_FIRST_S

    @property
    def timer(self) -> str:
        """The name of its timer."""
        return f"{_TIMER}{self.number}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A proof ended; ``error`` is None when the agent sees the controller's store."""

    node: str
    error: GroupIOError | None = None
    other_store: bool = False


_Answer = tuple[list[fx.Effect], Verdict | None]
_NOTHING: _Answer = ([], None)


@dataclass(slots=True)
class Proofs:
    """The proofs of one controller's agents that are under way."""

    _by_node: dict[str, Proof] = field(default_factory=dict)
    _number: int = 0

    @property
    def busy(self) -> bool:
        """Some proof is under way."""
        return bool(self._by_node)

    def under_way(self, node: str) -> bool:
        """The node's proof has begun and not ended."""
        return node in self._by_node

    def begin(self, node: str) -> list[fx.Effect]:
        """Begin the node's proof; what was under way counts no more."""
        effects = self.end(node)
        self._number += 1
        self._by_node[node] = Proof(node, self._number)
        return [*effects, fx.LeaveMark(node, self._number)]

    def end(self, node: str) -> list[fx.Effect]:
        """Forget the node's proof, and remove its marks."""
        proof = self._by_node.pop(node, None)
        return [] if proof is None else [fx.StopTimer(proof.timer), *_remove(proof)]

    # -- answers ---------------------------------------------------------

    def on_left(self, event: ev.MarkLeft) -> _Answer:
        """The controller's mark is in its store."""
        proof = self._numbered(event.proof, Step.LEAVING)
        if proof is None:
            wanted = any(proof.mark == event.name for proof in self._by_node.values())
            late = event.name and not wanted
            return [fx.RemoveMarks((event.name,), ())] if late else [], None
        if event.error is not None:
            return self._failed(proof, event.error)
        proof.path, proof.mark, proof.content = event.path, event.name, event.content
        proof.step = Step.SHOWING
        return [fx.ShowStore(proof.node, proof.mark)], None

    def on_shown(self, event: ev.StoreShown, path: str) -> _Answer:
        """The agent says what it reads under the controller's mark; ``path`` is that of its store.

        Answers to other questions, such as those of an earlier controller, change nothing.
        """
        proof = self._by_node.get(event.node)
        if proof is None or proof.step is not Step.SHOWING or event.name != proof.mark:
            return _NOTHING
        if event.error is not None:
            return self._failed(proof, event.error)
        if not event.content:
            return self._look_again(proof, path)
        if event.content != proof.content:
            return self._refuted(proof, path)
        proof.shown, proof.shown_content = event.mark, event.mark_content
        proof.step, proof.wait_s = Step.FINDING, LOOK_FIRST_S
        return [fx.FindMark(proof.node, proof.number, proof.shown)], None

    def on_found(self, event: ev.MarkFound, paths: dict[str, str]) -> _Answer:
        """What the controller reads under the agent's mark; b"" when nothing is there."""
        proof = self._numbered(event.proof, Step.FINDING)
        if proof is None:
            return _NOTHING
        if event.error is not None:
            return self._failed(proof, event.error)
        path = paths.get(proof.node, "")
        if not event.content:
            return self._look_again(proof, path)
        if event.content != proof.shown_content:
            return self._refuted(proof, path)
        return self.end(proof.node), Verdict(proof.node)

    def on_timer(self, name: str) -> list[fx.Effect] | None:
        """Look again; None when the timer is none of a proof."""
        if not name.startswith(_TIMER):
            return None
        for proof in self._by_node.values():
            if proof.timer != name:
                continue
            if proof.step is Step.AWAY:
                return self.begin(proof.node)
            if proof.step is Step.SHOWING:
                return [fx.ShowStore(proof.node, proof.mark)]
            return [fx.FindMark(proof.node, proof.number, proof.shown)]
        return []

    def _numbered(self, number: int, step: Step) -> Proof | None:
        of_number = (proof for proof in self._by_node.values() if proof.number == number)
        return next((proof for proof in of_number if proof.step is step), None)

    def _look_again(self, proof: Proof, path: str) -> _Answer:
        if proof.waited_s >= PROOF_S:
            return self._refuted(proof, path)
        wait_s = proof.wait_s
        proof.waited_s += wait_s
        proof.wait_s = min(2 * wait_s, LOOK_LAST_S)
        return [fx.StartTimer(proof.timer, wait_s)], None

    def _failed(self, proof: Proof, error: GroupIOError) -> _Answer:
        """The store of either side answered with an error, which says nothing of which it is."""
        if not reasons.is_away(error):
            return self.end(proof.node), Verdict(proof.node, error)
        proof.step = Step.AWAY
        return [*_remove(proof), fx.StartTimer(proof.timer, AWAY_S)], None

    def _refuted(self, proof: Proof, path: str) -> _Answer:
        error = reasons.other_view(proof.node, path, proof.path)
        return self.end(proof.node), Verdict(proof.node, error, other_store=True)


def _remove(proof: Proof) -> list[fx.Effect]:
    marks = [(name,) if name else () for name in (proof.mark, proof.shown)]
    proof.mark = proof.shown = ""
    return [fx.RemoveMarks(*marks)] if any(marks) else []
