"""A program that commits epochs with the backend alone, and the check of what it left.

``python backend_writer.py STORE FIRST COUNT [fsync|dirsync]`` commits COUNT epochs and prints
one line of JSON after each: ``{"acked": EPOCH}``, or ``{"failed": KIND, "outcome": ..., "errno":
...}`` and ends. The last argument removes a guard, to prove that the harness would notice.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

from stracing import mark

from groupio.backend.base import EPOCHS, SEGMENTS
from groupio.backend.posix import PosixBackend
from groupio.errors import GroupIOError, NotFound
from groupio.format.records import parse_key, segment_name
from groupio.model import PAGE_BYTES, DecisionKey

PAGES = 16
TAIL = b"tail"


def key_of(epoch: int) -> DecisionKey:
    """The decision key of an epoch's first attempt."""
    return DecisionKey(lineage=1, epoch=epoch, attempt=1)


def commit(store: PosixBackend, epoch: int) -> bool:
    """Save one epoch in the order of the real commit path."""
    key = key_of(epoch)
    name = segment_name(key, "node", 0)
    with memoryview(mmap.mmap(-1, PAGES * PAGE_BYTES)) as view:
        view[:] = os.urandom(len(view))
        digest = hashlib.sha256(bytes(view) + TAIL).hexdigest()
        segment = store.create_segment(name)
        try:
            segment.write(0, [view])
            segment.write_tail(len(view), TAIL)
            segment.sync_close(len(view) + len(TAIL))
        except GroupIOError:
            segment.abort()
            raise
    store.sync_folder(SEGMENTS)
    store.prepare(key, json.dumps({"epoch": epoch, "segment": name, "sha256": digest}).encode())
    return store.commit_prepared(key)


def check(path: Path) -> set[int]:
    """The epochs that a reader finds; AssertionError when one of them is not whole."""
    try:
        store = PosixBackend.open(path, create=False)
    except NotFound:
        return set()
    found = set()
    with store:
        for name in store.list(EPOCHS):
            key = parse_key(name)
            assert key is not None, f"torn name {name!r}"
            record = json.loads(store.read(EPOCHS, name))
            assert record["epoch"] == key.epoch
            data = store.read(SEGMENTS, record["segment"])
            assert hashlib.sha256(data).hexdigest() == record["sha256"], name
            found.add(key.epoch)
    return found


def acked(output: str) -> set[int]:
    """The epochs that a run acknowledged."""
    lines = [json.loads(line) for line in output.splitlines()]
    return {line["acked"] for line in lines if "acked" in line}


def _without(guard: str) -> Callable[[int], None]:
    real = os.fsync

    def fsync(fd: int) -> None:
        directory = stat.S_ISDIR(os.fstat(fd).st_mode)
        if directory if guard == "fsync" else not directory:
            real(fd)

    return fsync


def main(path: str, first: str, count: str, guard: str = "") -> int:
    """Run the program."""
    if guard:
        os.fsync = _without(guard)
    mark()
    try:
        with PosixBackend.open(path, create=True) as store:
            store.ensure_store_record("job")
            for epoch in range(int(first), int(first) + int(count)):
                assert commit(store, epoch)
                print(json.dumps({"acked": epoch}), flush=True)
                sys.stdin.readline()  # a test may hold the program right after the ack
    except GroupIOError as error:
        kind, number = type(error).__name__, getattr(error, "errno", None)
        print(json.dumps({"failed": kind, "outcome": error.outcome, "errno": number}), flush=True)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
