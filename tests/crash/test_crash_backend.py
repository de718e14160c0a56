"""Power cuts and kills of the backend's commit path: nothing acknowledged is lost, nothing torn."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from backend_writer import acked, check, commit
from loopdev import LoopDisk
from stracing import Call, calls, inject

from groupio.backend.posix import PosixBackend

pytestmark = pytest.mark.root

WRITER = str(Path(__file__).parent / "backend_writer.py")


def writer(store: Path, first: int, count: int, *guard: str) -> list[str]:
    return [sys.executable, WRITER, str(store), str(first), str(count), *guard]


def cuts_after_each_ack(disk: LoopDisk, where: Path, *guard: str) -> list[tuple[set[int], Path]]:
    """Run the writer; while it waits after each ack, copy the disk. Pairs of (acked, image)."""
    cuts = []
    command = writer(where / "runs" / "store", 1, 4, *guard)
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        seen: set[int] = set()
        for line in process.stdout:
            if acked(line):
                seen |= acked(line)
                cuts.append((set(seen), disk.cut()))
            process.stdin.write("\n")
            process.stdin.flush()
        assert process.wait(timeout=30) == 0
    return cuts


def test_power_cut_right_after_the_ack_loses_nothing(disk: LoopDisk) -> None:
    with disk.mounted() as where:
        cuts = cuts_after_each_ack(disk, where)
    assert [sorted(seen) for seen, _ in cuts] == [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4]]
    for seen, image in cuts:
        with disk.after(image) as where:
            assert check(where / "runs" / "store") == seen


@pytest.mark.parametrize("guard", ["fsync", "dirsync"])
def test_the_harness_notices_a_missing_flush(disk: LoopDisk, guard: str) -> None:
    with disk.mounted() as where:
        cuts = cuts_after_each_ack(disk, where, guard)
    lost = 0
    for seen, image in cuts:
        with disk.after(image) as where:
            try:
                lost += check(where / "runs" / "store") != seen
            except Exception:  # noqa: BLE001  a torn epoch may fail in any way
                lost += 1
    assert lost > 0


def sample(found: list[Call], count: int) -> list[Call]:
    """``count`` calls spread over ``found``, and every call that gives a file its name."""
    spread = found[:: max(1, len(found) // count)]
    vital = [call for call in found if call.name.startswith(("link", "rename"))]
    return sorted({*spread, *vital}, key=found.index)


def test_kill_and_power_cut_at_system_calls(disk: LoopDisk, tmp_path: Path) -> None:
    log = tmp_path / "strace.log"
    with disk.mounted() as where:
        (where / "try").mkdir()
        os.sync()
        _, found = calls(writer(where / "try" / "store", 1, 2), log)
        for number, call in enumerate(sample(found, 20)):
            store = where / f"run{number}" / "store"
            done = inject(writer(store, 1, 2), log, call, "signal=SIGKILL")
            image = disk.cut()
            assert done.returncode == -signal.SIGKILL, call
            seen = acked(done.stdout)
            assert check(store) >= seen, call
            with disk.after(image) as after:
                left = after / f"run{number}" / "store"
                assert check(left) >= seen, call
                # The next process goes on from whatever was left.
                with PosixBackend.open(left, create=True) as backend:
                    backend.ensure_store_record("job")
                    assert commit(backend, 10), call
                assert check(left) >= seen | {10}, call
