"""Since when a job's store cannot be reached, as far as its controller can tell."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from groupio.errors import GroupIOError
from groupio.protocol import events as ev
from groupio.protocol.controller import Controller
from groupio.protocol.reasons import is_away


@dataclass(slots=True)
class Away:
    """The store is away from the first failure that says so until something succeeds again."""

    since: float | None = None
    """Reading of ``time.monotonic``; None while nothing says that the store is away."""
    error: str = ""
    _unopened: GroupIOError | None = None

    def note(self, event: Any, controller: Controller) -> None:
        """Learn from an event that ``controller`` has just handled."""
        match event:
            case ev.StoreUnavailable(error=error):
                self._unopened = error if is_away(error) else None
            case ev.StoreOpened():
                self._unopened = None
        errors = [self._unopened, *(group.away for group in controller.groups.values())]
        found = next((error for error in errors if error is not None), None)
        if found is None:
            self.since, self.error = None, ""
        else:
            self.since = time.monotonic() if self.since is None else self.since
            self.error = found.message

    def describe(self, now: float) -> dict[str, Any] | None:
        """For how many seconds, and why; None when it is not away."""
        if self.since is None:
            return None
        return {"for_s": round(now - self.since, 3), "error": self.error}
