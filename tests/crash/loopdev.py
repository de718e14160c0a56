"""Power cuts without hardware: a file system on a loop device whose backing file is copied.

What the file system has sent to the device is in the backing file; what is only in its caches is
not. A copy of the file, taken at any moment, is therefore the disk after a power cut at that
moment (with a device that loses nothing it accepted; disks with volatile caches can be worse).
The copy is mounted, which replays the journal, and looked at. Needs root.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

KINDS = ("ext4", "xfs")

SIZES = {"ext4": 128 << 20, "xfs": 320 << 20}
"""Bytes of an image, sparse; xfs accepts no smaller one."""

MEMORY = Path("/dev/shm")
"""Where images live: copying them is a matter of milliseconds there."""

_MKFS = {
    "ext4": ["mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0"],
    "xfs": ["mkfs.xfs", "-q", "-f"],
}

# A copy has the identity of its original, which may be mounted at the same time.
_OPTIONS = {"ext4": "loop", "xfs": "loop,nouuid"}


def run(*command: str | Path) -> None:
    """Run a system tool; the error shows what it said."""
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{command}: exit {done.returncode}: {done.stdout}{done.stderr}")


def copy_sparse(source: Path, target: Path) -> None:
    """Copy only the parts of ``source`` that have data."""
    with open(source, "rb", buffering=0) as old, open(target, "wb", buffering=0) as new:
        size = os.fstat(old.fileno()).st_size
        os.ftruncate(new.fileno(), size)
        end = 0
        while end < size:
            try:
                start = os.lseek(old.fileno(), end, os.SEEK_DATA)
            except OSError:  # no data behind this point
                return
            end = os.lseek(old.fileno(), start, os.SEEK_HOLE)
            while start < end:
                piece = os.pread(old.fileno(), min(end - start, 1 << 20), start)
                start += os.pwrite(new.fileno(), piece, start)


@contextmanager
def workplace() -> Iterator[Path]:
    """A directory for images, in memory, removed at the end."""
    with tempfile.TemporaryDirectory(dir=MEMORY, prefix="groupio-crash-") as path:
        yield Path(path)


def make_image(image: Path, kind: str) -> Path:
    """A new file system of ``kind`` in the file ``image``."""
    with open(image, "wb") as file:
        file.truncate(SIZES[kind])
    run(*_MKFS[kind], image)
    return image


@contextmanager
def mounted_image(image: Path, kind: str, where: Path) -> Iterator[Path]:
    """Mount ``image`` at ``where`` (made if absent), replaying its journal; unmounted at the end.

    The unmount writes back everything: take the copies before.
    """
    where.mkdir(exist_ok=True)
    run("mount", "-t", kind, "-o", _OPTIONS[kind], image, where)
    try:
        yield where
    finally:
        try:
            run("umount", where)
        except RuntimeError:  # a process killed a moment ago may hold it still
            run("umount", "-l", where)


class LoopDisk:
    """A disk that can be cut: ``where`` is its mount point while ``mounted``.

    ``template`` is an image made before, which saves the time of mkfs.
    """

    def __init__(self, folder: Path, kind: str, template: Path | None = None) -> None:
        self.kind = kind
        self.folder = folder
        self.image = folder / "disk.img"
        self.where = folder / "disk"
        self._cuts = 0
        if template is None:
            make_image(self.image, kind)
        else:
            copy_sparse(template, self.image)

    @contextmanager
    def mounted(self) -> Iterator[Path]:
        """The disk in use."""
        with mounted_image(self.image, self.kind, self.where) as where:
            yield where

    def cut(self) -> Path:
        """The image as a power cut at this moment would leave it."""
        self._cuts += 1
        image = self.folder / f"cut-{self._cuts:04d}.img"
        copy_sparse(self.image, image)
        return image

    @contextmanager
    def after(self, image: Path) -> Iterator[Path]:
        """What a machine finds that boots after the cut that left ``image``; removed at the end."""
        where = self.folder / "after"
        try:
            with mounted_image(image, self.kind, where) as path:
                yield path
        finally:
            image.unlink()
