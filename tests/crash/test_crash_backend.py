"""Power cuts under the backend alone: nothing acknowledged is lost, nothing torn.

The kills and cuts at system calls are those of the whole path.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from backend_writer import acked, check
from loopdev import LoopDisk

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
