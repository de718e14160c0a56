"""Compares the TCP fabric with one raw socket stream: two processes on loopback.

``python -m groupio.bench.fabric --json FILE`` moves the same chunks from the memory of one process
to the memory of another: by one plain socket, by the fabric without digests, and with them. They
take turns. What else the machine does can only slow a turn down, so each figure is that of its
best turn; the medians stand beside them.

With digests, the processors bound the rate: ``allowed`` is the least of what the raw stream
reached and of cores / (seconds of one core that sending, receiving and hashing a byte take). The
seconds of sending and receiving are the processor time of both processes in a raw turn, those of
hashing are measured by one thread alone, over the same memory. Each is the least of all turns.
Where other processes take a part of the processors, only the ``cpu_ratio`` figures mean much: the
processor time that the bytes need, over that which the fabric took.
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import platform
import random
import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from blake3 import blake3

from groupio.fabric.base import Served, Want
from groupio.fabric.tcp import STREAMS, TcpFabric
from groupio.model import CHUNK_BYTES

JOB = "bench"
_TOKEN = b"of one measurement"
DEADLINE_S = 60.0


class _Memory:
    """Chunks in one piece of memory, which was touched before."""

    def __init__(self, chunks: int, *, fill: bool) -> None:
        self.view = memoryview(mmap.mmap(-1, chunks * CHUNK_BYTES))
        source = random.Random(0).randbytes(CHUNK_BYTES)
        self.chunks = [
            self.view[at : at + CHUNK_BYTES] for at in range(0, len(self.view), CHUNK_BYTES)
        ]
        for index, chunk in enumerate(self.chunks):
            chunk[:] = source if fill else bytes(CHUNK_BYTES)
            if fill:
                chunk[:8] = index.to_bytes(8, "little")
        self.by_digest = {blake3(chunk).digest(): chunk for chunk in self.chunks}

    def find(self, job: str, digest: bytes, wait_s: float) -> Served | None:
        """See ``Provider``."""
        chunk = self.by_digest.get(digest)
        return None if chunk is None else Served(chunk, lambda: None)

    def expects(self, job: str, digest: bytes) -> bool:
        """See ``Provider``."""
        return False


def _cpu_s(pid: int) -> float:
    """Processor seconds of this process and of process ``pid``, on the kernel's exact clocks."""
    return time.process_time() + time.clock_gettime((~pid << 3) | 2)


def _serve(chunks: int, pipe: Connection) -> None:
    """The sending process: serves the fabric, and one raw stream for each "raw" it is told."""
    memory = _Memory(chunks, fill=True)
    with TcpFabric(token=_TOKEN) as fabric, socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send((fabric.serve(memory), list(memory.by_digest), listener.getsockname()))
        while (passes := pipe.recv()) is not None:
            sock, _ = listener.accept()
            with sock:
                for _ in range(passes):
                    for chunk in memory.chunks:
                        sock.sendall(chunk)


def _raw(pipe: Connection, target: tuple[str, int], into: _Memory, passes: int) -> None:
    """The bytes through one plain stream."""
    pipe.send(passes)
    with socket.create_connection(target) as sock:
        for _ in range(passes):
            for chunk in into.chunks:
                done = 0
                while done < CHUNK_BYTES:
                    count = sock.recv_into(chunk[done:], 0, socket.MSG_WAITALL)
                    if not count:
                        raise ConnectionResetError("the sending process has ended")
                    done += count


def _fabric(
    fabric: TcpFabric, address: str, digests: Sequence[bytes], into: _Memory, passes: int
) -> None:
    """The same bytes through the fabric."""
    wants = [Want(d, 0, CHUNK_BYTES, chunk) for d, chunk in zip(digests, into.chunks, strict=True)]
    deadline = time.monotonic() + DEADLINE_S
    outcomes = fabric.pull(address, JOB, wants * passes, deadline=deadline)
    if not all(outcome.ok for outcome in outcomes):
        raise ConnectionError(f"the pull failed: {next(o for o in outcomes if not o.ok)}")


def _hash(into: _Memory, passes: int) -> None:
    """The digests of the same bytes, by one thread."""
    for _ in range(passes):
        for chunk in into.chunks:
            blake3(chunk).digest()


def measure(chunks: int, passes: int, turns: int) -> dict[str, Any]:
    """Rates in bytes/s and ratios of ``turns`` turns over ``chunks`` chunks, ``passes`` times."""
    spawning = multiprocessing.get_context("spawn")
    pipe, theirs = spawning.Pipe()
    child = spawning.Process(target=_serve, args=(chunks, theirs), daemon=True)
    child.start()
    theirs.close()
    assert child.pid is not None
    address, digests, target = pipe.recv()
    into = _Memory(chunks, fill=False)
    seconds: dict[str, list[float]] = {}
    cpu_seconds: dict[str, list[float]] = {}
    load_before = os.getloadavg()[0]
    with (
        TcpFabric(token=_TOKEN, verify=False) as plain,
        TcpFabric(token=_TOKEN) as checked,
    ):
        tasks: dict[str, Callable[[], None]] = {
            "raw": lambda: _raw(pipe, target, into, passes),
            "without_digests": lambda: _fabric(plain, address, digests, into, passes),
            "with_digests": lambda: _fabric(checked, address, digests, into, passes),
            "hash_one_core": lambda: _hash(into, passes),
        }
        for turn in range(turns + 1):
            for name, task in tasks.items():
                start, cpu = time.monotonic(), _cpu_s(child.pid)
                task()
                if turn:  # the first one opens connections and warms up
                    seconds.setdefault(name, []).append(time.monotonic() - start)
                    cpu_seconds.setdefault(name, []).append(_cpu_s(child.pid) - cpu)
    pipe.send(None)
    child.join()
    nbytes = chunks * passes * CHUNK_BYTES
    return {
        "bytes": nbytes,
        "chunk_bytes": CHUNK_BYTES,
        "memory_bytes": chunks * CHUNK_BYTES,
        "streams": STREAMS,
        "turns": turns,
        "kernel": platform.release(),
        "load_before": load_before,
        **figures(nbytes, len(os.sched_getaffinity(0)), seconds, cpu_seconds),
    }


def figures(
    nbytes: int,
    cores: int,
    seconds: Mapping[str, Sequence[float]],
    cpu_seconds: Mapping[str, Sequence[float]],
) -> dict[str, Any]:
    """Rates (bytes/s) and ratios of turns that moved ``nbytes`` each; see the module."""
    best = {name: nbytes / min(values) for name, values in seconds.items()}
    median = {name: nbytes / statistics.median(values) for name, values in seconds.items()}
    cpu_s = {name: min(values) / nbytes for name, values in cpu_seconds.items()}
    needed_s = cpu_s["raw"] + cpu_s["hash_one_core"]
    allowed = min(best["raw"], cores / needed_s)
    return {
        "cores": cores,
        "formula": "allowed = min(raw, cores / (cpu_s_per_byte of raw + of hash_one_core))",
        "bytes_per_s_best": best,
        "bytes_per_s_median": median,
        "cpu_s_per_gb_least": {name: value * 1e9 for name, value in cpu_s.items()},
        "allowed_bytes_per_s": allowed,
        "ratio_without_digests": best["without_digests"] / best["raw"],
        "ratio_with_digests": best["with_digests"] / allowed,
        "cpu_ratio_without_digests": cpu_s["raw"] / cpu_s["without_digests"],
        "cpu_ratio_with_digests": needed_s / cpu_s["with_digests"],
        "ratio_without_digests_median": median["without_digests"] / median["raw"],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the result as JSON."""
    parser = argparse.ArgumentParser(prog="python -m groupio.bench.fabric")
    parser.add_argument("--json", type=Path, required=True, help="where the result goes")
    parser.add_argument("--chunks", type=int, default=64, help="chunks of 4 MiB in memory")
    parser.add_argument("--passes", type=int, default=2, help="how often a turn moves them")
    parser.add_argument("--turns", type=int, default=12, help="the best one counts")
    options = parser.parse_args(arguments)
    result = measure(options.chunks, options.passes, options.turns)
    options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
