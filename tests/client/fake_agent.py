"""An agent under the test's control: it says what the test tells it, over a real socket."""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from groupio import wire
from groupio.errors import GroupIOError, to_wire
from groupio.format.items import decode_items
from groupio.model import DecisionKey
from groupio.plan.layout import Layout, Wave, lay_out, waves
from groupio.protocol import messages as msg

PAUSE_S = 20.0


class Peer:
    """One client's connection, seen from the agent."""

    def __init__(self, channel: wire.Channel, hello: msg.Hello, log: str) -> None:
        self.channel = channel
        self.hello = hello
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.arena = -1
        self._log = log
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        try:
            while True:
                self.inbox.put(self.channel.recv(3600).message)
        except (wire.ChannelClosed, OSError, ValueError):
            self.inbox.put(None)

    def take(self, kind: type[Any], timeout_s: float = PAUSE_S) -> Any:
        """The next message, which must be of this kind."""
        message = self.inbox.get(timeout=timeout_s)
        assert isinstance(message, kind), message
        return message

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        self.channel.send(message, fds)

    def layout(self, opened: msg.OpenSave) -> Layout:
        return lay_out(decode_items(opened.items))

    def grant(
        self, opened: msg.OpenSave, wave: Wave, number: int = 0, count: int = 1, offset: int = 0
    ) -> None:
        """Grant a wave at ``offset`` of the arena, which is made and passed on the first time."""
        if self.arena < 0:
            self.arena = os.memfd_create("test-arena", os.MFD_CLOEXEC)
            self.send(msg.Arena(), [self.arena])
        end = offset + wave.virt_hi - wave.virt_lo
        if os.fstat(self.arena).st_size < end:
            os.ftruncate(self.arena, end)
        self.send(
            msg.Grant(
                save_id=opened.save_id,
                key=DecisionKey(1, opened.epoch, 1),
                wave=number,
                waves=count,
                offset=offset,
                virt_lo=wave.virt_lo,
                virt_hi=wave.virt_hi,
                chunk_lo=wave.chunk_lo,
                chunk_hi=wave.chunk_hi,
            )
        )

    def chunks(self, opened: msg.OpenSave, wave: Wave, offset: int = 0) -> list[bytes]:
        """The chunks of a wave, as they lie in the arena now."""
        layout = self.layout(opened)
        found = []
        for chunk in range(wave.chunk_lo, wave.chunk_hi):
            at = offset + int(layout.chunk_start[chunk]) - wave.virt_lo
            found.append(os.pread(self.arena, int(layout.chunk_length[chunk]), at))
        return found

    def receive(self, opened: msg.OpenSave, window: int = 1 << 40) -> dict[str, bytes]:
        """Grant all waves one after the other; the bytes of each item, as they were copied."""
        layout = self.layout(opened)
        parts: list[bytes] = []
        planned = waves(layout, window)
        for number, wave in enumerate(planned):
            self.grant(opened, wave, number, len(planned))
            assert self.take(msg.Copied).wave == number
            parts += self.chunks(opened, wave)
        items = decode_items(opened.items)
        return {
            spec.name: b"".join(parts[slice(*layout.chunk_range(index))])
            for index, spec in enumerate(items)
        }

    def reach(self, opened: msg.OpenSave, *levels: str) -> None:
        for number, level in enumerate(levels, 1):
            first, last = opened.called_at - 0.25, opened.called_at + 0.5
            self.send(
                msg.Reached(opened.save_id, level, opened.called_at + number, first, last, (level,))
            )

    def fail(self, opened: msg.OpenSave, error: GroupIOError) -> None:
        self.send(msg.Failed(opened.save_id, to_wire(error)))

    def die(self) -> None:
        self.channel.close()
        if self.arena >= 0:
            os.close(self.arena)
            self.arena = -1


class FakeAgent:
    """Listens at ``path``; every client that says hello becomes a peer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = f"{path}.log"
        self.starts = 0
        self.ends = 0
        """So many connections are closed instead of an answer, as by an agent that ends."""
        self.refusal: GroupIOError | None = None
        self.unavailable: GroupIOError | None = None
        self._peers: queue.SimpleQueue[Peer] = queue.SimpleQueue()
        self._made: list[Peer] = []
        self._listener = wire.listen(path)
        self._listener.setblocking(True)
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def ensure(self, settings: Any, timeout_s: float = 0) -> Path:
        """In place of starting an agent."""
        self.starts += 1
        if self.unavailable is not None:
            raise self.unavailable
        return self.path

    def peer(self) -> Peer:
        """The next client that connected."""
        return self._peers.get(timeout=PAUSE_S)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            channel = wire.Channel(sock, msg.ToAgent)
            try:
                hello = channel.recv(PAUSE_S).message
            except (TimeoutError, wire.ChannelClosed):
                channel.close()
                continue
            if self.ends:
                self.ends -= 1
                channel.close()
                continue
            if self.refusal is not None:
                channel.send(msg.Refused(to_wire(self.refusal)))
                channel.close()
                continue
            channel.send(msg.Welcome(os.getpid(), msg.PROTOCOL_VERSION, self.log))
            peer = Peer(channel, hello, self.log)
            self._made.append(peer)
            self._peers.put(peer)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(PAUSE_S)
        for peer in self._made:
            peer.die()


def bytes_of(array: np.ndarray[Any, Any]) -> bytes:
    return np.ascontiguousarray(array).tobytes()


class Background:
    """Calls in threads that no failing test has to wait for."""

    def submit(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(call(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001  raised where the result is asked for
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return future


def answer_settles(agent: FakeAgent, background: Background, *errors: Any) -> None:
    """Answer each question of the next client that connects with the next of ``errors``."""

    def answer() -> None:
        peer = agent.peer()
        for error in errors:
            peer.send(msg.Settled(peer.take(msg.Settle).request_id, error))

    background.submit(answer)
