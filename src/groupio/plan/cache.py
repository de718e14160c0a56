"""Plans of earlier epochs, reused only where they fit.

Most epochs of a job look like the one before: the same shapes, the same duplicates. The plan then
is the same too, but only then. A plan is handed out when the fingerprint of the group *and* the
duplicate structure of this very epoch equal those it was made for; a rank that lost a replica or
gained a private value gets a new plan, never an old one with wrong owners.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

from groupio.errors import InvalidInput

Plan = TypeVar("Plan")


class PlanCache(Generic[Plan]):
    """At most ``limit`` plans, the least recently used leaves first.

    ``hits``, ``misses`` (no plan of this fingerprint) and ``refused`` (there is one, but this
    epoch's duplicates are others) count the calls of :meth:`get`.
    """

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise InvalidInput(f"a plan cache of {limit} plans cannot hold any; use 1 or more")
        self.limit = limit
        self.hits = 0
        self.misses = 0
        self.refused = 0
        self._plans: OrderedDict[bytes, tuple[bytes, Plan]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._plans)

    def get(self, fingerprint: bytes, structure: bytes) -> Plan | None:
        """The plan for this group and these duplicates, or None.

        ``fingerprint`` is :func:`groupio.plan.dedup.fingerprint` of the group with its links,
        ``structure`` is :func:`groupio.plan.grouped.structure` of this epoch's classes.
        """
        found = self._plans.get(fingerprint)
        if found is None:
            self.misses += 1
            return None
        made_for, plan = found
        if made_for != structure:
            self.refused += 1
            return None
        self.hits += 1
        self._plans.move_to_end(fingerprint)
        return plan

    def put(self, fingerprint: bytes, structure: bytes, plan: Plan) -> None:
        """Keep ``plan`` in place of an earlier one of this fingerprint."""
        self._plans[fingerprint] = (structure, plan)
        self._plans.move_to_end(fingerprint)
        if len(self._plans) > self.limit:
            self._plans.popitem(last=False)
