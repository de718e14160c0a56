"""The blocking calls of one job on its way to the controller, in a thread of their own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from groupio.errors import GroupIOError
from groupio.exhaustion import ThreadPool

if TYPE_CHECKING:
    from groupio.agent.driver import Driver

log = logging.getLogger(__name__)


class Errands:
    """One after the other, in the order in which they were given."""

    def __init__(self, driver: Driver, path: str) -> None:
        """``path`` is the store's, for messages."""
        self._driver = driver
        self._path = path
        self._thread = ThreadPool(1, "join")
        self._left = False

    def ask(
        self, question: Callable[[], Any], answer: Callable[[Any, GroupIOError | None], None]
    ) -> None:
        """Give ``answer`` the result or the error of ``question``, as a step of the event loop.

        Nobody is answered after :meth:`leave`, and nothing is asked.
        """

        def reply(result: Any, failed: GroupIOError | None) -> None:
            if not self._left:
                answer(result, failed)

        def run() -> None:
            result, failed = None, None
            try:
                result = question()
            except GroupIOError as error:
                failed = error
            except Exception as error:
                log.exception("asking for the controller of %s failed", self._path)
                failed = GroupIOError(f"looking for the controller failed: {error!r}")
            self._driver.post(lambda: reply(result, failed))

        if not self._left:
            self._thread.submit(run)

    def run(self, task: Callable[[], Any]) -> None:
        """Run ``task``; its errors are logged. From any thread, before :meth:`end`."""

        def guarded() -> None:
            try:
                task()
            except Exception:
                log.exception("a task of %s failed", self._path)

        self._thread.submit(guarded)

    def leave(self) -> None:
        """What is still under way is for nobody. In the event loop."""
        self._left = True

    def end(self) -> None:
        """Wait until all is done, and end the thread. From any thread but this one."""
        self._thread.shutdown(wait=True)
