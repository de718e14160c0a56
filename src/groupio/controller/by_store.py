"""The controller of a job by fenced records in its store: no service besides the store is needed.

Each term has one record, created if absent, and the record of the highest term says who rules.
There is no lease: whoever has lost the ruler takes the next term, and the one before learns it
when it looks (:meth:`StoreCoordinator.keep`). Records of old terms are removed by later rulers.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from groupio.backend.base import CONTROLLERS, Backend
from groupio.controller.coordinator import (
    Coordinator,
    OnLost,
    Rule,
    candidate,
    decode_rule,
    encode_rule,
)
from groupio.errors import GroupIOError, IntegrityError, NotFound, Outcome, StorageError
from groupio.format.records import controller_name, parse_controller_name

_LOG = logging.getLogger(__name__)

_KEPT = 16
"""So many newest terms keep their records, for people who ask what happened."""

_RETRY_S = 0.05
"""How long to wait before a name that another node made is looked for again."""


class _Newest(NamedTuple):
    term: int
    """The highest term that has a record; 0 when there is none."""
    rule: Rule | None
    """Who rules by that record; None when nobody does or when it is damaged."""


class StoreCoordinator(Coordinator):
    """Coordination through ``backend``, which stays the caller's to close.

    The store must have been opened with ``create=True`` by a ruler. ``poll_s``: how often
    ``watch`` looks. A store that does not answer blocks the call as long as its system calls do.
    ``after`` gives the backend to go on with when a call failed with an error.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        poll_s: float = 1.0,
        on_lost: OnLost | None = None,
        after: Callable[[GroupIOError], Backend] | None = None,
        by_token: bool = True,
    ) -> None:
        super().__init__(on_lost, by_token=by_token)
        self._backend = backend
        self._after = after
        self._poll_s = poll_s
        self._closed = threading.Event()

    def current(self, deadline: float) -> Rule | None:
        """Who rules by the record of the highest term; None when nobody does."""
        return self._newest(deadline).rule

    def campaign(self, node: str, life: str, address: str, deadline: float, *, over: int) -> Rule:
        """Take the next term, or learn who took one above ``over``; durable on return."""
        candidate(node, life, address, over)
        known = 0
        while True:
            newest = self._newest(deadline, known)
            if newest.rule is not None and newest.term > over:
                if newest.rule.life == life:
                    # Also when the answer to the creation was lost on the way.
                    self._take(newest.rule)
                return newest.rule
            mine = Rule(max(newest.term, over) + 1, address, node, life, self._by_token)
            if not self._create(mine):
                known = mine.term
                continue
            # A caller that was paused before the creation may have made an old term anew.
            newest = self._newest(deadline, mine.term)
            if newest.term == mine.term:
                self._take(mine)
                self._tidy(mine.term)
                return mine
            known = newest.term
            self._remove(mine.term)

    def keep(self) -> bool:
        """Whether the own record is the one of the highest term.

        StorageError when the store does not say: then nothing is known and nothing has changed.
        """
        held = self.held
        if held is None:
            return False
        term = max(self._terms(), default=0)
        if term == held.term:
            return True
        why = f"term {term} is in the store" if term > held.term else "its record was removed"
        self._lose(held, f"the rule of term {held.term} is over: {why}")
        return False

    def resign(self) -> None:
        """Record that nobody rules in the next term; durable on return.

        After a StorageError the rule is given up too, but others only notice by the silence.
        """
        held = self._drop()
        if held is not None and max(self._terms(), default=0) <= held.term:
            # False: another has taken over already, and that is as good.
            self._create(Rule(held.term + 1, "", held.node, held.life))

    def watch(self, term: int, timeout_s: float) -> Rule | None:
        """Wait for a rule of another term, looking every ``poll_s`` seconds."""
        deadline = time.monotonic() + timeout_s
        while True:
            newest = self._newest(max(deadline, time.monotonic() + _RETRY_S))
            if newest.rule is not None and newest.rule.term != term:
                return newest.rule
            over = newest.rule is None and term > 0
            rest = deadline - time.monotonic()
            if over or rest <= 0 or self._closed.wait(min(rest, self._poll_s)):
                return None

    def close(self) -> None:
        """End waiting calls. The records stay as they are."""
        self._drop()
        self._closed.set()

    # The records ----------------------------------------------------------------------------

    def _terms(self) -> list[int]:
        # Every question begins here: a store that was away may need new descriptors.
        try:
            names = self._backend.list(CONTROLLERS)
        except StorageError as error:
            if self._after is None:
                raise
            self._backend = self._after(error)
            names = self._backend.list(CONTROLLERS)
        terms = map(parse_controller_name, names)
        return [term for term in terms if term is not None]

    def _newest(self, deadline: float, known: int = 0) -> _Newest:
        """The record of the highest term; ``known`` is a term whose record is known to exist.

        On network file systems another node's new record may be listed late, or be listed and
        not be found for seconds: the answer waits for it, up to the deadline (StorageError).
        """
        while True:
            term = max([known, *self._terms()])
            if term == 0:
                return _Newest(0, None)
            name = controller_name(term)
            path = f"{self._backend.path}/{CONTROLLERS}/{name}"
            try:
                return _Newest(term, decode_rule(self._backend.read(CONTROLLERS, name), path))
            except IntegrityError as error:
                # Records are created whole, so this is rot. The next term makes up for it.
                _LOG.warning("the record of a controller counts as none: %s", error.message)
                return _Newest(term, None)
            except NotFound:
                if time.monotonic() >= deadline or self._closed.wait(_RETRY_S):
                    raise StorageError(
                        f"{path} exists and cannot be found from this node: its directory is "
                        "seen in an old state; check the mount's caching, or use etcd",
                        path=path,
                        errno=errno.ESTALE,
                    ) from None

    def _create(self, rule: Rule) -> bool:
        name = controller_name(rule.term)
        try:
            return self._backend.put_if_absent(CONTROLLERS, name, encode_rule(rule))
        except GroupIOError as error:
            if error.outcome is Outcome.UNKNOWN and self._backend.exists(CONTROLLERS, name):
                # Whose it is stands in it; a second call makes it durable.
                self._backend.put_if_absent(CONTROLLERS, name, encode_rule(rule))
                return False
            raise

    def _tidy(self, term: int) -> None:
        try:
            old = [other for other in self._terms() if other <= term - _KEPT]
        except GroupIOError as error:
            _LOG.debug("old records of controllers stay: %s", error.message)
            return
        for other in old:
            self._remove(other)

    def _remove(self, term: int) -> None:
        try:
            self._backend.delete(CONTROLLERS, controller_name(term))
        except GroupIOError as error:
            # It does no harm there: a higher term has a record.
            _LOG.debug("the record of term %d stays: %s", term, error.message)
