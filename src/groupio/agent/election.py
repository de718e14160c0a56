"""Asks the coordinator of a job for its controller, on behalf of one agent.

Blocking calls, for the job's own thread.
"""

from __future__ import annotations

import time

from msgspec.structs import replace

from groupio.controller.coordinator import Coordinator, Rule
from groupio.controller.discover import Kind, Where
from groupio.controller.probing import is_taken
from groupio.errors import ControllerLost, GroupIOError, InvalidInput

ASK_S = 10.0
"""How long the coordinator may take for one question."""

FIRST_S = 5.0
"""How long the node that a launcher named to have the controller may take to say so."""


def is_elsewhere(where: Where) -> bool:
    """Somebody starts the controller by hand, at an address that was given."""
    return where.kind is Kind.TCP and where.is_here is None


def other_token(path: str, node: str) -> InvalidInput:
    """The error of a node that does not have the token of its job's controller."""
    return InvalidInput(
        f"the controller of {path} has another token than node {node}; give all nodes of the job "
        "the same GROUPIO_TOKEN or GROUPIO_TOKEN_FILE"
    )


def is_of_tokens(error: GroupIOError) -> bool:
    """It is one of :func:`other_token`."""
    return isinstance(error, InvalidInput) and "GROUPIO_TOKEN" in error.message


class Election:
    """One agent's questions to the coordinator of the job in the store at ``path``.

    Errors as in :mod:`groupio.controller.coordinator`; ControllerLost also when nobody rules where
    the controller was said to be.
    """

    def __init__(
        self, coordinator: Coordinator, where: Where, *, path: str, node: str, life: str
    ) -> None:
        self._coordinator = coordinator
        self._where = where
        self._path = path
        self._node, self._life = node, life

    def current(self) -> Rule | None:
        """Who rules now; None when nobody does yet."""
        rule = self._coordinator.current(time.monotonic() + ASK_S)
        if rule is None and self._where.is_here is False:
            # The launcher named another node to have it, which may just be starting.
            rule = self._coordinator.watch(0, FIRST_S)
        if is_elsewhere(self._where):
            if rule is None:
                raise self._absent()
            return replace(rule, address=self._where.address)
        return rule

    def campaign(self, address: str, over: int, *, locked: str = "") -> Rule:
        """Rule from ``address`` with a term above ``over``, or learn who does.

        ``locked`` is the address of a controller to which this node may not connect without a
        token. InvalidInput as long as somebody is there: it is not replaced for that.
        """
        if locked and is_taken(locked):
            raise other_token(self._path, self._node)
        if is_elsewhere(self._where):
            rule = self.current()
            if rule is None or rule.term <= over:
                raise self._absent()
            return rule
        deadline = time.monotonic() + ASK_S
        return self._coordinator.campaign(self._node, self._life, address, deadline, over=over)

    def keep(self) -> bool:
        """Whether this agent's rule still holds."""
        return self._coordinator.keep()

    def leave(self) -> None:
        """Ask no more; a rule of this agent, also one just won, is free for another one."""
        try:
            self._coordinator.resign()
        finally:
            self._coordinator.close()

    def _absent(self) -> ControllerLost:
        return ControllerLost(
            f"no controller of {self._path} answers at {self._where.address}, where "
            f"{self._where.why} says it is; start one there: groupio controller run"
        )
