"""The controller of a job by a lease in etcd: a standby takes over when the ruler is silent.

Two keys per job: ``/groupio/<scope>/controller`` has the record of the ruler and lives as long
as its lease; ``/groupio/<scope>/term`` has the highest term so far and stays. A new rule puts
both in one transaction, if there is no ruler and nobody else has counted the term up. Terms
therefore grow also when rulers come and go, and when etcd is restarted.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from groupio.controller.coordinator import (
    Coordinator,
    OnLost,
    Rule,
    candidate,
    decode_rule,
    encode_rule,
)
from groupio.controller.etcd_http import Etcd, KeyValue, NoSuchLeaseError
from groupio.controller.etcd_lease import Lease
from groupio.errors import ControllerLost, GroupAborted, IntegrityError, InvalidInput
from groupio.format.limits import TERM_MAX

TTL_S = 5
"""A ruler that is silent for so long is over, in seconds; etcd may grant more, never less."""

_SCOPE = re.compile(r"[A-Za-z0-9_.\-]{1,128}")

_CHECK_S = 2.0
"""How long the ruler's look at its own key may take, in seconds."""

_LOOK_S = 1.0
"""How much longer than asked a watch may take for its last look, in seconds."""

_WATCH_S = 5.0
"""A watch is renewed so often: on a dead connection it would wait for ever."""


class _State(NamedTuple):
    rule: Rule | None
    lease: int
    """The lease of the ruler's key; 0 when there is none."""
    present: bool
    """Whether the ruler's key is there, readable or not."""
    term: int
    """The highest term so far."""
    term_revision: int
    read_at: int
    """The revision of etcd at which all this was read."""


class EtcdCoordinator(Coordinator):
    """Coordination of the job named ``scope`` (its store's id) through ``endpoints``.

    ``endpoints`` are ``host:port``; ``ttl_s`` whole seconds. InvalidInput for a scope that makes
    no key. Nothing is asked before the first call.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        scope: str,
        *,
        ttl_s: int = TTL_S,
        on_lost: OnLost | None = None,
        by_token: bool = True,
    ) -> None:
        super().__init__(on_lost, by_token=by_token)
        if not endpoints or ttl_s < 1 or not _SCOPE.fullmatch(scope):
            raise InvalidInput(
                f"scope {scope!r}, {len(endpoints)} endpoints and a lease of {ttl_s} s do not make "
                "a place in etcd: use a name of letters, digits and '_.-', one endpoint or more, "
                "and at least 1 s"
            )
        self._etcd = Etcd(endpoints)
        self._ttl_s = ttl_s
        self._rule_key = f"/groupio/{scope}/controller".encode()
        self._term_key = f"/groupio/{scope}/term".encode()
        self._closed = threading.Event()
        self._lease: Lease | None = None

    def current(self, deadline: float) -> Rule | None:
        """Who rules now, by a read that a majority of etcd answers for."""
        return self._state(deadline).rule

    def campaign(self, node: str, life: str, address: str, deadline: float, *, over: int) -> Rule:
        """Become the controller once there is none, or learn who rules above ``over``.

        While a rule up to ``over`` still has its lease this waits; ControllerLost at the deadline.
        """
        candidate(node, life, address, over)
        while True:
            state = self._state(deadline)
            if state.rule is not None and state.rule.term > over and self._is_real(state, life):
                return state.rule
            if state.present:
                self._await_end(state, deadline)
                continue
            mine = Rule(max(state.term, over) + 1, address, node, life, self._by_token)
            if self._try(mine, state, deadline):
                return mine

    def keep(self) -> bool:
        """Whether the lease is not over by the own clock; asks nobody."""
        held, lease = self.held, self._lease
        if held is None:
            return False
        if lease is not None and lease.is_held:
            return True
        if lease is not None:
            # An answer under way must not prolong what was given up.
            lease.end(revoke=False)
        self._lose(held, f"the rule of term {held.term} is over: its lease in etcd ran out")
        return False

    def resign(self) -> None:
        """Give the lease back; when etcd does not answer it runs out by itself."""
        if self._drop() is not None:
            self._end_lease(revoke=True)

    def watch(self, term: int, timeout_s: float) -> Rule | None:
        """Wait for a rule of another term; told by etcd, not by looking again and again."""
        try:
            return self._watch(term, time.monotonic() + timeout_s)
        except ControllerLost:
            if self._closed.is_set():
                return None
            raise

    def _watch(self, term: int, deadline: float) -> Rule | None:
        # A look that finds no time to be done in would say that etcd is lost.
        limit = deadline + _LOOK_S
        while True:
            state = self._state(limit)
            if state.rule is not None and state.rule.term != term:
                return state.rule
            if not state.present and term > 0:
                return None
            if time.monotonic() >= deadline:
                return None
            self._await(state, deadline)

    def close(self) -> None:
        """Stop the thread and the connections. A held lease runs out by itself."""
        self._drop()
        self._closed.set()
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.end(revoke=False)
        self._etcd.close()
        if lease is not None:
            lease.join()

    # The keys -------------------------------------------------------------------------------

    def _state(self, deadline: float) -> _State:
        found = self._etcd.read((self._rule_key, self._term_key), deadline)
        ruler, counter = found.keys
        rule = None
        if ruler is not None:
            try:
                rule = decode_rule(ruler.value, self._rule_key.decode())
            except IntegrityError as error:
                raise ControllerLost(
                    f"the key {self._rule_key.decode()} in etcd is no record of a controller: "
                    "something else than groupio wrote it, delete it"
                ) from error
        term = rule.term if rule is not None else 0
        if counter is not None:
            term = max(term, self._counted(counter))
        return _State(
            rule,
            ruler.lease if ruler is not None else 0,
            ruler is not None,
            term,
            counter.mod_revision if counter is not None else 0,
            found.revision,
        )

    def _counted(self, counter: KeyValue) -> int:
        try:
            term = msgspec.json.decode(counter.value, type=int)
        except msgspec.DecodeError:
            term = -1
        if not 0 <= term < TERM_MAX:
            raise ControllerLost(
                f"the key {self._term_key.decode()} in etcd has no term: something else than "
                "groupio wrote it, put the highest term that was there, or a higher one"
            )
        return term

    def _is_real(self, state: _State, life: str) -> bool:
        """False for an own rule that this object has lost, and whose key has not ended yet."""
        assert state.rule is not None
        if state.rule.life != life:
            return True
        lease = self._lease
        return lease is not None and lease.id == state.lease and self.keep()

    def _try(self, mine: Rule, state: _State, deadline: float) -> bool:
        """Put ``mine`` if nothing has changed since ``state``; whether it rules now."""
        lease = Lease(self._etcd, self._ttl_s, deadline)
        puts = (
            (self._rule_key, encode_rule(mine), lease.id),
            (self._term_key, msgspec.json.encode(mine.term), 0),
        )
        unchanged = ((self._rule_key, 0), (self._term_key, state.term_revision))
        try:
            done = self._etcd.swap(unchanged, puts, deadline)
            if not done:
                # The answer to a first try may have been lost on the way.
                done = self._state(deadline).lease == lease.id
        except NoSuchLeaseError:
            return False
        except ControllerLost:
            lease.end(revoke=True)
            raise
        if not done:
            lease.end(revoke=True)
            return False
        self._end_lease(revoke=False)
        self._lease = lease
        self._take(mine)
        try:
            self._guard(mine, lease)
        except GroupAborted:
            self.resign()
            raise
        return True

    def _guard(self, mine: Rule, lease: Lease) -> None:
        """Keep the lease alive, and notice at once when it or the key is gone."""

        def check(deadline: float) -> str | None:
            limit = min(deadline, time.monotonic() + _CHECK_S)
            mine_still = self._state(limit).lease == lease.id
            return None if mine_still else "its key in etcd was deleted or replaced"

        def lost(why: str) -> None:
            self._lose(mine, f"the rule of term {mine.term} is over: {why}")

        lease.start(check, lost)

    def _await_end(self, state: _State, deadline: float) -> None:
        """Wait for the ruler's key to change; ControllerLost at the deadline."""
        if not self._await(state, deadline) and time.monotonic() >= deadline:
            who = "somebody" if state.rule is None else f"{state.rule.node} ({state.rule.address})"
            raise ControllerLost(
                f"the controller {who} of term {state.term} still has its lease in etcd although "
                "it was given up here: it cannot be reached from this node and is alive, check "
                "the network between them"
            )

    def _await(self, state: _State, deadline: float) -> bool:
        """Wait a while for the ruler's key to change; False when it has not."""
        limit = min(deadline, time.monotonic() + _WATCH_S)
        return self._etcd.await_change(self._rule_key, state.read_at + 1, limit)

    def _end_lease(self, *, revoke: bool) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.end(revoke=revoke)
