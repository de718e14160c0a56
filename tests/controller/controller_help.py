"""``groupio controller run`` and ranks as processes of a test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


class Running:
    """A process whose lines are read one by one; it is ended with the test."""

    def __init__(self, command: list[str], **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate(timeout=20)
        return line.strip()

    def news(self) -> Any:
        return json.loads(self.line())

    def say(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()

    def end(self, number: int) -> tuple[int, str]:
        self.process.send_signal(number)
        _, err = self.process.communicate(timeout=60)
        return self.process.returncode, err


def controller(store: Path, *options: str) -> list[str]:
    listen = () if "--listen" in options else ("--listen", "127.0.0.1:0")
    command = ["-m", "groupio.cli", "controller", "run", "--store", str(store), "--json"]
    return [*command, *listen, *options]
