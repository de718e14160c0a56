"""The asking side of the TCP fabric: a pull is cut into batches, which its streams take in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import inf

from groupio.fabric import frames
from groupio.fabric.base import LOST, Outcome, Want, failed
from groupio.fabric.stream import Stream

BATCH_BYTES_MIN = 4 << 20
"""A batch has at least so many bytes, unless there are no more or its wants are too many."""

BATCH_BYTES_MAX = 64 << 20
"""A batch has at most so many bytes."""

BATCHES_PER_STREAM = 4
"""Large pulls are cut so that each stream takes about this many batches."""

SLOWEST_BYTES_PER_S = 100_000.0
"""A peer that sends less than this in the mean of a patient pull is given up: whoever waits for the
bytes has others to ask. The own pace does not count."""


class Pull:
    """What is left of one pull; its streams share it."""

    def __init__(
        self,
        wants: Sequence[Want],
        on_done: Callable[[int, Outcome], None] | None,
        streams: int,
        patience_s: float = 0.0,
        deadline: float = inf,
    ) -> None:
        """``patience_s`` and ``deadline`` as in :meth:`Fabric.pull`."""
        self.wants = wants
        self.patience_s = patience_s
        self.latest = deadline + sum(want.length for want in wants) / SLOWEST_BYTES_PER_S
        self.reason = LOST
        self.batches = _cut(wants, streams)
        self._on_done = on_done
        self._outcomes: list[Outcome | None] = [None] * len(wants)

    def next_batch(self) -> tuple[int, int] | None:
        """Wants ``lo:hi`` that no other stream has, None when there are no more."""
        try:
            return self.batches.pop()
        except IndexError:
            return None

    def finish(self, index: int, outcome: Outcome) -> None:
        """This want has ended."""
        self._outcomes[index] = outcome
        if self._on_done is not None:
            self._on_done(index, outcome)

    def fail(self, batches: Sequence[tuple[int, int]]) -> None:
        """The wants of ``batches`` that have not ended fail for ``reason``."""
        for lo, hi in batches:
            for index in range(lo, hi):
                if self._outcomes[index] is None:
                    self.finish(index, failed(self.reason))

    def finish_all(self) -> list[Outcome]:
        """The outcomes of all wants, after the last stream has ended."""
        self.fail([(0, len(self.wants))])
        return [outcome for outcome in self._outcomes if outcome is not None]


def _cut(wants: Sequence[Want], streams: int) -> list[tuple[int, int]]:
    """Batches ``lo:hi`` of wants, the first one last."""
    total = sum(want.length for want in wants)
    room = total // (streams * BATCHES_PER_STREAM)
    room = min(max(room, BATCH_BYTES_MIN), BATCH_BYTES_MAX)
    batches = []
    lo, size = 0, 0
    for index, want in enumerate(wants):
        if index > lo and (size + want.length > room or index - lo >= frames.WANTS_MAX):
            batches.append((lo, index))
            lo, size = index, 0
        size += want.length
    if wants:
        batches.append((lo, len(wants)))
    batches.reverse()
    return batches


def ask(stream: Stream, pull: Pull, asked: list[tuple[int, int]]) -> None:
    """Send the request for a further batch, if there is one."""
    batch = pull.next_batch()
    if batch is None:
        return
    asked.append(batch)
    lo, hi = batch
    rows = [frames.REQUEST.pack(frames.PULL, hi - lo, lo, wait_ms(stream), 0)]
    rows += [
        frames.WANT.pack(want.digest, want.offset, want.length, want.whole)
        for want in pull.wants[lo:hi]
    ]
    stream.send(b"".join(rows))


def wait_ms(stream: Stream) -> int:
    """How long the peer may wait for chunks: so that its "missing" still comes in time."""
    left = max(stream.deadline - time.monotonic(), 0.0)
    return min(int((left - min(left / 10, 0.5)) * 1000), frames.WAIT_MS_MAX)
