"""Descriptors of a mount that is gone: they fail, and new ones opened by the path do not."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from open_files import open_files

NAMES = (
    *("open", "close", "fsync", "pwrite", "pwritev", "pread", "preadv", "link", "rename", "unlink"),
    *("mkdir", "stat", "listdir", "fstatvfs", "posix_fadvise"),
)
"""Not fstat: the attributes of an open file may be remembered."""


class DeadHandles:
    """After :meth:`cut` each call on what was open below ``path`` fails with ``error``."""

    def __init__(self, patch: pytest.MonkeyPatch, path: str | Path, error: int) -> None:
        self._path, self._error = str(path), error
        self._dead: set[int] = set()
        self.failed = 0
        for name in NAMES:
            patch.setattr(os, name, self._wrap(name, getattr(os, name)))

    def cut(self) -> None:
        self._dead |= set(open_files(self._path))
        assert self._dead

    def _wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **rest: Any) -> Any:
            used = {args[0] if args else None, *(rest.get(key) for key in _FOLDERS)}
            hit = {one for one in used if isinstance(one, int)} & self._dead
            if name == "close":
                self._dead -= hit
            elif hit:
                self.failed += 1
                raise OSError(self._error, os.strerror(self._error))
            return real(*args, **rest)

        return call


_FOLDERS = ("dir_fd", "src_dir_fd", "dst_dir_fd")
