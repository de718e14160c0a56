"""The answer to ``groupio status``, with what controllers of other nodes say of their jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from groupio.agent.status import status

if TYPE_CHECKING:
    from groupio.agent.driver import Driver

ANSWER_S = 2.0
"""A controller that does not answer in this time is left out."""

_numbers = count(1)


class Survey:
    """One look at all jobs of an agent; ``done`` gets it once, in the event loop."""

    def __init__(self, driver: Driver, done: Callable[[dict[str, Any]], None]) -> None:
        self._body = status(driver)
        self._done = done
        self._open: set[int] = set()
        for place, job in enumerate(driver.jobs.values()):
            if job.host is None and job.joining is not None:
                number = next(_numbers)
                self._open.add(number)
                if not job.joining.describe(number, partial(self._take, number, place)):
                    self._open.discard(number)
        if self._open:
            asyncio.get_running_loop().call_later(ANSWER_S, self._finish)
        else:
            self._finish()

    def _take(self, number: int, place: int, body: dict[str, Any]) -> None:
        if number not in self._open:
            return
        self._open.discard(number)
        own = self._body["jobs"][place]
        self._body["jobs"][place] = {**body, **own, "groups": body["groups"]}
        if not self._open:
            self._finish()

    def _finish(self) -> None:
        self._open.clear()
        done, self._done = self._done, lambda body: None
        done(self._body)
