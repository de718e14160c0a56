"""The machine by which an agent finds, follows and replaces the controller of a job.

A controller rules under a *term*; terms only grow, and the coordinator says who rules. A broken
connection is made anew for a while: a blip loses nothing. Then the agent campaigns, and whoever
wins hosts the next controller; where the controller said that it ends, at once. Only orders of the
present term are carried out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

from groupio.errors import GroupIOError
from groupio.protocol import effects as fx
from groupio.protocol import events as ev

RECONNECT_S = 5.0
"""So long the controller of the present term is tried before somebody replaces it."""

VANISHED_S = 1.0
"""So long where its process seems to have ended: its end of the connection was closed."""

RETRY_S = 0.25
"""Between two tries to connect."""

REFUSED_RETRY_S = 2.0
"""A refused agent tries again: the one that had its name may just be ending."""

BACKOFF_S = 1.0
BACKOFF_MAX_S = 30.0
"""Between two questions to a coordinator that does not answer."""

_GIVE_UP, _RETRY, _AGAIN = "follow-give-up", "follow-retry", "follow-again"


class _Step(msgspec.Struct, frozen=True, tag=True):
    """Base of the events and effects here; they stay within one agent."""


# -- events ---------------------------------------------------------


class RuleFound(_Step, frozen=True):
    """The coordinator says who rules, or who won the campaign."""

    term: int
    address: str
    node: str
    life: str


class NoRule(_Step, frozen=True):
    """Nobody rules the job yet."""


class CoordinatorFailed(_Step, frozen=True):
    """FindController or Campaign ended with an error."""

    error: GroupIOError


class LinkUp(_Step, frozen=True):
    """There is a connection to the controller of this term."""

    term: int


class LinkDown(_Step, frozen=True):
    """The connection ended, or could not be made.

    ``vanished``: the controller's end of it was closed without a word.
    """

    term: int
    why: str
    vanished: bool = False


class RulerLeft(_Step, frozen=True):
    """The controller of this term said that it rules no more."""

    term: int


class JoinRefused(_Step, frozen=True):
    """The controller does not take this agent."""

    term: int
    error: GroupIOError


class OrderCame(_Step, frozen=True):
    """The controller of ``term`` gave this order."""

    term: int
    order: Any


# -- effects ---------------------------------------------------------


class FindController(_Step, frozen=True):
    """Ask the coordinator who rules; answer RuleFound, NoRule or CoordinatorFailed."""


class Campaign(_Step, frozen=True):
    """Try to rule with a term above ``over``; answer RuleFound or CoordinatorFailed."""

    over: int


class ConnectTo(_Step, frozen=True):
    """Connect to this controller; answer LinkUp or LinkDown, and LinkDown when it ends."""

    term: int
    address: str


class SendJoin(_Step, frozen=True):
    """Send NodeJoined, with all that the node holds of this job, to the controller."""

    term: int


class Host(_Step, frozen=True):
    """Start the controller of this term here; answer LinkUp.

    ``vanished``: node and life of the controller before, when its process seems to have ended.
    """

    term: int
    vanished: tuple[str, str] | None = None


class StopHosting(_Step, frozen=True):
    """Another one rules: drop the controller of this term that runs here."""

    term: int


class Execute(_Step, frozen=True):
    """Give the order to the agent machine, or the news to its member."""

    order: Any


class LeaveTerm(_Step, frozen=True):
    """The controller of this term is replaced: tell the agent machine (ControllerLeft)."""

    term: int


class Where(StrEnum):
    """Where the agent stands."""

    IDLE = "idle"
    ASKING = "asking"
    CONNECTING = "connecting"
    JOINED = "joined"
    CAMPAIGNING = "campaigning"


@dataclass(slots=True)
class Following:
    """The machine of one agent for one job; ``node`` and ``life`` are its own."""

    node: str
    life: str
    term: int = 0
    """The newest term that is known; 0: none yet."""
    where: Where = Where.IDLE
    hosting: bool = False
    """The controller of the present term runs here."""
    error: GroupIOError | None = None
    """Why nothing goes on at the moment, for status."""
    _address: str = ""
    _ruler: tuple[str, str] = ("", "")
    """Node and life of the controller of the present term."""
    _vanished: bool = False
    """Its end of the connection was closed, and it was not reached since."""
    _failures: int = 0
    _timers: set[str] = field(default_factory=set)

    @property
    def joined(self) -> bool:
        """Reports reach the controller now."""
        return self.where is Where.JOINED

    def start(self) -> list[Any]:
        """Look for the controller."""
        if self.where is not Where.IDLE:
            return []
        self.where = Where.ASKING
        return [FindController()]

    def handle(self, event: Any) -> list[Any]:
        """Take one event; effects are to be executed in order."""
        match event:
            case RuleFound():
                return self._on_rule(event)
            case NoRule():
                return self._campaign() if self.where is Where.ASKING else []
            case CoordinatorFailed(error=error):
                return self._on_failed(error)
            case LinkUp(term=term):
                return self._on_up(term)
            case LinkDown(term=term, vanished=vanished):
                return self._on_down(term, vanished)
            case RulerLeft(term=term):
                return self._on_left(term)
            case JoinRefused(term=term, error=error):
                return self._on_refused(term, error)
            case OrderCame():
                return self._on_order(event)
            case ev.TimerFired(name=name):
                return self._on_timer(name)
        raise AssertionError(f"following got {event!r}")

    # -- rules ---------------------------------------------------------

    def _on_rule(self, rule: RuleFound) -> list[Any]:
        self._failures, self.error = 0, None
        if rule.term < self.term or (rule.term == self.term and self._engaged):
            return []
        if rule.term == self.term:
            return self._connect()
        effects: list[Any] = []
        if self.hosting:
            effects.append(StopHosting(self.term))
        if self.term:
            effects.append(LeaveTerm(self.term))
        effects += self._stop(_GIVE_UP, _RETRY, _AGAIN)
        before = self._ruler if self._vanished else None
        self.term, self._address = rule.term, rule.address
        self._ruler, self._vanished = (rule.node, rule.life), False
        self.hosting = self._ruler == (self.node, self.life)
        if self.hosting:
            self.where = Where.CONNECTING
            return [*effects, Host(self.term, before)]
        return effects + self._connect()

    @property
    def _engaged(self) -> bool:
        return self.where in (Where.CONNECTING, Where.JOINED)

    def _connect(self) -> list[Any]:
        self.where = Where.CONNECTING
        return [*self._start(_GIVE_UP, RECONNECT_S), ConnectTo(self.term, self._address)]

    def _campaign(self) -> list[Any]:
        self.where = Where.CAMPAIGNING
        return [Campaign(self.term)]

    def _on_failed(self, error: GroupIOError) -> list[Any]:
        """The coordinator does not answer: members are told nothing until their deadlines."""
        if self._engaged:
            return []
        self.error = error
        delay_s = min(BACKOFF_S * 2**self._failures, BACKOFF_MAX_S)
        self._failures += 1
        return self._start(_AGAIN, delay_s)

    # -- the connection ---------------------------------------------------------

    def _on_up(self, term: int) -> list[Any]:
        if term != self.term or self.where is Where.JOINED:
            return []
        self.where, self.error, self._failures = Where.JOINED, None, 0
        self._vanished = False
        return [*self._stop(_GIVE_UP, _RETRY, _AGAIN), SendJoin(term)]

    def _on_down(self, term: int, vanished: bool) -> list[Any]:
        if term != self.term or not self._engaged:
            return []
        self.where = Where.CONNECTING
        effects: list[Any] = []
        if vanished and not self._vanished:
            self._vanished = True
            effects = [*self._stop(_GIVE_UP), *self._start(_GIVE_UP, VANISHED_S)]
        return [*effects, *self._start(_GIVE_UP, RECONNECT_S), *self._start(_RETRY, RETRY_S)]

    def _on_left(self, term: int) -> list[Any]:
        if term != self.term or not self._engaged or self.hosting:
            return []
        return [*self._stop(_GIVE_UP, _RETRY, _AGAIN), *self._campaign()]

    def _on_refused(self, term: int, error: GroupIOError) -> list[Any]:
        if term != self.term or not self._engaged:
            return []
        self.where, self.error = Where.CONNECTING, error
        # The controller lives: nobody has to replace it.
        return [*self._stop(_GIVE_UP, _RETRY), *self._start(_RETRY, REFUSED_RETRY_S)]

    def _on_order(self, event: OrderCame) -> list[Any]:
        if event.term == self.term and self.where is Where.JOINED:
            return [Execute(event.order)]
        if event.term > self.term and self.where is not Where.ASKING:
            # Somebody rules of whom this agent has not heard.
            self.where = Where.ASKING
            return [*self._stop(_GIVE_UP, _RETRY, _AGAIN), FindController()]
        return []

    # -- time ---------------------------------------------------------

    def _on_timer(self, name: str) -> list[Any]:
        if name not in self._timers:
            return []
        self._timers.discard(name)
        if name == _RETRY:
            return [ConnectTo(self.term, self._address)]
        if name == _GIVE_UP:
            return [*self._stop(_RETRY), *self._campaign()]
        if self.where is Where.ASKING:
            return [FindController()]
        # The old controller may be back before the coordinator is.
        back = [ConnectTo(self.term, self._address)] if self._address else []
        return [*self._campaign(), *back]

    def _start(self, name: str, delay_s: float) -> list[Any]:
        """Start a timer, unless it runs already."""
        if name in self._timers:
            return []
        self._timers.add(name)
        return [fx.StartTimer(name, delay_s)]

    def _stop(self, *names: str) -> list[Any]:
        running = [name for name in names if name in self._timers]
        self._timers.difference_update(running)
        return [fx.StopTimer(name) for name in running]
