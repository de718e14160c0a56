"""The agent's threads that hash and write, shared by all flush jobs, and their bounce buffers.

Work is done in the order in which it came, so that an earlier epoch is never overtaken by a later
one. The queues need no limit of their own: a job queues one entry per few MiB of leased memory.
"""

from __future__ import annotations

import mmap
import os
import queue
import threading
import time
from collections.abc import Callable

from groupio.agent.uplink import Uplink
from groupio.exhaustion import start_some

Task = Callable[[], None]

BOUNCE_BYTES = (16 << 20) + (64 << 10)
"""Size of one bounce buffer: a write of full size, and what stands around its chunks."""

NICE = 5
"""CPU priority of the hash threads: below the ranks', but not at the bottom.

They share the interpreter lock with the event loop. A thread that is preempted while it holds the
lock stops the loop too: at nice 19, with all processors busy, for seconds (measured with 4 busy
processes on 2 processors: 2 s at nice 19, 0.25 s at nice 5).
"""

WRITER_NICE = 1
"""CPU priority of the writer threads: above the hash threads'.

A writer mostly waits for the disk, and the disk should never wait for it: with hashing on both
processors at the same priority, half of the disk's speed was lost.
"""

_GIVE_WAY_S = 0.002
_PATIENCE_S = 2.0
"""A rank that was stopped in the middle of its copy delays the others' hashing no longer."""


class BouncePool:
    """Page-aligned buffers of BOUNCE_BYTES for what cannot be written from where it lies."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._made = 0
        self._free: list[mmap.mmap] = []
        self._changed = threading.Condition()

    def take(self, should_stop: Callable[[], bool]) -> mmap.mmap | None:
        """A buffer with arbitrary content, or None when ``should_stop`` says so first.

        Waits until one is given back, which the writer threads do whatever becomes of the job.
        OSError when the system has no memory for the first one.
        """
        with self._changed:
            while not should_stop():
                if self._free:
                    return self._free.pop()
                if self._left > 0:
                    try:
                        buffer = _new_buffer()
                    except OSError:
                        # With fewer of them all takes longer; without any there is nothing to
                        # wait for.
                        if not self._made:
                            raise
                    else:
                        self._left -= 1
                        self._made += 1
                        return buffer
                self._changed.wait(0.05)
        return None

    def give_back(self, buffer: mmap.mmap) -> None:
        """Return a buffer that nobody looks at any more."""
        with self._changed:
            self._free.append(buffer)
            self._changed.notify()


def _new_buffer() -> mmap.mmap:
    buffer = mmap.mmap(-1, BOUNCE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        # A direct write out of huge pages is up to a third faster than out of small ones.
        buffer.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass  # this kernel has none
    return buffer


class WorkerPool:
    """Hash threads and writer threads of one agent, below the ranks' CPU priority.

    ``copies_active`` says how many ranks are copying at this moment; while they would need all
    of ``cpu_count`` processors the hash threads pause. Tasks must not raise.
    """

    def __init__(
        self,
        *,
        hash_threads: int = 2,
        write_threads: int = 2,
        copies_active: Callable[[], int] = lambda: 0,
        cpu_count: int | None = None,
        nice: int = NICE,
        uplink: Uplink | None = None,
    ) -> None:
        self.bounce = BouncePool(hash_threads + write_threads + 2)
        self.uplink = uplink or Uplink()
        """Whatever moves segments' bytes waits for its turn here."""
        self._copies_active = copies_active
        self._cpu_count = cpu_count or len(os.sched_getaffinity(0))
        self._pausing_since: float | None = None
        self._hash_queue: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._write_queue: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._threads = [
            *self._start("hash", hash_threads, self._hash_queue, nice),
            *self._start("write", write_threads, self._write_queue, min(nice, WRITER_NICE)),
        ]

    def submit_hash(self, task: Task) -> None:
        """Run ``task`` in a hash thread, after those submitted before."""
        self._hash_queue.put(task)

    def submit_write(self, task: Task) -> None:
        """Run ``task`` in a writer thread, after those submitted before."""
        self._write_queue.put(task)

    def give_way(self) -> None:
        """Sleep while ranks copy on all processors, at most a few seconds on end."""
        while self._copies_active() >= self._cpu_count:
            now = time.monotonic()
            since = self._pausing_since
            if since is None:
                self._pausing_since = now
            elif now - since > _PATIENCE_S:
                return
            time.sleep(_GIVE_WAY_S)
        self._pausing_since = None

    def close(self, timeout_s: float) -> bool:
        """End the threads after what is queued; False when some still work after ``timeout_s``."""
        for thread in self._threads:
            hashing = thread.name.startswith("hash")
            (self._hash_queue if hashing else self._write_queue).put(None)
        self.uplink.open()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    def _start(
        self, kind: str, count: int, tasks: queue.SimpleQueue[Task | None], nice: int
    ) -> list[threading.Thread]:
        threads = [
            # Daemons: a write that hangs in the kernel must not keep the process from its end.
            threading.Thread(target=self._work, args=(tasks, nice), name=f"{kind}-{i}", daemon=True)
            for i in range(count)
        ]
        return threads[: start_some(threads)]

    def _work(self, tasks: queue.SimpleQueue[Task | None], nice: int) -> None:
        # On Linux the priority belongs to the thread; an unprivileged one can only lower it.
        thread = threading.get_native_id()
        now = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, max(now, nice))
        while (task := tasks.get()) is not None:
            task()
            del task  # or its views would live until the next one comes
