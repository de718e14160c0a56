"""Machines in one machine: network namespaces joined by a bridge, whose links can be hurt.

Needs root. Nothing touches the network of the host: the bridge is in a namespace of its own.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from itertools import count

_numbers = count(1)

NOBODY = "02:00:00:00:00:99"
"""A hardware address that no interface has: what is sent to it is lost in silence."""


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


def usable() -> bool:
    """Namespaces can be made here."""
    return os.geteuid() == 0


class Net:
    """Namespaces ``0..size-1`` with addresses 10.77.0.1 and so on; the bridge is 10.77.0.254."""

    def __init__(self, size: int) -> None:
        self._name = f"gio{os.getpid()}x{next(_numbers)}"
        self._made: list[str] = []
        self.size = size
        try:
            self._make(size)
        except BaseException:
            self.close()
            raise

    def _make(self, size: int) -> None:
        switch = self._space("sw")
        _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", switch, "addr", "add", "10.77.0.254/24", "dev", "br0")
        _run("ip", "-n", switch, "link", "set", "br0", "up")
        for i in range(size):
            space = self._space(str(i))
            _run(
                *("ip", "link", "add", "eth0", "netns", space, "type", "veth"),
                *("peer", "name", f"p{i}", "netns", switch),
            )
            _run("ip", "-n", switch, "link", "set", f"p{i}", "master", "br0", "up")
            _run("ip", "-n", space, "addr", "add", f"{self.address(i)}/24", "dev", "eth0")
            _run("ip", "-n", space, "link", "set", "eth0", "up")

    def _space(self, name: str) -> str:
        space = f"{self._name}-{name}"
        _run("ip", "netns", "add", space)
        self._made.append(space)
        _run("ip", "-n", space, "link", "set", "lo", "up")
        return space

    def address(self, i: int) -> str:
        return f"10.77.0.{i + 1}"

    def prefix(self, i: int | None) -> tuple[str, ...]:
        """What a command starts with to run in the namespace; None: where the bridge is."""
        return ("ip", "netns", "exec", f"{self._name}-{'sw' if i is None else i}")

    def cut(self, a: int, b: int) -> None:
        """Lose in silence all that goes from ``a`` to ``b``; the other way stays."""
        _run(
            *("ip", "-n", f"{self._name}-{a}", "neigh", "replace", self.address(b)),
            *("lladdr", NOBODY, "dev", "eth0", "nud", "permanent"),
        )

    def mend(self, a: int, b: int) -> None:
        """Undo :meth:`cut`."""
        _run(
            *("ip", "-n", f"{self._name}-{a}", "neigh", "del", self.address(b), "dev", "eth0"),
        )

    def throttle(self, i: int, bytes_per_s: int) -> None:
        """What ``i`` sends has this rate from now on."""
        _run(
            *("tc", "-n", f"{self._name}-{i}", "qdisc", "replace", "dev", "eth0", "root", "tbf"),
            *("rate", f"{bytes_per_s * 8}bit", "burst", "256k", "latency", "200ms"),
        )

    def free(self, i: int) -> None:
        """Undo :meth:`throttle`."""
        _run("tc", "-n", f"{self._name}-{i}", "qdisc", "del", "dev", "eth0", "root")

    def close(self) -> None:
        """Remove everything; the processes in the namespaces should have ended."""
        for space in reversed(self._made):
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(
                    ["ip", "netns", "del", space], capture_output=True, timeout=30, check=False
                )
