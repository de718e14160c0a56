"""Settings of a client and of the agent that it starts; the environment is read here only."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from groupio.errors import InvalidInput
from groupio.model import REPLICAS_MAX

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_LOG_LEVELS = ("debug", "info", "warning", "error")
_FABRICS = ("tcp", "mooncake", "mooncake-keyless", "torch")
_NODE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_HOST = r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)"
_LISTEN = re.compile(rf"{_HOST}(?::\d{{1,5}})?")
_CONTROLLER = re.compile(
    rf"local|store|tcp://{_HOST}:\d{{1,5}}|etcd://{_HOST}:\d{{1,5}}(?:,{_HOST}:\d{{1,5}})*"
)
_PREFIX = "GROUPIO_"


@dataclass(frozen=True, slots=True)
class Settings:
    """How this client and its agent work. Every field can come from ``GROUPIO_<FIELD>``.

    The agent of a node takes its own fields from the client that starts it; they stay until it
    ends. InvalidInput when a value is out of range.
    """

    memory_bytes: int | None = None
    """Host memory for staging on this node, in bytes (None: the agent chooses by what is free)."""
    replicas: int = 1
    """Nodes that hold the bytes at level REPLICATED, this one included."""
    uplink_bytes_per_s: float | None = None
    """What this node's agent may write to stores, and read from them, in bytes per second each
    (None: all it can)."""
    fabric_bytes_per_s: float | None = None
    """What this node may send to other nodes, and get from them, in bytes per second each
    (None: all it can)."""
    failure_domain: str | None = None
    """What fails together with this node (a rack, a power feed); None: the node alone."""
    file_mode: int | None = None
    """Permission bits of new files of a store, such as 0o660; directories are open to those who
    may read (None: the umask of this process says, as for other tools)."""
    idle_s: float = 60.0
    """The agent ends after so many seconds without a client and without work."""
    log_level: str = "info"
    """The agent logs this and above: debug, info, warning or error."""
    runtime_dir: str | None = None
    """Directory of the agent's socket, locks and log (None: $XDG_RUNTIME_DIR/groupio, else a
    private one under /tmp)."""
    connect_timeout_s: float = 30.0
    """How long a call waits for the agent to start and to answer, in seconds."""
    close_timeout_s: float = 120.0
    """How long ``close`` and the interpreter's exit wait for own saves to be durable, in
    seconds; what is STAGED by then is finished by the agent without the client."""
    read_threads: int | None = None
    """Threads of a load (None: twice the CPUs of this process, at most 8)."""
    node: str | None = None
    """This node's name among the nodes of a job (None: the host name); hyphens become
    underscores."""
    controller: str | None = None
    """Where the controller of a job is: ``local`` (this node's agent), ``store`` (a record in the
    store says so), ``tcp://HOST:PORT`` or ``etcd://HOST:PORT[,HOST:PORT]`` (None: ``local`` or
    ``store``, by what the launcher says of the number of nodes)."""
    listen: str | None = None
    """``HOST[:PORT]`` at which other nodes reach this agent. None: all addresses of the node when
    there is a token (``GROUPIO_TOKEN``, ``GROUPIO_TOKEN_FILE``), else loopback only."""
    fabric: str = "tcp"
    """How bytes move between nodes: ``tcp``, ``mooncake``, or ``torch``: then
    ``groupio.torch.load`` moves them by the job's process group; agents use ``tcp``. The engine's
    own ports have no key, so ``mooncake`` serves loopback only; ``mooncake-keyless`` is the same at
    any address, for a network that only the job's nodes reach."""
    foreground_share: float = 0.1
    """The share of its speed to which storage traffic of a node keeps while a rank is in
    ``Client.foreground()``: 0 pauses it, 1 lets all of it pass."""
    backend_bytes_per_s: float | None = None
    """What the store takes from all nodes together, in bytes per second (None: no limit)."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, str) and not is_unicode(value):
                raise InvalidInput(f"settings: {field.name}={value!r} is not valid Unicode")
        _check(self.memory_bytes is None or self.memory_bytes >= 16 << 20, self, "memory_bytes")
        _check(_is_count(self.replicas, 1, REPLICAS_MAX), self, "replicas")
        for name in ("uplink_bytes_per_s", "fabric_bytes_per_s", "backend_bytes_per_s"):
            value = getattr(self, name)
            _check(value is None or 0 < value < math.inf, self, name)
        mode = self.file_mode
        _check(mode is None or _is_count(mode, 0o600, 0o666), self, "file_mode")
        _check(mode is None or mode & 0o711 == 0o600, self, "file_mode")
        for name in ("idle_s", "connect_timeout_s", "close_timeout_s"):
            _check(0 <= getattr(self, name) < math.inf, self, name)
        _check(self.log_level in _LOG_LEVELS, self, "log_level")
        _check(self.runtime_dir is None or os.path.isabs(self.runtime_dir), self, "runtime_dir")
        _check(
            self.read_threads is None or _is_count(self.read_threads, 1, 256), self, "read_threads"
        )
        _check(self.node is None or _NODE.fullmatch(self.node), self, "node")
        _check(
            self.controller is None
            or (_CONTROLLER.fullmatch(self.controller) and _ports_exist(self.controller)),
            self,
            "controller",
        )
        _check(
            self.listen is None or (_LISTEN.fullmatch(self.listen) and _ports_exist(self.listen)),
            self,
            "listen",
        )
        _check(self.fabric in _FABRICS, self, "fabric")
        _check(0 <= self.foreground_share <= 1, self, "foreground_share")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Self:
        """The defaults, changed by ``GROUPIO_*`` variables (of this process if not given).

        Sizes may have a unit (:func:`parse_size`), rates too (:func:`parse_rate`);
        ``GROUPIO_FILE_MODE`` is octal. InvalidInput names a variable whose value cannot be read.
        Variables of other names are left alone.
        """
        source = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        for field in fields(cls):
            variable = _PREFIX + field.name.upper()
            text = source.get(variable, "").strip()
            if text:
                try:
                    values[field.name] = _PARSERS[field.name](text)
                except ValueError:
                    raise InvalidInput(
                        f"{variable}={text!r} cannot be read: {_EXPECTED[field.name]}"
                    ) from None
        return cls(**values)


def parse_size(text: str) -> int:
    """Bytes in a text such as ``8G``, ``64GiB`` (powers of 1024) or ``64GB`` (of 1000).

    ValueError when it is no size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(text)
    base = 1000 if (match[3] or "").lower() == "b" else 1024
    return int(float(match[1]) * base ** _POWERS[match[2].lower()])


def parse_rate(text: str) -> float:
    """Bytes per second in a text such as ``12.5GB/s`` or ``2G``; ValueError when it is no rate."""
    return float(parse_size(text.strip().removesuffix("/s")))


def _octal(text: str) -> int:
    return int(text, 8)


_PARSERS: dict[str, Callable[[str], Any]] = {
    "memory_bytes": parse_size,
    "replicas": int,
    "uplink_bytes_per_s": parse_rate,
    "fabric_bytes_per_s": parse_rate,
    "failure_domain": str,
    "file_mode": _octal,
    "idle_s": float,
    "log_level": str.lower,
    "runtime_dir": os.path.abspath,
    "connect_timeout_s": float,
    "close_timeout_s": float,
    "read_threads": int,
    "node": str,
    "controller": str,
    "listen": str,
    "fabric": str.lower,
    "foreground_share": float,
    "backend_bytes_per_s": parse_rate,
}

_SECONDS = "a number of seconds, 0 or more"
_RATE = "bytes per second, more than 0, such as 2000000000, 2G or 12.5GB/s"
_EXPECTED = {
    "memory_bytes": "a size of at least 16 MiB, such as 8589934592, 8G or 64GiB",
    "replicas": f"a whole number from 1 to {REPLICAS_MAX}",
    "uplink_bytes_per_s": _RATE,
    "fabric_bytes_per_s": _RATE,
    "failure_domain": "a name",
    "file_mode": "octal bits without x, with which the owner can read and write, such as 660",
    "idle_s": _SECONDS,
    "log_level": f"one of {', '.join(_LOG_LEVELS)}",
    "runtime_dir": "an absolute path",
    "connect_timeout_s": _SECONDS,
    "close_timeout_s": _SECONDS,
    "read_threads": "a whole number from 1 to 256",
    "node": "a name of 1 to 64 letters, digits, dots, hyphens and underscores",
    "controller": "local, store, tcp://HOST:PORT or etcd://HOST:PORT[,HOST:PORT], with ports of at"
    " most 65535",
    "listen": "HOST or HOST:PORT, with a port of at most 65535",
    "fabric": f"one of {', '.join(_FABRICS)}",
    "foreground_share": "a number from 0 to 1",
    "backend_bytes_per_s": _RATE,
}


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can say ``text``: messages and records hold no other text.

    A path that is not UTF-8 has lone surrogates in Python.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _ports_exist(text: str) -> bool:
    """No ``HOST:PORT`` in the text has a port that there is not; a bare IPv6 host has none."""
    ports = re.findall(r":(\d+)(?=,|$)", text)
    return all(int(port) <= 65535 for port in ports)


def _is_count(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _check(good: object, settings: Settings, name: str) -> None:
    if not good:
        value = getattr(settings, name)
        raise InvalidInput(f"settings: {name}={value!r} is not {_EXPECTED[name]}")
