"""A directory that is seen through a FUSE mount whose process can die and be started again.

After that every descriptor of the mount before fails with ENOTCONN, for ever. Needs root and
bindfs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

READY_S = 20.0


class FuseMount:
    """``source`` seen at ``where``; both are made if absent."""

    def __init__(self, source: Path, where: Path, *options: str) -> None:
        """``options`` are those of bindfs."""
        try:
            os.close(os.open("/dev/fuse", os.O_RDWR))
        except OSError:
            pytest.skip("peer not installed: FUSE in the kernel")
        if shutil.which("bindfs") is None:
            pytest.skip("peer not installed: bindfs")
        self.source, self.where, self.options = source, where, options
        self._process: subprocess.Popen[bytes] | None = None
        for path in (source, where):
            path.mkdir(parents=True, exist_ok=True)

    def up(self, source: Path | None = None) -> FuseMount:
        """Mount it; the store server is back. ``source`` for once: something else."""
        assert self._process is None
        command = ["bindfs", "-f", "-o", "nonempty", *self.options]
        command += [str(source or self.source), str(self.where)]
        before = self._mounts()
        self._process = subprocess.Popen(command)
        deadline = time.monotonic() + READY_S
        while self._mounts() == before:
            assert self._process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return self

    def die(self) -> None:
        """The process is killed; the mount stays and says ENOTCONN."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(READY_S)
        self._process = None

    def unmount(self) -> None:
        """Leave the mount point as it is without the mount."""
        subprocess.run(["umount", "-l", str(self.where)], check=True, timeout=30)

    def again(self, source: Path | None = None) -> None:
        """Mount it anew after :meth:`die`."""
        self.unmount()
        self.up(source)

    def close(self) -> None:
        """Nothing is left of it."""
        while self._mounts():
            self.unmount()
        if self._process is not None:
            self.die()

    def _mounts(self) -> int:
        return Path("/proc/self/mountinfo").read_text(encoding="utf-8").count(f" {self.where} ")
