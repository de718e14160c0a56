"""The calls of the public API. Heavy modules are imported by the first save or load that needs
them: connecting to a running agent takes milliseconds."""

from __future__ import annotations

import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from groupio.client import arguments, launch, living, nesting
from groupio.client.address import recorded_job, store_address
from groupio.client.again import Again
from groupio.client.connection import Connection
from groupio.client.failures import Failures
from groupio.client.foreground import Intervals, check_share, tell
from groupio.client.handle import SaveHandle, as_level, unreachable
from groupio.client.lineage import Origin
from groupio.client.nested_saves import NOTE, NestedSaves, Turn, no_copy
from groupio.controller.discover import Kind, Where, find_controller
from groupio.errors import (
    AgentLost,
    GroupIOError,
    InvalidInput,
    NotFound,
    Outcome,
    StagingFull,
    WaitTimeout,
    to_wire,
)
from groupio.model import WORLD_SIZE_MAX, EpochInfo, Level
from groupio.protocol import messages as msg
from groupio.settings import Settings, is_unicode

if TYPE_CHECKING:
    from groupio.client.loading import Request
    from groupio.client.outgoing import Outgoing, Packer
    from groupio.client.store_reader import StoreReader
    from groupio.wire import Channel

log = logging.getLogger("groupio.client")

NESTED_SETTLE_S = 2.0

_SETTLE_TRIES = 2
"""An agent that ends while it is asked is replaced this often."""


def connect(
    store: str | os.PathLike[str],
    *,
    job: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    controller: str | None = None,
    rewind_to: int | None = None,
    settings: Settings | None = None,
) -> Client:
    """A client of this rank for ``store``, a path or ``file://`` URL.

    ``job`` defaults to the one that the store belongs to, of a new store to the last part of its
    address; ``rank`` and ``world_size`` to those of the launcher (torchrun, Slurm, Open MPI), else
    0 of 1; ``settings`` to ``Settings.from_env()``.
    ``rewind_to=E`` abandons the epochs after E: ``load`` sees the line up to E, and the first
    save starts a new line there. Starts the node's agent if none runs. The store need not exist:
    the first save creates it. When no agent can be had the store can still be read, and saves
    fail with AgentLost on their handles.

    InvalidInput for a wrong argument, StorageError (ENOTDIR) when the store is a file.
    """
    return connected(unconnected(store, job, rank, world_size, controller, rewind_to, settings))


def connected(client: Client) -> Client:
    """``client``, after a try to connect it; InvalidInput when the agent refuses its arguments.

    A nested call leaves it to the first save.
    """
    if nesting.is_nested():
        return client
    try:
        client._connected()
    except InvalidInput:
        client.close()
        raise
    except GroupIOError as error:
        log.warning("%s can be read only: %s", client.store, error.message)
    return client


def unconnected(
    store: str | os.PathLike[str],
    job: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    controller: str | None = None,
    rewind_to: int | None = None,
    settings: Settings | None = None,
    launch_id: str | None = None,
) -> Client:
    """As :func:`connect`, but the connection is made by the first call that needs it.

    ``launch_id`` is what all ranks agreed on, where they did.
    """
    chosen = Settings.from_env() if settings is None else settings
    if not isinstance(chosen, Settings):
        raise InvalidInput(f"settings is of type {type(chosen).__name__}; give groupio.Settings")
    path = store_address(store)
    if job is not None and (not isinstance(job, str) or not 0 < len(job) <= 1000):
        raise InvalidInput(f"job={job!r} must be a name of 1 to 1000 characters")
    if job is not None and not is_unicode(job):
        raise InvalidInput(f"job={job!r} is not valid Unicode")
    place = launch.find_place(rank, world_size, os.environ)
    rewind = None if rewind_to is None else arguments.check_epoch(rewind_to, "rewind_to")
    name = job or recorded_job(path) or os.path.basename(path) or "root"
    said = controller if controller is not None else chosen.controller
    where = find_controller(said, os.environ)
    # Variables of a launcher say nothing of ranks that were numbered by hand.
    if launch_id is None and rank is None and world_size is None:
        launch_id = launch.launch_id(os.environ)
    return Client(path, name, place, rewind, chosen, where, launch_id)


class Client:
    """One rank's access to one store; made by :func:`groupio.connect`. Thread-safe.

    It belongs to the process that made it: after a fork the child connects anew. Usable as a
    context manager, which closes it.
    """

    def __init__(
        self,
        path: str,
        job: str,
        place: tuple[int, int],
        rewind_to: int | None,
        settings: Settings,
        where: Where,
        launch_id: str | None,
    ) -> None:
        """Use :func:`groupio.connect`."""
        self.store = path
        self._path = os.path.realpath(path)
        self._store_id = ""
        """The absolute path of the store."""
        self.job = job
        self.rank, self.world_size = place
        self.settings = settings
        self.skipped_epochs: list[tuple[int, str]] = []
        """Epochs that the last ``load(fallback=True)`` passed over, newest first, and why."""
        self.damaged_epochs: list[tuple[str, str]] = []
        """Records that the last ``epochs()`` could not read: their names, and why."""
        self._where = where
        self._rewind_to = self._rewind_parts_to = rewind_to
        self._launch_id = launch_id
        self._origin = Origin()
        self._parts: dict[str, Client] = {}
        self._has_saved = False
        self._pid = os.getpid()
        self._ids = itertools.count(1)
        self._closed = False
        self._again = Again(self._connected, others=self.world_size > 1)
        self._connecting = threading.Lock()
        self._connections: list[Connection] = []
        self._packer: Packer | None = None
        self._intervals = Intervals(lambda: self._connections)
        self._failures = Failures(self.rank, path)
        self._nested_saves = NestedSaves()
        self._is_closing = False
        self._closing = threading.Lock()
        nesting.prepare()
        living.add(self)

    def __repr__(self) -> str:
        who = f"rank {self.rank} of {self.world_size}, job {self.job!r}"
        if os.getpid() != self._pid:
            state = "of another process"
        elif self._closed:
            state = "closed"
        else:
            usable = [c for c in self._connections if c.is_usable]
            state = f"agent {usable[-1].welcome.agent_pid}" if usable else "without an agent"
        return f"<Client {self.store!r} {who}, {state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- saving ----------------------------------------------------------------------------------

    def save(
        self,
        items: Mapping[str, Any],
        *,
        epoch: int,
        deadline_s: float = 600.0,
        replicated: Iterable[str] = (),
        wait_for: str = "released",
        when_full: str = "wait",
        metadata: Mapping[str, Any] | None = None,
        part: str | None = None,
    ) -> SaveHandle:
        """Save this member's ``items`` as its part of ``epoch``; all members do the same.

        Returns when the values may be overwritten, or later: when ``wait_for`` is reached or the
        save failed. ``items`` maps names to buffers, numpy arrays, torch tensors of this process
        or plain values. ``replicated`` are names or glob patterns of items that are equal on all
        members that have them. ``deadline_s`` bounds the time from this call until the group is
        STAGED. ``when_full`` says what to do while there is no room in memory: wait, skip this
        epoch, or fail. ``metadata`` is a small dict kept with the epoch. ``part`` names a part of
        the epoch that is saved in a call of its own; each part is an atomic epoch by itself.

        Epochs grow along a lineage. When all members have loaded the same older epoch by its
        number, have saved nothing since, and save next an epoch that is not newer than the
        latest, a new lineage begins after the loaded one, if every other incarnation of the job
        has ended: a warning and a note in ``handle.times.notes`` name both. Members that differ
        get InvalidInput. Anything else that is too old is StaleEpoch.

        Only a wrong argument raises (InvalidInput; nothing is saved then). All else that goes
        wrong stands on the handle; nothing is durable before its ``durable`` time is set. An
        error that is not read there is logged, noted on the next handle, and summed up by close.
        """
        return self._part(part)._save(
            items,
            epoch=epoch,
            deadline_s=deadline_s,
            replicated=replicated,
            wait_for=wait_for,
            when_full=when_full,
            metadata=metadata,
        )

    def _part(self, part: str | None) -> Client:
        """The client of a part; this one for the unnamed part. InvalidInput for a bad name."""
        if part is None:
            return self
        nesting.imported("groupio.client.store_parts")
        from groupio.client.store_parts import PartStore, part_store

        self._check_usable("use a part")
        path = part_store(self._path, part)
        assert isinstance(path, PartStore)
        if part not in self._parts:
            # No lock: a signal handler may come, and save, at any time in here.
            place, rewind = (self.rank, self.world_size), self._rewind_parts_to
            job = recorded_job(path) or f"{self.job}/{part}"
            made = Client(
                str(path), job, place, rewind, self.settings, self._where, self._launch_id
            )
            if self._parts.setdefault(part, made) is not made:
                living.remove(made)
        return self._parts[part]

    @nesting.call
    def _save(self, items: Mapping[str, Any], **options: Any) -> SaveHandle:
        """As :meth:`save`; ``door`` asks for a view of the epoch in that format ("dcp").

        ``rewind_to`` begins a new line after that epoch; ``side`` is the API that was called.
        """
        self._check_usable("save")
        with self._nested_saves.turn(nested=nesting.is_nested()) as turn:
            nesting.imported("groupio.client.outgoing")
            nesting.imported("groupio.client.saving")
            return self._save_in_turn(items, turn, **options)

    def _save_in_turn(
        self,
        items: Mapping[str, Any],
        turn: Turn,
        *,
        epoch: int,
        deadline_s: float = 600.0,
        replicated: Iterable[str] = (),
        wait_for: str = "released",
        when_full: str = "wait",
        metadata: Mapping[str, Any] | None = None,
        door: str = "",
        called_at: float | None = None,
        rewind_to: int | None = None,
        side: str = "core",
    ) -> SaveHandle:
        called_at = called_at or time.monotonic()
        step = arguments.check_epoch(epoch)
        after = arguments.check_rewind(rewind_to, step)
        deadline_s = arguments.check_deadline(deadline_s)
        level = as_level(wait_for)
        arguments.check_when_full(when_full)
        kept = arguments.check_metadata(metadata)
        declared = arguments.check_patterns(replicated)

        def opening(outgoing: Outgoing) -> msg.OpenSave:
            return msg.OpenSave(
                save_id=next(self._ids),
                epoch=step,
                called_at=called_at,
                deadline_s=deadline_s,
                items=outgoing.table,
                items_id=outgoing.items_id,
                total_bytes=outgoing.layout.total_bytes,
                bytes_logical=outgoing.prepared.bytes_logical,
                replicated=declared,
                when_full=when_full,
                metadata=kept,
                door=door,
                resumed_from=self._origin.now(),
                begin_after=after,
                side=side,
            )

        handle = self._new_handle(step, called_at, door)
        deadline = called_at + deadline_s
        if turn.is_nested:
            self._save_nested(handle, opening, items, declared, deadline, turn)
            return handle
        handle._add_notes(self._failures.report())
        outgoing = self._pack(items, declared, opening, self._get_packer(), lambda work: work())
        self._failures.began(step)
        if level is Level.REPLICATED and handle._cannot is not None:
            handle._fail(unreachable(step, self.settings.replicas))
            return handle
        turn.wait()
        self._run(handle, opening(outgoing), outgoing, deadline, turn)
        if level is not Level.RELEASED:
            with suppress(GroupIOError):  # it stands on the handle, where the caller looks
                handle._wait(level)
        return handle

    def _new_handle(self, step: int, called_at: float, door: str) -> SaveHandle:
        handle = SaveHandle(
            step,
            called_at,
            self.settings.replicas,
            one_node=self._where.kind is Kind.LOCAL,
            failures=self._failures,
        )
        if door:
            handle._expect_door()
        return handle

    def _pack(
        self,
        items: Mapping[str, Any],
        declared: Iterable[str],
        opening: Callable[[Outgoing], msg.OpenSave],
        packer: Packer,
        run: Callable[[Callable[[], None]], object],
    ) -> Outgoing:
        """Prepare ``items``; ``run`` is given what tells the other members of an InvalidInput."""
        try:
            return packer.pack(items, declared)
        except InvalidInput as error:
            run(partial(self._withdraw, opening(packer.pack({}, ())), error))
            raise

    def _save_nested(
        self,
        handle: SaveHandle,
        opening: Callable[[Outgoing], msg.OpenSave],
        items: Mapping[str, Any],
        declared: Iterable[str],
        deadline: float,
        turn: Turn,
    ) -> None:
        """Copy the items of a call that interrupted another one, and save them in a thread."""
        from groupio.client.outgoing import Packer

        if any(connection.is_own_thread() for connection in self._connections):
            handle._listener = threading.current_thread()
        handle._hurry = turn.hurry
        outgoing = self._pack(items, declared, opening, Packer(), nesting.start)
        self._failures.began(handle.epoch)
        opened = opening(outgoing)
        try:
            self._nested_saves.add(handle, outgoing.layout.total_bytes)
            outgoing = outgoing.detached()
        except (StagingFull, MemoryError) as error:
            self._nested_saves.remove(handle)
            full = error if isinstance(error, StagingFull) else no_copy(opened)
            handle._fail(full)
            nesting.start(partial(self._withdraw, opened, full))
            return
        handle._reach(Level.RELEASED, time.monotonic(), notes=(NOTE,))
        turn.pass_on()
        nesting.start(partial(self._run_nested, handle, opened, outgoing, deadline, turn))

    @nesting.thread
    def _run_nested(
        self,
        handle: SaveHandle,
        opened: msg.OpenSave,
        outgoing: Outgoing,
        deadline: float,
        turn: Turn,
    ) -> None:
        try:
            turn.wait()
            self._run(handle, opened, outgoing, deadline, turn)
        finally:
            turn.over()
            self._nested_saves.remove(handle)

    def _run(
        self,
        handle: SaveHandle,
        opened: msg.OpenSave,
        outgoing: Outgoing,
        deadline: float,
        turn: Turn,
    ) -> None:
        from groupio.client.saving import Save

        try:
            connection = self._connected(deadline - time.monotonic())
            log_path = connection.welcome.log
            save = Save(opened.save_id, self.rank, handle, deadline, connection.send, log_path)
            if self._rewind_to is not None:
                # From the first commit on, this client follows the new line.
                handle.add_done_callback(Level.DURABLE, self._end_rewind)
            connection.add(save)
            self._origin.saving(handle)
            self._has_saved = True
        except GroupIOError as error:
            handle._fail(error.with_outcome(Outcome.NOT_COMMITTED))
            return
        save.run(opened, outgoing.prepared, outgoing.layout, turn.over)

    def _failed(self, epoch: int, called_at: float, error: GroupIOError) -> SaveHandle:
        """The handle of a save that failed before it could be begun."""
        handle = SaveHandle(
            arguments.check_epoch(epoch),
            called_at,
            self.settings.replicas,
            one_node=self._where.kind is Kind.LOCAL,
            failures=self._failures,
        )
        handle._add_notes(self._failures.report())
        self._failures.began(epoch)
        handle._fail(error.with_outcome(Outcome.NOT_COMMITTED))
        return handle

    def _end_rewind(self, handle: SaveHandle) -> None:
        if handle.outcome is Outcome.COMMITTED:
            self._rewind_to = None

    def _withdraw(self, opened: msg.OpenSave, error: GroupIOError) -> None:
        """Let the other members fail now, not at their deadline: this one will not come."""
        if self.world_size == 1:
            return
        try:
            connection = self._connected()
            connection.send(opened)
            connection.send(msg.SaveFailed(opened.save_id, to_wire(error)))
        except GroupIOError as lost:
            log.info("the group of epoch %d was not told: %s", opened.epoch, lost.message)

    def _get_packer(self) -> Packer:
        if self._packer is None:
            from groupio.client.outgoing import Packer

            self._packer = Packer()
        return self._packer

    # -- loading ---------------------------------------------------------------------------------

    def load(
        self,
        epoch: int | str = "latest",
        *,
        into: Mapping[str, Any] | None = None,
        names: Iterable[str] | None = None,
        member: int | None = None,
        deadline_s: float = 600.0,
        fallback: bool = False,
        parts: Iterable[str | None] | None = None,
    ) -> dict[str, Any]:
        """The items that ``member`` (this rank if None) saved in ``epoch``, in their order.

        Arrays own their memory (bf16 and fp8 have ml_dtypes' dtypes); bytes and plain values come
        back as they were. ``names`` picks items; ``into`` gives writable buffers, arrays or
        tensors of the same size and dtype for some of them, filled in place (undefined content
        after an error). "latest" first waits until epochs that an earlier incarnation staged are
        decided. Every chunk is verified before use. Waits for no other member.

        ``parts`` loads these parts (None: the unnamed one), each under its name, from the newest
        epoch that is committed in all of them; ``into`` maps parts likewise.

        NotFound: no such store, epoch, member or item. IntegrityError: damage, with path and
        chunk; with ``fallback`` the next older intact epoch is taken instead, and
        ``skipped_epochs`` says why. StorageError: the store cannot be read, or not within
        ``deadline_s``. WaitTimeout: staged epochs were not decided in time. InvalidInput: a
        wrong argument; no buffer was touched then.
        """
        self._check_usable("load")
        deadline = time.monotonic() + arguments.check_deadline(deadline_s)
        wanted = epoch if epoch == "latest" else arguments.check_epoch(epoch)
        rank = self.rank if member is None else member
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < WORLD_SIZE_MAX:
            raise InvalidInput(f"member={member!r} is not a rank")
        if into is not None and not isinstance(into, Mapping):
            raise InvalidInput(f"into is of type {type(into).__name__}; give a mapping of names")
        self.skipped_epochs = []
        nested = nesting.is_nested()
        nesting.imported("groupio.client.loading")
        from groupio.client.loading import Request

        if parts is not None:
            from groupio.client.store_parts import load_parts

            if names is not None:
                raise InvalidInput("names picks items of one part; leave it out with parts")
            return load_parts(
                self,
                parts,
                wanted,
                into=into,
                member=member,
                deadline=deadline,
                fallback=fallback,
            )
        if names is not None and not isinstance(names, str):
            names = list(names)
        request = Request(wanted, self._rewind_to, rank, names, into, deadline)
        return self._load(request, fallback, nested)

    @nesting.call
    def _load(self, request: Request, fallback: bool, nested: bool) -> dict[str, Any]:
        from groupio.client.loading import load_items

        if request.epoch == "latest":
            self._settle(request.deadline, nested)
        with self._open_reader() as reader:
            skipped = self.skipped_epochs if fallback else None
            return load_items(self, reader, request, skipped=skipped, by_agent=not nested)

    def _settle(self, deadline: float, nested: bool) -> None:
        """Wait until what earlier incarnations staged is decided, if an agent can be asked.

        A nested call has a thread ask, and waits NESTED_SETTLE_S at most: what is undecided may
        be the save that it interrupted.
        """
        if not os.path.isdir(self._path):
            return
        if not nested:
            self._ask_settled(deadline)
            return
        end = min(deadline, time.monotonic() + NESTED_SETTLE_S)
        asks = self
        if any(connection.is_own_thread() for connection in self._connections):
            place = (self.rank, self.world_size)
            rest = (self._rewind_to, self.settings, self._where, self._launch_id)
            asks = Client(self.store, self.job, place, *rest)
        answer: queue.SimpleQueue[None] = queue.SimpleQueue()

        def ask() -> None:
            try:
                asks._ask_settled(end, nested=True)
            except GroupIOError as error:
                log.info("loading what is committed in %s: %s", self.store, error.message)
            answer.put(None)
            if asks is not self:
                asks._close()

        nesting.start(ask)
        with suppress(queue.Empty):
            answer.get(timeout=max(end - time.monotonic(), 0.001))

    def _ask_settled(self, deadline: float, *, nested: bool = False) -> None:
        reason = "no agent could be asked"
        for _ in range(_SETTLE_TRIES):
            try:
                connection = self._connected(deadline - time.monotonic())
                left = deadline - time.monotonic()
                error = connection.settle(next(self._ids), left, nested=nested)
            except TimeoutError:
                raise WaitTimeout(
                    f"epochs that an earlier run staged in {self.store} were not decided in time; "
                    "load again, or load an epoch by its number"
                ) from None
            except InvalidInput:
                raise
            except GroupIOError as lost:
                reason = lost.message
                continue
            if error is not None:
                log.warning("loading what is committed in %s: %s", self.store, error.message)
            return
        log.warning("loading what is committed in %s: %s", self.store, reason)

    def _report_damage(self, digests: Sequence[bytes]) -> None:
        """Keep later saves from referring to these chunks; only a running agent has to know."""
        message = msg.Damaged(tuple(digests))
        # In a thread: this may be a nested call, and is nothing to wait for.
        nesting.start(lambda: tell(self._connections, message, "damaged chunks"))

    def epochs(self) -> list[EpochInfo]:
        """The committed epochs, ascending by epoch and lineage; none for a store not yet made.

        Epochs that a rewind abandoned are among them, marked ``abandoned``, and those of parts,
        which ``part`` names. Records that cannot be read are logged and stand in
        ``damaged_epochs``. StorageError when the store cannot be read.
        """
        self._check_usable("list epochs")
        nesting.imported("groupio.client.store_reader")
        nesting.imported("groupio.client.store_parts")
        from groupio.client.store_parts import part_store, parts_in
        from groupio.client.store_reader import StoreReader

        self.damaged_epochs, listed = [], []
        for part in (None, *parts_in(self._path)):
            try:
                if part is None:
                    reader = self._open_reader()
                else:
                    reader = StoreReader.open(part_store(self._path, part))
            except NotFound:
                continue
            with reader:
                listed += [replace(one, part=part) for one in reader.epochs()]
                self.damaged_epochs += reader.damaged
        return sorted(listed, key=lambda one: one.epoch)

    def foreground(self, share: float | None = None) -> AbstractContextManager[None]:
        """Within it storage traffic of this node keeps to ``share`` of its speed; 0 pauses it.

        For moments in which the job itself communicates. ``share`` defaults to
        ``settings.foreground_share``. Intervals may nest; of all ranks of the node the lowest
        share counts. A rank's end ends its intervals, and they do not count while this process
        itself waits for a load. After 10 s with hardly a gap storage goes on at full speed until
        there is one. InvalidInput for a wrong share.
        """
        chosen = self.settings.foreground_share if share is None else check_share(share)
        return self._intervals.interval(chosen)

    # -- life ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait until own saves are durable or failed, then leave the agent. Safe to repeat.

        The wait ends after ``settings.close_timeout_s`` (120 s): what is STAGED by then is
        finished by the agent, and its handles get WaitTimeout. The interpreter's exit does the
        same for clients that are still open. Inside another call of groupio, in a signal handler
        or callback, it returns at once, and the client is closed when that call is over.
        """
        if os.getpid() != self._pid:
            return
        if nesting.is_nested():
            self._is_closing = True
            nesting.start_after_call(self._close, self.settings.close_timeout_s)
        else:
            self._close()

    @nesting.call
    def _close(self) -> None:
        with self._closing:
            if not self._closed:
                self._close_once()

    def _close_once(self) -> None:
        self._is_closing = True
        for part in list(self._parts.values()):
            part._close()
        end = time.monotonic() + self.settings.close_timeout_s
        for handle in self._nested_saves.handles():
            try:
                handle._wait(Level.DURABLE, max(end - time.monotonic(), 0.0))
            except GroupIOError:
                pass  # it stands on the handle
        with self._connecting:
            self._closed = True
        for connection in self._connections:
            for save in connection.saves():
                try:
                    save.handle._wait(Level.DURABLE, max(end - time.monotonic(), 0.0))
                except GroupIOError:
                    pass  # it stands on the handle
            connection.close(
                WaitTimeout(
                    f"the client of rank {self.rank} was closed before its save was decided; what "
                    "is staged is finished without it, look with epochs()",
                    level=str(Level.DURABLE),
                )
            )
        self._connections = []
        living.remove(self)
        self._failures.close()

    @nesting.call
    def _leave_if_idle(self) -> bool:
        """Leave the agent unless something is under way; the next call connects again."""
        if not self._connecting.acquire(blocking=False):
            return False
        try:
            is_busy = any(connection.is_busy for connection in self._connections)
            if is_busy or self._nested_saves.handles():
                return False
            idle, self._connections = self._connections, []
        finally:
            self._connecting.release()
        for connection in idle:
            connection.close(AgentLost("the client left the agent meanwhile; call again"))
        living.remove(self)
        return True

    @nesting.call
    def _connected(self, timeout_s: float | None = None) -> Connection:
        """The connection to the agent, made anew when there is none; AgentLost if it cannot be."""
        limit = self.settings.connect_timeout_s
        limit = limit if timeout_s is None else max(min(limit, timeout_s), 0.001)
        if not self._connecting.acquire(timeout=2 * limit):
            raise AgentLost(f"another thread kept connecting to the agent for {2 * limit:.0f} s")
        try:
            if self._closed:
                raise InvalidInput("this client was closed; connect again")
            if self._connections and self._connections[-1].is_usable:
                return self._connections[-1]
            self._connections = [c for c in self._connections if c.saves()]
            connection = Connection.open(
                self.settings, self._greet, limit, self._again.lost, self._note_store
            )
            self._connections.append(connection)
            living.add(self)
            self._intervals.greet(connection)
            return connection
        finally:
            self._connecting.release()

    def _greet(self, channel: Channel, timeout_s: float) -> None:
        """Say who this client is, and show which directory it means by its path."""
        from groupio.backend.place import open_place
        from groupio.wire import close_all

        try:
            directory, rest = open_place(self._path)
        except OSError:
            # Where it cannot even be looked at, there is nothing to mix up.
            channel.send(self._hello(), timeout_s=timeout_s)
            return
        try:
            channel.send(self._hello(rest), (directory,), timeout_s=timeout_s)
        finally:
            close_all((directory,))

    def _hello(self, rest: str = "") -> msg.Hello:
        return msg.Hello(
            version=msg.PROTOCOL_VERSION,
            client_id=os.urandom(16).hex(),
            pid=os.getpid(),
            rank=self.rank,
            world_size=self.world_size,
            store=self._path,
            job=self.job,
            rewind_to=self._rewind_to,
            launch_id=self._launch_id,
            file_mode=self.settings.file_mode,
            umask=_umask(),
            replicas=self.settings.replicas,
            controller=self._where.address or str(self._where.kind),
            said=self._where.is_said,
            hosts=self._where.is_here,
            gave_up=self._again.epochs,
            has_saved=self._has_saved,
            store_id=self._store_id,
            rest=rest,
        )

    def _note_store(self, store_id: str) -> None:
        """This is the store (hex) that the client uses, unless it has used one already."""
        self._store_id = self._store_id or store_id

    def _open_reader(self) -> StoreReader:
        """The store to read from, which is the one that this client has used before.

        NotFound when there is none, StorageError when it is gone or another one is in its place.
        """
        from groupio.client.store_reader import StoreReader
        from groupio.protocol import reasons

        try:
            reader = StoreReader.open(self._path)
        except NotFound as error:
            if self._store_id:
                raise reasons.store_gone(self._path) from error
            raise
        now = reader.backend.store_record().store_id
        self._note_store(now)
        if now != self._store_id:
            reader.close()
            raise reasons.other_store(self._path, now, self._store_id)
        return reader

    def _check_usable(self, what: str) -> None:
        if os.getpid() != self._pid:
            raise InvalidInput(
                f"cannot {what}: this client belongs to process {self._pid}, which forked this "
                "one; call groupio.connect in this process"
            )
        if self._closed or self._is_closing:
            raise InvalidInput(f"cannot {what}: this client was closed; connect again")

    def _abandon_in_child(self) -> None:
        self._connecting = threading.Lock()
        self._closing = threading.Lock()
        for connection in self._connections:
            connection.abandon_in_child()


def _umask() -> int | None:
    """This process's umask; None where it cannot be read without changing it for a moment."""
    try:
        with open("/proc/self/status", encoding="utf-8", errors="replace") as status:
            return next((int(line[6:], 8) for line in status if line.startswith("Umask:")), None)
    except (OSError, ValueError):
        return None
