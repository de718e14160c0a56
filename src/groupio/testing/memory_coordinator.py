"""A coordinator in memory: the smallest thing that passes the suite, for tests of controllers."""

from __future__ import annotations

import threading
import time

from groupio.controller.coordinator import Coordinator, OnLost, Rule, candidate
from groupio.errors import ControllerLost


class MemoryRules:
    """The agreement that the coordinators of one job share."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.ruler: MemoryCoordinator | None = None
        self.rule: Rule | None = None
        self.term = 0
        self.is_reachable = True


class MemoryCoordinator(Coordinator):
    """One process's view of ``rules``. It has no leases: a rule up to ``over`` ends at once."""

    def __init__(self, rules: MemoryRules, *, on_lost: OnLost | None = None) -> None:
        super().__init__(on_lost)
        self._rules = rules
        self._closed = False

    def current(self, deadline: float) -> Rule | None:
        """Who rules now."""
        with self._rules.changed:
            self._check()
            return self._rules.rule

    def campaign(self, node: str, life: str, address: str, deadline: float, *, over: int) -> Rule:
        """Rule in the next term, unless somebody rules above ``over``."""
        candidate(node, life, address, over)
        with self._rules.changed:
            self._check()
            there = self._rules.rule
            if there is not None and there.term > over:
                return there
            before, ended = self._rules.ruler, there
            mine = Rule(max(self._rules.term, over) + 1, address, node, life)
            self._rules.rule, self._rules.term, self._rules.ruler = mine, mine.term, self
            self._take(mine)
            self._rules.changed.notify_all()
        if before is not None and before is not self and ended is not None:
            before._lose(ended, f"the rule of term {ended.term} is over: term {mine.term} began")
        return mine

    def keep(self) -> bool:
        """Whether the own rule is still the newest."""
        return self.held is not None

    def resign(self) -> None:
        """Leave the place empty."""
        held = self._drop()
        with self._rules.changed:
            if held is not None and self._rules.rule == held:
                self._rules.rule = self._rules.ruler = None
                self._rules.changed.notify_all()

    def watch(self, term: int, timeout_s: float) -> Rule | None:
        """Wait for a rule of another term."""
        deadline = time.monotonic() + timeout_s
        with self._rules.changed:
            while True:
                self._check()
                rule = self._rules.rule
                if rule is not None and rule.term != term:
                    return rule
                rest = deadline - time.monotonic()
                if self._closed or rest <= 0 or (rule is None and term > 0):
                    return None
                self._rules.changed.wait(rest)

    def close(self) -> None:
        """Forget the own rule, which stays where it is, as after a crash."""
        self._drop()
        with self._rules.changed:
            self._closed = True
            self._rules.changed.notify_all()

    def _check(self) -> None:
        if not self._rules.is_reachable:
            raise ControllerLost("the coordinator in memory was made unreachable by its test")
