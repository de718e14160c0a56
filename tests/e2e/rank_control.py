"""A rank process under a test's control."""

from __future__ import annotations

import contextlib
import json
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Self

from groupio.errors import GroupIOError, from_wire

SCRIPT = Path(__file__).with_name("rank_process.py")


class RankControl:
    """Starts ``rank_process.py``, which answers commands in order."""

    def __init__(
        self,
        rank: int,
        environ: dict[str, str],
        prefix: Sequence[str] = (),
        output: IO[str] | None = None,
    ) -> None:
        self.rank = rank
        self.process = subprocess.Popen(
            [*prefix, sys.executable, str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            env=environ,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def logs(self) -> str:
        """What may say why it does not answer."""
        return ""

    def send(self, do: str, **command: Any) -> Self:
        """Give a command without waiting for its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **command}) + "\n")
        self.process.stdin.flush()
        return self

    def answer(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """The next answer; a typed error that the call raised is raised here."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], timeout_s)
        if not ready:
            self.process.send_signal(signal.SIGABRT)  # it says on stderr where it waits
            raise TimeoutError(f"rank {self.rank} (pid {self.pid}) did not answer\n{self.logs()}")
        line = self.process.stdout.readline()
        if not line:
            raise EOFError(f"rank {self.rank} ended with {self.process.wait(10)}")
        data = json.loads(line)
        if "raised" in data:
            raise from_wire(data["raised"])
        return data

    def ask(self, do: str, timeout_s: float = 60.0, **command: Any) -> dict[str, Any]:
        return self.send(do, **command).answer(timeout_s)

    def outcome(self, timeout_s: float = 60.0) -> dict[str, Any] | GroupIOError:
        """The next answer, or the typed error."""
        try:
            return self.answer(timeout_s)
        except GroupIOError as error:
            return error

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def end(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.process.send_signal(signal.SIGCONT)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()
        self.process.stdout.close()
