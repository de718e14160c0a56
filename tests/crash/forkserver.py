"""Scripts of ``whole_path`` in processes of their own, made by forking one that has all imports.

Starting Python and importing numpy takes longer than the script. The server has one thread and
makes nothing of its own, so that a fork of it is as good as new.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

from whole_path import (
    WORLD,
    Script,
    content_of,
    make_repeatable,
    perform,
    quiet,
    remove_guard,
)

_MESSAGE_BYTES = 1 << 20


class Run:
    """One script in its process, which waits at the marker until :meth:`go`."""

    def __init__(self, channel: socket.socket, pid: int) -> None:
        self.pid = pid
        self.told: list[dict[str, Any]] = []
        self.ended = False
        self._channel = channel
        self._buffer = b""

    def go(self) -> None:
        """Let it begin, or go on after a pause."""
        try:
            self._channel.sendall(b"\n")
        except BrokenPipeError:
            pass  # it was killed; what it said can still be read

    def next(self, timeout_s: float) -> dict[str, Any] | None:
        """The next thing that it tells; None when it has ended. TimeoutError if neither comes."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._channel], [], [], left)[0]:
                raise TimeoutError(f"process {self.pid} is silent; it told {self.told}")
            data = self._channel.recv(_MESSAGE_BYTES)
            if not data:
                self.ended = True
                return None
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        told: dict[str, Any] = json.loads(line)
        self.told.append(told)
        return told

    def finish(self, timeout_s: float = 60.0) -> list[dict[str, Any]]:
        """Everything that it tells until its end; it is killed when that does not come."""
        try:
            while self.next(timeout_s) is not None:
                pass
        except TimeoutError:
            self.kill()
            raise
        return self.told

    def kill(self) -> None:
        """End it by force."""
        if not self.ended:
            os.kill(self.pid, signal.SIGKILL)


class ForkServer:
    """Makes processes; usable as a context manager."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environ = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                env=environ,
            )
        self._control = ours

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._control.close()
        self._process.wait(timeout=30)

    def start(self, script: Script, store: Path, runtime: Path, tag: str = "a") -> Run:
        """A process that will run ``script``, stopped at the marker."""
        order = {
            "script": script.plain(),
            "store": str(store),
            "runtime": str(runtime),
            "tag": tag,
        }
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [json.dumps(order).encode()], [theirs.fileno()])
        answer = json.loads(self._control.recv(_MESSAGE_BYTES))
        return Run(ours, answer["pid"])

    def status(self, run: Run) -> int:
        """How the process ended: an exit code, or minus the signal."""
        self._control.sendall(json.dumps({"wait": run.pid}).encode())
        run._channel.close()
        answer = json.loads(self._control.recv(_MESSAGE_BYTES))
        return os.waitstatus_to_exitcode(answer["status"])

    def play(
        self, script: Script, store: Path, runtime: Path, tag: str = "a"
    ) -> tuple[list[dict[str, Any]], int]:
        """Run a script to its end; what it told, and its exit code."""
        run = self.start(script, store, runtime, tag)
        run.go()
        told = run.finish()
        return told, self.status(run)


def _child(order: dict[str, Any], channel: socket.socket) -> None:
    def say(line: dict[str, Any]) -> None:
        channel.sendall(json.dumps(line).encode() + b"\n")

    def go_on() -> None:
        assert channel.recv(1), "the test went away"

    script = Script.of(order["script"])
    quiet(say)
    make_repeatable(order["tag"])
    remove_guard(script.guard)
    go_on()
    perform(script, Path(order["store"]), Path(order["runtime"]), say, go_on)


def serve(control: socket.socket) -> None:
    """Fork a process for each order until the other side goes away."""
    while True:
        data, fds, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, 1)
        if not data:
            return
        order = json.loads(data)
        if "wait" in order:
            _, status = os.waitpid(order["wait"], 0)
            control.sendall(json.dumps({"status": status}).encode())
            continue
        pid = os.fork()
        if pid == 0:
            control.close()
            code = 70
            try:
                _child(order, socket.socket(fileno=fds[0]))
                code = 0
            finally:
                sys.stderr.flush()
                os._exit(code)
        os.close(fds[0])
        control.sendall(json.dumps({"pid": pid}).encode())


def warm_up() -> None:
    """Have everything that a script needs, so that no fork has to get it."""
    for name in ("agent", "backend", "client", "format", "plan"):
        package = importlib.import_module(f"groupio.{name}")
        for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    for content in range(6):
        for rank in range(WORLD):
            content_of(content, rank)


if __name__ == "__main__":
    warm_up()
    serve(socket.socket(fileno=int(sys.argv[1])))
