"""The flush of a group that writes at once, which can be done anew after the store was away.

What a segment has of a failed write, or of one that was not flushed, is not trusted: all chunks are
hashed and written anew from the members' memory, into other segments of the same attempt.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from groupio.agent.pipeline import FlushCounts, FlushJob, drop_frames
from groupio.errors import GroupIOError

log = logging.getLogger(__name__)


class EagerFlush:
    """One group's :class:`FlushJob`, and after each :meth:`repeat` another one in its place.

    The members' memory must stay as it is until the job is idle after ``cancel``, or its group is
    closed.
    """

    def __init__(
        self,
        make: Callable[[int], FlushJob],
        *,
        look: Callable[[], object],
        run: Callable[[Callable[[], None]], None],
        failed: Callable[[GroupIOError], None],
    ) -> None:
        """``make`` makes a job whose segments are numbered from the given number on.

        ``look`` raises GroupIOError while the store cannot be used; ``run`` runs a step in the
        store's thread; ``failed`` is told of an error that comes before there is another job.
        """
        self._make = make
        self._look = look
        self._run = run
        self._failed = failed
        self._lock = threading.Lock()
        self._job = make(0)
        self._spent: list[FlushJob] = []
        """Jobs that failed, whose segments are still in the store."""
        self._waves: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._repeating = False
        self._on_idle: list[Callable[[], None]] = []
        """Not empty once it was cancelled while nothing but a repetition was under way."""

    @property
    def framed(self) -> bool:
        """Its segments have frames for torch."""
        return self._job.framed

    def add_wave(self, *args: Any, **named: Any) -> None:
        """:meth:`FlushJob.add_wave`; the wave is kept for a repetition."""
        self._waves.append((args, named))
        self._job.add_wave(*args, **named)

    def finish(self) -> None:
        """All waves of all members were added."""
        self._job.finish()

    def repeat(self) -> None:
        """Do all of it anew; does not wait, and ends as the first time did: by a callback.

        Only after an error, when all is added, and every member came in one wave.
        """
        with self._lock:
            self._repeating = True
        self._job.cancel(lambda: self._run(self._begin_anew))

    def _begin_anew(self) -> None:
        error: GroupIOError | None = None
        try:
            # Hashing everything would be in vain while the store is away.
            self._look()
        except GroupIOError as raised:
            error = raised
        except Exception as raised:
            log.exception("looking at a store that was away")
            error = GroupIOError(
                f"looking at the store met an internal error ({type(raised).__name__}: {raised}); "
                "the agent's log has the details"
            )
        else:
            self._spent.append(self._job)
            self.sweep()
        if error is not None:
            drop_frames(error)  # this one is among them, with views of the members' memory
        with self._lock:
            self._repeating = False
            idle = self._on_idle
            if error is None and not idle:
                self._job = self._make(self._job.next_seq)
                for args, named in self._waves:
                    self._job.add_wave(*args, **named)
                self._job.finish()
        for on_idle in idle:
            on_idle()
        if error is not None and not idle:
            self._failed(error)

    def cancel(self, on_idle: Callable[[], None]) -> None:
        """:meth:`FlushJob.cancel`."""
        with self._lock:
            if self._repeating:
                self._on_idle.append(on_idle)
                return
        self._job.cancel(on_idle)

    def delete_segments(self) -> None:
        """Remove all segments made so far; only when the job is idle or done. Blocks."""
        self.sweep()
        self._job.delete_segments()

    @property
    def swept(self) -> bool:
        """Nothing of a job that failed is left in the store, as far as is known."""
        return not self._spent

    def forget_waves(self) -> None:
        """The group is closed: nothing is repeated, and the members' memory can go at once."""
        with self._lock:
            self._waves.clear()

    def sweep(self) -> None:
        """Remove the segments of jobs that failed; in the store's thread. Blocks."""
        self._spent = [job for job in self._spent if not _deleted(job)]

    def counts(self) -> FlushCounts:
        """What was done, of the newest job."""
        return self._job.counts()


def _deleted(job: FlushJob) -> bool:
    """Whether the segments of a job that failed are gone; they are of no use to anybody."""
    try:
        job.delete_segments()
    except GroupIOError as error:
        log.warning("a segment of no use stays in the store for now: %s", error.message)
        return False
    return True
