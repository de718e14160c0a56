"""The agent's log: one rotated file, into which stray output goes too."""

from __future__ import annotations

import logging
import os
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path

LOG_BYTES_MAX = 4 << 20
"""The log is rotated when it reaches this size."""

LOG_FILES_KEPT = 3
"""Rotated files that are kept beside the current one."""

_FORMAT = "%(asctime)s.%(msecs)03d %(levelname)s %(process)d %(threadName)s %(name)s: %(message)s"


class _AgentLogHandler(RotatingFileHandler):
    """A rotating file that standard output and error follow, so that nothing is lost."""

    def __init__(self, path: Path, *, capture_stdio: bool) -> None:
        self._capture_stdio = capture_stdio
        super().__init__(path, maxBytes=LOG_BYTES_MAX, backupCount=LOG_FILES_KEPT, encoding="utf-8")

    def _open(self) -> TextIOWrapper:
        fd = os.open(
            self.baseFilename,
            os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW,
            0o600,
        )
        if self._capture_stdio:
            os.dup2(fd, 1)
            os.dup2(fd, 2)
        return os.fdopen(fd, "a", encoding="utf-8", errors="backslashreplace")


def set_up_log(path: Path, level: str, *, capture_stdio: bool) -> logging.Handler:
    """Send the log of the whole process to ``path`` (mode 0600), rotated; returns the handler.

    ``level`` is a name such as "info". With ``capture_stdio`` descriptors 1 and 2 go there too.
    """
    handler = _AgentLogHandler(path, capture_stdio=capture_stdio)
    handler.setFormatter(logging.Formatter(_FORMAT, datefmt="%Y-%m-%dT%H:%M:%S"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(level.upper())
    return handler
