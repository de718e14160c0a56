"""The connection to the node's agent, and the thread that listens to it.

One connection is one life of an agent. When it ends, everything that waits for it gets AgentLost;
the client makes a new one at its next call.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from groupio import wire
from groupio.agent import spawn
from groupio.client import nesting
from groupio.client.foreground import set_aside
from groupio.errors import AgentLost, GroupIOError, InvalidInput, Outcome, from_wire, to_wire
from groupio.exhaustion import is_exhaustion, start_some, why
from groupio.model import Level
from groupio.protocol import messages as msg
from groupio.settings import Settings

if TYPE_CHECKING:
    from groupio.client.arena import ClientArena
    from groupio.client.saving import Save

log = logging.getLogger("groupio.client")

_LISTEN_S = 3600.0
"""The listening thread looks up this often when nothing comes; the value does not matter."""

_RETRY_S = 0.01

INTRODUCTIONS = 4
"""So many agents are asked in turn while each ends instead of an answer."""

_News = tuple[Any, tuple[int, ...]] | None
"""A message about a read, and the descriptors that came with it."""

_WITH_DESCRIPTORS = (msg.Arena, msg.ReadArena, msg.Pieces, msg.ReadDamaged, msg.ReadRefused)
"""Messages whose receivers take the descriptors that came with them."""

_SEND_S = 60.0
"""A message that the agent does not take for so long means that it hangs."""


class Connection:
    """A connection over which this client was welcomed. Thread-safe."""

    def __init__(
        self,
        channel: wire.Channel,
        welcome: msg.Welcome,
        on_lost: Callable[[Sequence[int]], None] = lambda epochs: None,
        on_store: Callable[[str], None] = lambda store_id: None,
    ) -> None:
        self.welcome = welcome
        self._on_store = on_store
        self._on_lost = on_lost
        self._channel = channel
        self._lock = threading.Lock()
        self._saves: dict[int, Save] = {}
        self._settles: dict[int, queue.SimpleQueue[GroupIOError | None]] = {}
        self._reads: dict[int, queue.SimpleQueue[_News]] = {}
        self._arena: ClientArena | None = None
        self._lost: AgentLost | None = None
        self._is_draining = False
        self._standby: queue.SimpleQueue[msg.Standby | None] | None = None
        self._thread = threading.Thread(target=self._listen, name="groupio-client", daemon=True)

    @classmethod
    def open(
        cls,
        settings: Settings,
        greet: Callable[[wire.Channel, float], None],
        timeout_s: float,
        on_lost: Callable[[Sequence[int]], None] = lambda epochs: None,
        on_store: Callable[[str], None] = lambda store_id: None,
    ) -> Connection:
        """Connect to the node's agent, starting it if none runs, and introduce this client.

        ``greet`` sends its Hello, within so many seconds.
        ``on_lost`` is told of epochs that this agent will not save for this member, before their
        handles are: their calls had not returned, so that other members may not have called yet.
        ``on_store`` is told of the store that saves go to.
        AgentLost when there is none to be had; the agent's own typed error when it refuses.
        """
        channel, answer = _introduce(settings, greet, time.monotonic() + timeout_s)
        if isinstance(answer, msg.Refused):
            channel.close()
            raise from_wire(answer.error)
        if not isinstance(answer, msg.Welcome):
            channel.close()
            raise _unreachable(settings, f"answered with {type(answer).__name__}")
        for note in answer.notes:
            log.info("%s", note)
        connection = cls(channel, answer, on_lost, on_store)
        try:
            start_some([connection._thread])
        except GroupIOError as error:
            channel.close()
            raise AgentLost(f"no agent can be listened to: {error.message}") from error
        return connection

    @property
    def is_usable(self) -> bool:
        """Whether new saves can go over this connection."""
        return self._lost is None and not self._is_draining

    def is_own_thread(self) -> bool:
        """Whether the caller is the listening thread: it must never wait for news."""
        return threading.current_thread() is self._thread

    # -- saves and questions ---------------------------------------------------------------------

    def add(self, save: Save) -> None:
        """Bring news of ``save`` to it from now on; AgentLost when there is no agent."""
        with self._lock:
            if self._lost is not None:
                raise _again(self._lost)
            self._saves[save.save_id] = save
        save.handle._listener = self._thread

    def saves(self) -> list[Save]:
        """The saves that are not decided yet, or wait for their doors."""
        with self._lock:
            return list(self._saves.values())

    @property
    def is_busy(self) -> bool:
        """A save is not decided, or an answer of the agent is awaited."""
        with self._lock:
            return bool(self._saves or self._settles or self._reads)

    def send(self, message: msg.ToAgent, timeout_s: float = _SEND_S) -> None:
        """Send a message; AgentLost when the agent is gone or does not read."""
        while True:
            try:
                self._send(message, timeout_s)
                return
            except wire.ChannelBusy:
                # The thread that is sending sees to its own limit; it can be late only while a
                # signal handler runs in it, and the connection is sound then.
                if self._lost is not None:
                    raise _again(self._lost) from None

    def _send(self, message: msg.ToAgent, timeout_s: float) -> None:
        try:
            self._channel.send(message, timeout_s=timeout_s)
        except wire.ChannelBusy:
            raise
        except (TimeoutError, ConnectionError, OSError) as error:
            self._lose(f"cannot be reached ({error})")
            raise _again(self._lost) from error

    def settle(
        self, request_id: int, timeout_s: float, *, nested: bool = False
    ) -> GroupIOError | None:
        """Wait until all that earlier incarnations staged is decided; the agent's error if any.

        TimeoutError after ``timeout_s``, AgentLost when the agent ends meanwhile. ``nested``: for
        a call that may have interrupted one which is sending.
        """
        answer: queue.SimpleQueue[GroupIOError | None] = queue.SimpleQueue()
        with self._lock:
            if self._lost is not None:
                raise _again(self._lost)
            self._settles[request_id] = answer
        try:
            with nullcontext() if nested else set_aside():
                send = self._send if nested else self.send
                send(msg.Settle(request_id), max(timeout_s, 0.001))
                error = answer.get(timeout=max(timeout_s, 0.001))
        except queue.Empty:
            raise TimeoutError from None
        finally:
            with self._lock:
                self._settles.pop(request_id, None)
        if isinstance(error, AgentLost):
            raise error
        return error

    @property
    def is_alive(self) -> bool:
        """Whether the agent can still be heard."""
        return self._lost is None

    def listen_for(self, request_id: int, news: queue.SimpleQueue[_News]) -> None:
        """Bring what the agent says of a read to ``news``; AgentLost when there is no agent."""
        with self._lock:
            if self._lost is not None:
                raise _again(self._lost)
            self._reads[request_id] = news

    def listen_no_more(self, request_id: int) -> None:
        """The read is over."""
        with self._lock:
            self._reads.pop(request_id, None)

    def close(self, error: GroupIOError) -> None:
        """Say goodbye; saves that are still open get ``error``."""
        try:
            self._channel.send(msg.Bye(), timeout_s=1.0)
        except (TimeoutError, ConnectionError, OSError, ValueError):
            pass  # it is gone or hangs; closing tells it the same
        self._lose("was left by this client", error)
        if not self.is_own_thread():
            self._thread.join(timeout=5.0)

    def abandon_in_child(self) -> None:
        """In a forked child: close its copies of descriptors, disturb nothing of the parent's."""
        self._lock = threading.Lock()
        self._lost = AgentLost("this process was forked; connect again in it")
        self._channel.abandon()
        if self._arena is not None:
            self._arena.abandon_in_child()
        for save in self._saves.values():
            save.handle._abandon_in_child()

    # -- the listening thread --------------------------------------------------------------------

    @nesting.thread
    def _listen(self) -> None:
        why = "ended"
        try:
            while self._lost is None:
                try:
                    received = self._channel.recv(_LISTEN_S)
                except TimeoutError:
                    continue
                self._take(received)
        except wire.ChannelClosed as error:
            if str(error) != wire.PEER_CLOSED:
                why = f"cannot be understood ({error})"
        except GroupIOError as error:
            why = f"cannot be reached ({error.message})"
        except Exception as error:
            log.exception("the thread that listens to the agent failed")
            why = f"cannot be understood ({type(error).__name__}: {error})"
        self._lose(why)
        # Here, not in _lose: descriptors may come with the last bytes that are received.
        self._channel.close()

    def _take(self, received: wire.Received) -> None:
        if not isinstance(received.message, _WITH_DESCRIPTORS):
            wire.close_all(received.fds)
        match received.message:
            case msg.Arena():
                self._on_arena(received.fds)
            case msg.Grant() as grant:
                self._on_grant(grant)
            case msg.Reached() as reached:
                self._on_reached(reached)
            case msg.Unreachable(save_id=save_id, error=error):
                save = self._saves.get(save_id)
                if save is not None:
                    save.handle._rule_out(from_wire(error))
            case msg.Failed(save_id=save_id, error=error):
                self._on_failed(save_id, error)
            case msg.DoorDone(save_id=save_id, error=error):
                with self._lock:
                    save = self._saves.pop(save_id, None)
                if save is not None:
                    save.handle._door_done(error)
            case msg.Settled(request_id=request_id, error=error):
                waiting = self._settles.get(request_id)
                if waiting is not None:
                    waiting.put(None if error is None else from_wire(error))
            case msg.Standby() as standby:
                self._on_standby(standby)
            case msg.ReadArena() | msg.Pieces() | msg.ReadDamaged() | msg.ReadRefused():
                self._on_read(received)
            case _:
                log.debug("ignored a %s of the agent", type(received.message).__name__)

    def _on_arena(self, fds: tuple[int, ...]) -> None:
        from groupio.client.arena import ClientArena

        if len(fds) != 1:
            wire.close_all(fds)
            raise AgentLost(f"the agent sent {len(fds)} descriptors for an arena instead of one")
        arena = ClientArena(fds[0])
        with self._lock:
            old, self._arena = self._arena, arena
            if self._lost is not None:
                old, self._arena = arena, None
        if old is not None:
            old.close()

    def _on_grant(self, grant: msg.Grant) -> None:
        save = self._saves.get(grant.save_id)
        if save is None or self._arena is None:
            # Nobody copies into this lease.
            self.send(msg.Released(grant.save_id))
        else:
            save.granted(grant, self._arena)

    def _on_reached(self, reached: msg.Reached) -> None:
        level = Level(reached.level)
        if reached.store_id:
            self._on_store(reached.store_id)
        with self._lock:
            save = self._saves.get(reached.save_id)
            if level is Level.DURABLE and save is not None and not save.handle._awaits_door():
                del self._saves[reached.save_id]
        if save is not None:
            save.note(reached.notes)
            save.handle._reach(
                level, reached.at, reached.first_arrival, reached.last_arrival, reached.notes
            )

    def _on_failed(self, save_id: int, error: dict[str, Any]) -> None:
        with self._lock:
            save = self._saves.pop(save_id, None)
        if error.get("kind") == AgentLost.__name__:
            # It ends soon and says so: the next call has to find, or start, its successor.
            self._is_draining = True
            if save is not None:
                self._on_lost([save.handle.epoch])
        if save is None:
            self.send(msg.Released(save_id))
        else:
            save.failed(error)

    def _on_read(self, received: wire.Received) -> None:
        with self._lock:
            news = self._reads.get(received.message.request_id)
            if news is not None:
                news.put((received.message, received.fds))
                return
        wire.close_all(received.fds)

    def _on_standby(self, standby: msg.Standby) -> None:
        if self._arena is None:
            return
        if self._standby is None:
            orders: queue.SimpleQueue[msg.Standby | None] = queue.SimpleQueue()
            mapper = threading.Thread(
                target=self._map_ahead, args=(orders,), name="groupio-map", daemon=True
            )
            try:
                start_some([mapper])
            except GroupIOError as error:
                log.info("memory is not mapped ahead of time: %s", error.message)
                return
            with self._lock:
                self._standby = orders
                if self._lost is not None:
                    orders.put(None)
        self._standby.put(standby)

    @nesting.thread
    def _map_ahead(self, orders: queue.SimpleQueue[msg.Standby | None]) -> None:
        while (order := orders.get()) is not None:
            arena = self._arena
            if arena is None:
                continue
            try:
                arena.prepare(order.offset, order.length)
                self.send(msg.Mapped(order.offset, order.length))
            except (GroupIOError, OSError) as error:
                # Only an advance: the save itself maps again and says what is wrong.
                log.info("mapping %d bytes ahead of time failed: %s", order.length, error)

    def _lose(self, why: str, own: GroupIOError | None = None) -> None:
        """End this connection, once; who waits for it is told (``own``: instead of AgentLost)."""
        with self._lock:
            if self._lost is not None:
                return
            self._lost = AgentLost(
                f"the agent (process {self.welcome.agent_pid}) {why}; its log is "
                f"{self.welcome.log}; the next call starts another one",
                log=self.welcome.log,
            )
            saves = list(self._saves.values())
            settles = list(self._settles.values())
            self._saves, arena, self._arena = {}, self._arena, None
            standby = self._standby
        self._channel.hang_up()
        blocked = [save.handle.epoch for save in saves if not save.is_handed_over]
        if blocked and own is None:
            self._on_lost(blocked)
        for save in saves:
            save.lost(own if own is not None else _again(self._lost))
        for waiting in settles:
            waiting.put(_again(self._lost))
        if standby is not None:
            standby.put(None)
        if arena is not None:
            arena.close()


def _introduce(
    settings: Settings, greet: Callable[[wire.Channel, float], None], deadline: float
) -> tuple[wire.Channel, Any]:
    """A channel to the node's agent, and what that answered to this client's Hello.

    An agent that ends, idle or killed, still takes connections for a moment: one that closes
    without an answer is looked for again, INTRODUCTIONS times in all.
    """
    for number in range(INTRODUCTIONS):
        channel = _dial(settings, deadline)
        try:
            with contextlib.suppress(wire.ChannelClosed):  # it may have said why it hung up
                greet(channel, max(deadline - time.monotonic(), 0.001))
            return channel, channel.recv(max(deadline - time.monotonic(), 0.001)).message
        except (TimeoutError, ConnectionError) as error:
            channel.close()
            ended = isinstance(error, wire.ChannelClosed)
            if not ended or number == INTRODUCTIONS - 1 or time.monotonic() >= deadline:
                raise _unreachable(settings, f"does not answer ({error})") from error
            time.sleep(_RETRY_S)
    raise AssertionError("the last try returns or raises")


def _dial(settings: Settings, deadline: float) -> wire.Channel:
    """A channel to the node's agent, which is started if none runs; AgentLost if it cannot be."""
    while True:
        try:
            path = spawn.ensure_agent(settings, max(deadline - time.monotonic(), 0.001))
            left = max(deadline - time.monotonic(), 0.001)
            return wire.Channel(wire.connect(path, timeout_s=left), msg.ToRank)
        except InvalidInput as error:
            # Whoever only reads needs no agent: this must not keep the client from connecting.
            raise AgentLost(f"no agent can be started here: {error.message}") from error
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError) as error:
            # It was idle and ended just now, or its queue is full.
            if time.monotonic() >= deadline:
                raise _unreachable(settings, "does not take connections") from error
            time.sleep(_RETRY_S)
        except TimeoutError as error:
            raise _unreachable(settings, "does not take connections") from error
        except OSError as error:
            if not is_exhaustion(error):
                raise _unreachable(settings, f"cannot be reached ({error})") from error
            raise AgentLost(f"the agent of this node cannot be reached: {why(error)}") from error


def _again(lost: AgentLost | None) -> AgentLost:
    """A copy of ``lost``: each handle and each caller gets its own."""
    copy = AgentLost("the agent is gone", outcome=Outcome.UNKNOWN)
    if lost is not None:
        copied = from_wire(to_wire(lost))
        assert isinstance(copied, AgentLost)
        return copied
    return copy


def _unreachable(settings: Settings, why: str) -> AgentLost:
    path = spawn.agent_paths(settings).log
    return AgentLost(f"the agent of this node {why}; look into {path}", log=str(path))
