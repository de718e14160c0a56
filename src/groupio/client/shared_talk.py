"""The talk of the ranks of one host during a grouped read: the hub passes on what concerns others.

The main thread of each rank listens here, the threads that read and copy only speak. A rank that
hangs up before it is done ends the reading for all.
"""

from __future__ import annotations

import os
import select
import threading
import time

from groupio.client.shared_link import Link
from groupio.client.shared_messages import (
    Begin,
    Copied,
    Done,
    Failed,
    Free,
    Join,
    Message,
    Ready,
)
from groupio.client.shared_work import Filled, Work
from groupio.errors import GroupAborted, GroupIOError, GroupTimeout, Outcome, from_wire, to_wire
from groupio.plan.sharing import Sharing
from groupio.wire import ChannelClosed, Received

GRACE_S = 0.5
"""The hub waits so much longer than the deadline, for a rank whose storage hangs to say so."""

VERDICT_MARGIN_S = 2.0
"""The others wait so much longer than the deadline, to hear from the hub who was missing."""


class Talk:
    """What hub and others have in common; lives as long as the link."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.round = 0
        self.epoch = 0
        self.deadline = 0.0
        self._work: Work | None = None
        self._early: list[Message] = []
        self._verdict: GroupIOError | None = None
        self._wake_lock = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)
        self._places = {}
        for place, channel in link.channels.items():
            self._places[channel.fileno()] = place
            self._poll.register(channel.fileno(), select.POLLIN)
        self._fresh = set(link.channels)  # the link may have received more than it took

    def open_round(self, epoch: int, deadline: float) -> None:
        """The next fill begins; ``deadline`` is a reading of ``time.monotonic``."""
        self.round += 1
        self.epoch = epoch
        self.deadline = deadline
        self._work = None
        self._early = []

    def close(self) -> None:
        """Hang up. Safe to repeat; a thread that still speaks is not heard."""
        self.link.close()
        with self._wake_lock:
            if self._wake >= 0:
                os.close(self._wake)
                self._wake = -1

    def give_up(self, error: GroupIOError) -> None:
        """Tell the others why this rank raises; nothing is said twice."""
        if self._verdict is None:
            mine = self.link.ranks[self.link.me]
            wire = to_wire(error)
            wire["message"] = f"rank {mine}: {error.message}"
        else:
            wire = to_wire(self._verdict)
        for place in self.link.channels:
            try:
                self.link.channels[place].enqueue(Failed(self.round, wire))
            except ChannelClosed:
                pass  # gone, or ended by its own error

    def nudge(self) -> None:
        """Make the main thread look at the work; from any thread."""
        with self._wake_lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def _speak(self, place: int, message: Message, fd: int = -1) -> None:
        left = max(self.deadline - time.monotonic(), 0.01)
        try:
            self.link.channels[place].send(message, [fd] if fd >= 0 else [], timeout_s=left)
        except ChannelClosed:
            pass  # the main thread finds it closed too, and knows whether that matters
        except TimeoutError:
            raise self._common(self._late([place])) from None

    def _listen(self, until: float) -> None:
        """Wait for words or a nudge, at most ``until``, and act on them."""
        left = max(until - time.monotonic(), 0)
        ready = [] if self._fresh else [fd for fd, _ in self._poll.poll(left * 1000)]
        places = self._fresh | {self._places[fd] for fd in ready if fd in self._places}
        self._fresh = set()
        if self._wake in ready:
            os.eventfd_read(self._wake)
        for place in sorted(places):
            try:
                received = self.link.channels[place].feed()
            except ChannelClosed:
                self._poll.unregister(self.link.channels[place].fileno())
                self._hung_up(place)
                continue
            for one in received:
                self._hear(place, one)

    def _hear(self, place: int, received: Received) -> None:
        for fd in received.fds:
            os.close(fd)  # of a round that is over

    def _hung_up(self, place: int) -> None:
        raise self._common(
            GroupAborted(
                f"rank {self.link.ranks[place]} ended or gave up while the ranks of this host "
                f"read epoch {self.epoch} together; see its output, then load again on all ranks",
                members=[self.link.ranks[place]],
                epoch=self.epoch,
            )
        )

    def _common(self, error: GroupIOError) -> GroupIOError:
        """``error`` as the one that all are told in the same words."""
        self._verdict = error
        return error

    def _late(self, places: list[int]) -> GroupTimeout:
        missing = [self.link.ranks[place] for place in sorted(places)]
        return GroupTimeout(
            f"ranks {missing} did not do their part in time when the ranks of this host read "
            f"epoch {self.epoch} together; see what became of them, then load again on all ranks",
            missing=missing,
            epoch=self.epoch,
            outcome=Outcome.UNKNOWN,
        )

    def _heed(self, message: Message) -> None:
        """What every rank understands."""
        if isinstance(message, Failed):
            raise self._common(from_wire(message.error))
        if self._work is None:
            self._early.append(message)  # others began a little earlier
        elif isinstance(message, Ready):
            self._work.take(Filled(message.reader, message.batch, message.slot, message.bad))
        elif isinstance(message, Free):
            self._work.release(message.batch)

    def _begin_work(self, work: Work) -> None:
        self._work = work
        early, self._early = self._early, []
        for message in early:
            self._heed(message)


class Spoke(Talk):
    """Any rank but the hub."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self._begun: list[tuple[Begin, int]] = []

    def join(self, join: Join) -> tuple[Begin, int]:
        """Say what this rank wants and hear what all want, with the window's descriptor or -1."""
        self._speak(0, join)
        end = self.deadline + VERDICT_MARGIN_S
        while not self._begun:
            if time.monotonic() >= end:
                raise self._common(self._late([0]))
            self._listen(end)
        return self._begun.pop()

    def sit_out(self, join: Join) -> None:
        """Say that this rank wants nothing; it hears no more of this round."""
        self._speak(0, join)
        self._speak(0, Done(self.round, self.link.me))

    def attend(self, work: Work, sharing: Sharing) -> None:
        """Listen until the work is finished; raises what ended it."""
        self._begin_work(work)
        while not work.finished:
            if work.error is not None:
                raise work.error
            now = time.monotonic()
            if now >= self.deadline and work.reads_left:
                return
            if now >= self.deadline + VERDICT_MARGIN_S:
                raise self._late(list(work.waits_for()) or [0])
            self._listen(self.deadline + (VERDICT_MARGIN_S if now >= self.deadline else 0))
        self._speak(0, Done(self.round, self.link.me))

    def filled(self, filled: Filled) -> None:
        """Pass on that a batch of this rank is in its slot."""
        self._speak(0, Ready(self.round, *filled))

    def copied(self, reader: int, batch: int) -> None:
        """Pass on that this rank has copied a batch."""
        self._speak(0, Copied(self.round, reader, batch))

    def _hear(self, place: int, received: Received) -> None:
        message = received.message
        if isinstance(message, Begin) and message.round == self.round and self._work is None:
            self._begun = [(message, received.fds[0] if received.fds else -1)]
            return
        super()._hear(place, received)
        if message.round == self.round:
            self._heed(message)


class Hub(Talk):
    """The lowest rank of the host."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self._joins: dict[int, dict[int, Join]] = {}
        self._done: set[int] = set()
        self._gone: set[int] = set()
        self._sharing: Sharing | None = None
        self._left: dict[tuple[int, int], int] = {}
        self._lock = threading.Lock()

    def gather(self, join: Join) -> list[Join]:
        """What all want, by place; GroupTimeout names those that did not come in time."""
        self._done = set()
        joins = self._joins.setdefault(self.round, {})
        joins[0] = join
        if self._gone:
            self._hung_up(min(self._gone))
        everyone = set(range(len(self.link.ranks)))
        while joins.keys() != everyone:
            if time.monotonic() >= self.deadline:
                raise self._common(self._late(list(everyone - joins.keys())))
            self._listen(self.deadline)
        del self._joins[self.round]
        for place, other in sorted(joins.items()):
            if join.table and other.table and other.table != join.table:
                raise self._common(
                    GroupAborted(
                        f"rank {self.link.ranks[place]} reads other chunks than rank "
                        f"{self.link.ranks[0]} for epoch {self.epoch}: the store changed or shows "
                        "them different content; load again",
                        members=[self.link.ranks[place]],
                        epoch=self.epoch,
                    )
                )
        return [joins[place] for place in sorted(joins)]

    def announce(self, begin: Begin, sharing: Sharing | None, fd: int) -> None:
        """Tell all what all want; the reading starts."""
        self._sharing = sharing
        if sharing is not None:
            self._left = {
                (reader, batch): int(count) - 1
                for reader, share in enumerate(sharing.shares)
                for batch, count in enumerate(share.wanters.sum(axis=0).tolist())
            }
        for place in self.link.channels:
            self._speak(place, begin, fd)

    def attend(self, work: Work, sharing: Sharing) -> None:
        """Pass on words until all are done; raises what ended the reading."""
        self._begin_work(work)
        others = set(self.link.channels)
        while not (work.finished and self._done >= others):
            if work.error is not None:
                raise work.error
            now = time.monotonic()
            if now >= self.deadline and work.reads_left:
                return
            if now >= self.deadline + GRACE_S:
                raise self._common(self._late(list(others - self._done)))
            self._listen(self.deadline + (GRACE_S if now >= self.deadline else 0))

    def filled(self, filled: Filled) -> None:
        """Tell those who want it that a batch is in its slot."""
        assert self._sharing is not None
        ready = Ready(self.round, *filled)
        wanters = self._sharing.shares[filled.reader].wanters[:, filled.batch]
        for place in wanters.nonzero()[0].tolist():
            if place == self.link.me and place != filled.reader:
                self._heed(ready)
            elif place != filled.reader:
                self._speak(place, ready)

    def copied(self, reader: int, batch: int) -> None:
        """One of those who want a batch has copied it; the last one frees the slot."""
        with self._lock:
            self._left[reader, batch] -= 1
            last = not self._left[reader, batch]
        if last and reader == self.link.me:
            self._heed(Free(self.round, batch))
        elif last:
            self._speak(reader, Free(self.round, batch))

    def _hear(self, place: int, received: Received) -> None:
        super()._hear(place, received)
        message = received.message
        if isinstance(message, Join) and message.round >= self.round:
            self._joins.setdefault(message.round, {})[place] = message
        elif message.round != self.round:
            pass  # of a round that is over
        elif isinstance(message, Done):
            self._done.add(place)
        elif isinstance(message, Ready):
            self.filled(Filled(message.reader, message.batch, message.slot, message.bad))
        elif isinstance(message, Copied):
            self.copied(message.reader, message.batch)
        else:
            self._heed(message)

    def _hung_up(self, place: int) -> None:
        self._gone.add(place)
        if place not in self._done:
            super()._hung_up(place)
