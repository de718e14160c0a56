"""Switches that take one guard away, to see that the simulator notices ("teeth").

Some guards stand in the simulated drivers, which look them up in ``Sim.guards``; others in the
machines, where they are taken out for the time of a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from groupio.model import DecisionKey
from groupio.plan.cache import PlanCache
from groupio.protocol.controller import Controller
from groupio.protocol.ledger import Ledger

GUARDS = (
    "fsync",
    "directory fsync",
    "digest check",
    "decision key",
    "attempt fence",
    "incarnation fence",
    "others ended",
    "arena fence",
    "fingerprint check",
    "deadline",
    "store proof",
)
"""The guards that can be removed."""


@contextmanager
def removed(guards: frozenset[str]) -> Iterator[None]:
    """Take these guards out of the machines for a while."""
    with ExitStack() as stack:
        if "attempt fence" in guards:
            stack.enter_context(patch.object(Controller, "_note_attempt", _forget_attempt))
        if "incarnation fence" in guards:
            settle = Controller._settle_incarnation
            stack.enter_context(
                patch.object(Controller, "_settle_incarnation", _welcome_all(settle))
            )
        if "others ended" in guards:
            stack.enter_context(patch.object(Controller, "_not_ended", _all_ended))
        if "arena fence" in guards:
            stack.enter_context(patch.object(Ledger, "quarantine", Ledger.free))
        if "fingerprint check" in guards:
            stack.enter_context(patch.object(PlanCache, "get", _any_plan))
        yield


def _any_plan(self: PlanCache[Any], fingerprint: bytes, structure: bytes) -> Any:
    """The plan that was used last, whatever it was made for."""
    plans = list(self._plans.values())
    return plans[-1][1] if plans else None


def _forget_attempt(self: Controller, key: DecisionKey) -> None:
    """Every attempt of an epoch is the first."""


def _all_ended(self: Controller, event: Any) -> None:
    """No other incarnation runs, whatever is known of it."""


def _welcome_all(settle: Any) -> Any:
    """Members of an earlier life of the job are let in like the others."""

    def settled(self: Controller, event: Any, known: Any) -> Any:
        if self.incarnation is not None and self.incarnation.world_size == event.world_size:
            known.incarnation = self.incarnation.number
            return [], None
        return settle(self, event, known)

    return settled
