"""What only the fabric over a Mooncake Transfer Engine can get wrong, with a real engine."""

from __future__ import annotations

import builtins
import functools
import os
import socket

import pytest

pytest.importorskip("mooncake.engine", reason="peer not installed: mooncake", exc_type=ImportError)

from groupio.errors import InvalidInput
from groupio.fabric import mooncake as fabric_module
from groupio.fabric import mooncake_engine
from groupio.fabric.base import DIGEST, GONE, LOST, REFUSED
from groupio.fabric.mooncake import MooncakeFabric
from groupio.fabric.mooncake_engine import Engine, slots_of
from groupio.fabric.open import fabric_bytes, open_fabric
from groupio.fabric.tcp import TcpFabric
from groupio.settings import Settings
from groupio.testing.fabric_suite import JOB, MIB, TOKEN, Holdings, eventually, soon, want


@functools.cache
def shared_engine() -> Engine:
    """One engine for most tests of this process: to end one takes a second."""
    return Engine("127.0.0.1")


def mooncake(**options: object) -> MooncakeFabric:
    """A fabric of the suite's job, on the shared engine."""
    return MooncakeFabric(token=TOKEN, engine=shared_engine(), **options)  # type: ignore[arg-type]


def test_fabrics_with_engines_of_their_own_leave_nothing() -> None:
    def once() -> None:
        holdings = Holdings()
        wants = [want(holdings.put(os.urandom(MIB)), MIB) for _ in range(8)]
        with MooncakeFabric(token=TOKEN) as serving, MooncakeFabric(token=TOKEN) as fabric:
            address = serving.serve(holdings)
            assert all(o.ok for o in fabric.pull(address, JOB, wants, deadline=soon()))

    once()
    fds, threads = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    once()
    assert len(os.listdir("/proc/self/fd")) <= fds
    assert len(os.listdir("/proc/self/task")) <= threads


def test_small_chunks_share_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    holdings, sizes = Holdings(), []
    wants = [want(holdings.put(index.to_bytes(8, "little") * 512), 4096) for index in range(400)]
    fetched = Engine.fetched

    def counted(self: Engine, session: str, address: int, nbytes: int, *rest: object) -> object:
        sizes.append(nbytes)
        return fetched(self, session, address, nbytes, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Engine, "fetched", counted)
    with mooncake() as serving, mooncake() as fabric:
        outcomes = fabric.pull(serving.serve(holdings), JOB, wants, deadline=soon())
    assert all(outcome.ok for outcome in outcomes)
    assert sum(sizes) == 400 * 4096
    assert len(sizes) <= 4


def test_bytes_that_a_stranger_changed_in_the_window_are_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    holdings, chunk = Holdings(), os.urandom(MIB)
    digest = holdings.put(chunk)
    wants = [want(digest, MIB), want(digest, 1000, 5, whole=False)]
    submit = Engine._submit

    def changed(self: Engine, session: str, address: int, *rest: object) -> int:
        for slot in shared_slots:
            if slot.address == address:
                slot.view[7] ^= 1
        return submit(self, session, address, *rest)  # type: ignore[arg-type]

    shared_slots = list(shared_engine().serving._free)
    monkeypatch.setattr(Engine, "_submit", changed)
    with mooncake() as serving, mooncake() as fabric:
        address = serving.serve(holdings)
        for one in wants:
            assert fabric.pull(address, JOB, [one], deadline=soon())[0].error == DIGEST


def test_slot_of_an_abandoned_transfer_is_used_again_only_after_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = shared_engine()
    source = engine.serving.take(soon(), lambda: False)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_engine", _Unfinished(engine._engine))
        free = len(engine._receiving._free)
        with (
            pytest.raises(TimeoutError),
            engine.fetched(engine.session, source.address, 100, soon(0.1), lambda: False),
        ):
            pass
        engine._collect()
        assert len(engine._receiving._free) == free - 1
    with engine.fetched(engine.session, source.address, 100, soon(), lambda: False) as view:
        assert view == source.view[:100]
    assert len(engine._receiving._free) == free
    engine.serving.give(source)


class _Unfinished:
    """An engine whose transfers seem to go on for ever."""

    def __init__(self, engine: object) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> object:
        if name == "transfer_check_status":
            return lambda batch: 0
        return getattr(self._engine, name)


def test_slot_that_was_used_again_makes_no_liar(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection breaks while the engine reads: the peer uses its slot for something else."""
    holdings, chunk = Holdings(), os.urandom(MIB)
    one = want(holdings.put(chunk), MIB)
    slots, fetched = shared_engine().serving, Engine.fetched
    free = len(slots._free)

    def late(self: Engine, session: str, address: int, *rest: object) -> object:
        assert serving._server is not None
        for stream in list(serving._server._streams):
            stream.shut()
        eventually(lambda: len(slots._free) == free)
        for slot in slots._free:
            slot.view[:MIB] = bytes(MIB)
        return fetched(self, session, address, *rest)  # type: ignore[arg-type]

    with mooncake() as serving, mooncake() as fabric:
        address = serving.serve(holdings)
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "fetched", late)
            assert fabric.pull(address, JOB, [one], deadline=soon())[0].error == GONE
        assert fabric.pull(address, JOB, [one], deadline=soon())[0].ok


def test_window_is_a_small_part_of_the_budget() -> None:
    sizes = [mooncake_engine.window_bytes(slots_of(n << 20)) >> 20 for n in (16, 64, 512, 1 << 20)]
    assert sizes == [8, 8, 32, 64]


def test_engine_that_cannot_be_reached_or_has_not_the_bytes_is_lost() -> None:
    engine = shared_engine()
    free = len(engine._receiving._free)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    for session, address in ((f"127.0.0.1:{port}", 4096), (engine.session, 4096)):
        with (
            pytest.raises(ConnectionError),
            engine.fetched(session, address, 100, soon(), lambda: False),
        ):
            pass
    assert len(engine._receiving._free) == free


def test_engine_that_hangs_while_a_peer_is_opened_hits_the_deadline() -> None:
    engine = shared_engine()
    free = len(engine._receiving._free)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        name = f"127.0.0.1:{silent.getsockname()[1]}"
        for _ in range(2):
            with (
                pytest.raises(TimeoutError),
                engine.fetched(name, 4096, 100, soon(0.2), lambda: False),
            ):
                pass
    eventually(lambda: len(engine._receiving._free) + len(engine._abandoned) == free)
    engine._collect()
    assert len(engine._receiving._free) == free


def test_peers_with_another_fabric_are_refused() -> None:
    holdings = Holdings()
    one = want(holdings.put(b"12345678"), 8)
    with mooncake() as serving, TcpFabric(token=TOKEN) as tcp, mooncake() as fabric:
        address = serving.serve(holdings)
        with pytest.raises(InvalidInput, match="GROUPIO_FABRIC"):
            fabric.pull(tcp.serve(holdings), JOB, [one], deadline=soon(5))
        plain = "tcp://" + address.removeprefix("mooncake://")
        assert tcp.pull(plain, JOB, [one], deadline=soon(5))[0].error == REFUSED
    assert holdings.asked == []


def test_liar_never_writes_past_a_want(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = memoryview(bytearray(b"\xee" * 24))
    chunk = b"12345678"
    holdings = Holdings()
    one = want(holdings.put(chunk), 8)._replace(into=memory[8:16])
    good = fabric_module._ROW

    class Rows:
        """Packs rows with other lengths and tags than asked for."""

        size = good.size
        unpack = good.unpack

        def __init__(self, tag: int, length: int) -> None:
            self._tag, self._length = tag, length

        def pack(self, status: int, tag: int, length: int, digest: bytes) -> bytes:
            return good.pack(status, tag + self._tag, length + self._length, digest)

    with mooncake() as serving, mooncake() as fabric:
        address = serving.serve(holdings)
        for tag, length in ((1, 0), (0, 1), (0, 4_000_000)):
            monkeypatch.setattr(fabric_module, "_ROW", Rows(tag, length))
            assert fabric.pull(address, JOB, [one], deadline=soon(5))[0].error == LOST
        monkeypatch.setattr(fabric_module, "_ROW", good)
        assert bytes(memory) == b"\xee" * 24
        assert fabric.pull(address, JOB, [one], deadline=soon(5))[0].ok
    assert bytes(memory[8:16]) == chunk


def test_settings_choose_it() -> None:
    settings = Settings(fabric="mooncake", fabric_bytes_per_s=1e9)
    budget = 300 * MIB
    with open_fabric(settings, "127.0.0.1", "127.0.0.1", TOKEN, budget) as fabric:
        assert fabric.name == "mooncake"
        assert isinstance(fabric, MooncakeFabric)
        assert len(fabric._engine._window) == fabric_bytes(settings, budget) == 16 * MIB
        assert fabric.pace.rate == 1e9
        assert fabric.serve(Holdings()).startswith("mooncake://127.0.0.1:")


def test_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str, *rest: object, **more: object) -> object:
        if name == "mooncake.engine":
            raise ImportError("libibverbs.so.1: cannot open shared object file")
        return found(name, *rest, **more)  # type: ignore[arg-type]

    found = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", broken)
    with pytest.raises(InvalidInput, match=r"libibverbs\.so\.1.*apt-get install"):
        mooncake_engine._new_engine("127.0.0.1")
