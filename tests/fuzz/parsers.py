"""Every parser of what others wrote or send, fed with inputs whose digests are right.

``python parsers.py COUNT SEED`` prints a report as JSON; COUNT inputs are shared out evenly. Only
errors of groupio may come out (of sockets: what ends the connection), in bounded time and, by the
limit of this process's address space, in bounded memory.
"""

from __future__ import annotations

import contextlib
import json
import random
import resource
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
from blake3 import blake3
from msgspec import inspect
from mutations import Inventor, flipped, mutated

from groupio.client import shared_messages
from groupio.client.parts import Catalogue
from groupio.controller import messages as cm
from groupio.controller.keys import Keys
from groupio.door.record import DoorFileRow, decode_record, encode_record
from groupio.errors import GroupIOError
from groupio.fabric import frames
from groupio.fabric.auth import _HELLO, MAGIC, prove_server
from groupio.fabric.serving import Server
from groupio.format import records
from groupio.format.catalogue import Entry, decode_catalogue, encode_catalogue
from groupio.format.codec import decode_plain, encode_plain
from groupio.format.columns import Section, pack_array, pack_bytes
from groupio.format.envelope import HEADER_BYTES, RecordKind, wrap
from groupio.format.frames import LOCAL_HEADER, FrameTable, Kind
from groupio.format.items import decode_items, encode_items, items_id
from groupio.format.manifest import ManifestReader, encode_manifest
from groupio.format.segment import (
    SegmentHeader,
    SegmentReader,
    encode_footer,
    encode_header,
)
from groupio.model import (
    ChunkTable,
    DecisionKey,
    EpochHeader,
    ItemKind,
    ItemSpec,
    Lineage,
    Manifest,
    MemberTable,
    NodeReport,
    SegmentRef,
)
from groupio.protocol import messages as msg
from groupio.protocol.arrayform import ArrayForm
from groupio.protocol.linkframe import Frame, decode_frame
from groupio.protocol.wireform import WireForm
from groupio.wire import Channel

KEY = DecisionKey(1, 5, 0)
STORE = "00112233445566778899aabbccddeeff"
SECTIONS_AT = 18
SECONDS_MAX = 5.0
"""No single input may take longer, on a machine that has other things to do."""

ADDRESS_SPACE_BYTES = 3 << 30

Parse = Callable[[bytes], object]
Make = Callable[[random.Random], bytes]


@dataclass
class Target:
    """A parser: where inputs come from, who takes them, and the errors that it may raise."""

    make: Make
    parse: Parse
    errors: tuple[type[BaseException], ...] = (GroupIOError,)


@dataclass
class Report:
    """What a run found; ``escaped`` are errors that should not have come out."""

    inputs: int = 0
    accepted: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    slowest: str = ""
    escaped: dict[str, str] = field(default_factory=dict)


# -- records of a store ------------------------------------------------------------------------


def _record(sample: bytes, kind: RecordKind, parse: Callable[[bytes, str], object]) -> Target:
    root = msgspec.msgpack.decode(sample[HEADER_BYTES:])

    def make(chance: random.Random) -> bytes:
        return wrap(kind, msgspec.msgpack.encode(mutated(chance, root)))

    return Target(make, lambda data: parse(data, "record"))


def _json(sample: bytes, seal: Callable[[dict[str, Any]], str], parse: Parse) -> Target:
    content, is_pretty = json.loads(sample), sample.startswith(b"{\n")

    def make(chance: random.Random) -> bytes:
        changed = mutated(chance, content)
        if isinstance(changed, dict):
            changed["check"] = seal(changed)
        data = _as_json(changed)
        with contextlib.suppress(msgspec.MsgspecError, UnicodeError):
            # In the one spelling that is taken.
            data = msgspec.json.encode(msgspec.json.decode(data))
            data = (msgspec.json.format(data, indent=1) if is_pretty else data) + b"\n"
        return data if chance.random() < 0.9 else flipped(chance, data)

    return Target(make, parse)


def _as_json(value: Any) -> bytes:
    return json.dumps(value, default=lambda other: repr(other)[:80]).encode()


def _store_seal(content: dict[str, Any]) -> str:
    names = ("store_id", "job", "format", "created_at")
    plain = [content.get(name) for name in names]
    return blake3(msgspec.msgpack.encode(json.loads(_as_json(plain)))).hexdigest()


def _door_seal(content: dict[str, Any]) -> str:
    try:
        rest = {k: v for k, v in json.loads(_as_json(content)).items() if k != "check"}
        return blake3(msgspec.json.encode(rest)).hexdigest()
    except ValueError:
        return "0" * 64


def _items(rank: int) -> tuple[ItemSpec, ...]:
    shape, whole = (2, 3), (4, 3)
    return (
        ItemSpec("weight", ItemKind.TENSOR, "float32", shape, whole, (2 * rank, 0), 24),
        ItemSpec("step", ItemKind.PLAIN, "", (), (), (), 10, replicated=True, origin="plain"),
        ItemSpec("again", ItemKind.PLAIN, "", (), (), (), 10, True, "plain", 1),
    )


def _header(**fields: Any) -> EpochHeader:
    plain: dict[str, Any] = {
        "store_id": STORE,
        "job": "job",
        "lineage": KEY.lineage,
        "epoch": KEY.epoch,
        "attempt": KEY.attempt,
        "incarnation": 2,
        "world_size": 2,
        "fingerprint": bytes(32),
        "content_id": bytes(32),
        "write_id": "w",
        "created_at": 1.5,
        "bytes_logical": 68,
        "bytes_unique": 58,
        "bytes_stored": 20480,
        "metadata": {"loss": 0.5},
        "replicated": ("step*",),
    }
    return EpochHeader(**(plain | fields))


def sample_manifest() -> Manifest:
    """Two members with a replica, in an own and an older segment."""
    members = []
    for rank in range(2):
        items = _items(rank)
        refs = np.array([0, rank + 1], np.int64)
        members.append(MemberTable(rank, items, items_id(encode_items(items)), refs, 34))
    chunks = ChunkTable(
        np.array([list(blake3(bytes([i])).digest()) for i in range(3)], np.uint8),
        np.array([10, 24, 24], np.int64),
        np.array([1, 0, 0], np.int32),
        np.array([4096, 4096, 4160], np.int64),
    )
    own = SegmentRef(records.segment_name(KEY, "node0", 0), 20480, True)
    old = SegmentRef(records.segment_name(DecisionKey(1, 4, 0), "node0", 0), 8192, False, 3)
    return Manifest(_header(), (own, old), chunks, tuple(members))


def _manifest() -> Target:
    data = encode_manifest(sample_manifest())
    at = HEADER_BYTES + int.from_bytes(data[12:16], "little")
    root = msgspec.msgpack.decode(data[HEADER_BYTES:at])
    sections: list[tuple[Section, bytes]] = []
    for row in [Section(*row) for row in root[SECTIONS_AT]]:
        sections.append((row, data[at : at + row.stored]))
        at += row.stored
    blocks = [Section(*row) for row in _unpacked(sections[6])]
    bodies = []
    for block in blocks:
        bodies.append((block, data[at : at + block.stored]))
        at += block.stored

    def make(chance: random.Random) -> bytes:
        parts, ends = list(sections), list(bodies)
        new = list(root)
        match chance.randrange(6):
            case 0 | 1:
                new = mutated(chance, root)
            case 2 | 3:
                which = chance.randrange(6)
                parts[which] = _resealed(chance, parts[which], packed=which == 0)
            case 4:
                which = chance.randrange(len(ends))
                ends[which] = _resealed(chance, ends[which])
            case _:
                rows = [list(msgspec.to_builtins(row)) for row in blocks]
                parts[6] = pack_bytes(msgspec.msgpack.encode(mutated(chance, rows)))
        if ends != bodies:
            parts[6] = pack_bytes(msgspec.msgpack.encode([section for section, _ in ends]))
        if isinstance(new, list) and new[SECTIONS_AT:][:1] == root[SECTIONS_AT:][:1]:
            new[SECTIONS_AT] = [section for section, _ in parts]
        body = [stored for _, stored in parts + ends]
        return wrap(RecordKind.COMMIT, msgspec.msgpack.encode(new), body)

    def parse(data: bytes) -> object:
        reader = ManifestReader(lambda at, n: data[at : at + n], len(data), "manifest")
        _ = reader.header, reader.segments, reader.chunks
        shown = Catalogue(reader, 0)
        for name in ("weight", "step"):
            for saved in shown.everyone(name).saved:
                shown.rows(saved)
        list(reader.tables())
        reader.verify_structure()
        return reader

    return Target(make, parse)


def _unpacked(part: tuple[Section, bytes]) -> Any:
    section, stored = part
    import zlib

    return msgspec.msgpack.decode(stored if section.encoding == 0 else zlib.decompress(stored))


def _resealed(
    chance: random.Random, part: tuple[Section, bytes], *, packed: bool = False
) -> tuple[Section, bytes]:
    """Another content under its own digest, or another description of it."""
    section, stored = part
    if packed and chance.random() < 0.7:
        return pack_bytes(msgspec.msgpack.encode(mutated(chance, _unpacked(part))))
    if chance.random() < 0.3:
        change = chance.choice(("raw", "stored", "encoding"))
        number = chance.choice((0, 1, 2, 3, 8, 1 << 30, (1 << 63) - 1))
        return msgspec.structs.replace(section, **{change: number}), stored
    if section.encoding == 0 and len(stored) % 8 == 0 and chance.random() < 0.5:
        numbers = np.frombuffer(stored, "<i8").copy()
        if len(numbers):
            numbers[chance.randrange(len(numbers))] = chance.choice(
                (0, 1, -1, 2, 1 << 31, (1 << 63) - 1, -(1 << 63))
            )
        return pack_array(numbers)
    changed = flipped(chance, stored)
    raw = len(changed) if section.encoding == 0 else section.raw
    return Section(len(changed), raw, section.encoding, blake3(changed).digest()), changed


def _catalogue() -> Target:
    entries = [
        Entry.of(DecisionKey(1, epoch, 0), epoch, _header(epoch=epoch) if epoch % 3 else None)
        for epoch in range(5)
    ]
    data = encode_catalogue(STORE, entries)
    at = HEADER_BYTES + int.from_bytes(data[12:16], "little")
    root = msgspec.msgpack.decode(data[HEADER_BYTES:at])
    rows = _unpacked((Section(*root[2]), data[at:]))

    def make(chance: random.Random) -> bytes:
        new, part = list(root), (Section(*root[2]), data[at:])
        if chance.random() < 0.7:
            changed = mutated(chance, rows)
            part = pack_bytes(msgspec.msgpack.encode(changed))
            new[1] = len(changed) if isinstance(changed, list) else 0
            new[2] = part[0]
        else:
            new = mutated(chance, root)
        return wrap(RecordKind.CATALOGUE, msgspec.msgpack.encode(new), [part[1]])

    def parse(data: bytes) -> object:
        found = decode_catalogue(data, STORE, "catalogue")
        return [e.header(STORE, "catalogue") for e in found if e.content is not None]

    return Target(make, parse)


# -- segments ----------------------------------------------------------------------------------


def _segment(*, framed: bool) -> Target:
    header = SegmentHeader(STORE, KEY, "node0", 3, framed=framed)
    body = bytearray(encode_header(header))
    chunks = [b"a" * 16, b"b" * 16, b"c" * 4]
    offsets = []
    if framed:
        body += bytes(4000) + LOCAL_HEADER
    run = len(body)
    for chunk in chunks:
        offsets.append(len(body))
        body += chunk
    body += bytes(-len(body) % 4096)
    table = None
    if framed:
        skips = [at - run for at in offsets]
        kinds = tuple(Kind("uint8", (36 - skip,), skip, 36) for skip in skips)
        table = FrameTable(np.array(offsets), np.full(3, run), np.arange(3, dtype=np.int32), kinds)
    digests = np.array([list(blake3(chunk).digest()) for chunk in chunks], np.uint8)
    lengths = np.array([len(chunk) for chunk in chunks])
    footer = encode_footer(np.array(offsets), lengths, digests, len(body), table)
    whole = bytes(body) + footer
    _, length, _, _ = struct.unpack("<8sQQ32s", whole[-64:-8])
    index_at = len(whole) - 64 - length
    count, described = struct.unpack_from("<QI", whole, index_at)
    rows_at = index_at + 12
    rows = msgspec.msgpack.decode(whole[rows_at : rows_at + described])
    data_at = rows_at + described

    def make(chance: random.Random) -> bytes:
        front, index = whole[:index_at], whole[index_at:-64]
        match chance.randrange(4):
            case 0:
                fixed = flipped(chance, whole[:112])[:112].ljust(112, b"\0")
                front = (fixed + blake3(fixed).digest()).ljust(4096, b"\0") + front[4096:]
            case 1:
                packed = msgspec.msgpack.encode(mutated(chance, rows))
                many = chance.choice((count, count, 0, 1 << 26, (1 << 64) - 1))
                index = struct.pack("<QI", many, len(packed)) + packed + whole[data_at:-64]
            case 2:
                sections = [Section(*row) for row in rows]
                parts, at = [], data_at
                for section in sections:
                    parts.append((section, whole[at : at + section.stored]))
                    at += 0 if section is sections[-1] and framed else section.stored
                which = chance.randrange(min(len(parts), 7))
                parts[which] = _resealed(chance, parts[which], packed=which == 6)
                packed = msgspec.msgpack.encode([section for section, _ in parts])
                inside = parts[:-1] if framed else parts
                stored = b"".join(stored for _, stored in inside)
                index = struct.pack("<QI", count, len(packed)) + packed + stored
            case _:
                index = flipped(chance, index)
        size = len(front) + len(index) + 64
        said = chance.choice((len(index),) * 8 + (0, 1, size, 1 << 40, (1 << 64) - 1))
        fixed = struct.pack("<8sQQ32s", b"GRPIOIDX", said, size, blake3(index).digest())
        return front + index + fixed + blake3(fixed).digest(8)

    def parse(data: bytes) -> object:
        reader = SegmentReader(lambda at, n: data[at : at + n], len(data), "segment")
        reader.verify_structure()
        return list(reader.find_damage())

    return Target(make, parse)


# -- values and item tables ---------------------------------------------------------------------


def _plain() -> Target:
    value = {
        "lr": 1e-3,
        "betas": (0.9, float("inf")),
        3: None,
        "big": 1 << 200,
        "mask": np.arange(3, dtype=np.int16),
        "raw": b"xyz",
        "c": 1 + 2j,
        "list": [True, "text", np.float32(1.5)],
    }
    data = encode_plain(value)
    return Target(lambda chance: flipped(chance, data), decode_plain)


def _item_table() -> Target:
    data = encode_items(_items(1))
    return Target(lambda chance: flipped(chance, data), lambda data: decode_items(data))


def _keys(path: str) -> Target:
    import os

    keys = Keys.make()
    keys.save(path)
    with open(path, "rb") as file:
        sample = file.read()

    def parse(data: bytes) -> object:
        fd = os.open(path, os.O_WRONLY | os.O_TRUNC)
        os.write(fd, data)
        os.close(fd)
        return Keys.load(path)

    return Target(lambda chance: flipped(chance, sample), parse)


# -- sockets and the fabric ---------------------------------------------------------------------


def _invented(kind: Any) -> Callable[[random.Random], Any]:
    shape = inspect.type_info(kind)
    whole = sample_manifest()
    members = tuple(replace(member, items=()) for member in whole.members)
    report = NodeReport("node0", whole.segments, whole.chunks, members)
    packed = msgspec.msgpack.encode(report, enc_hook=ArrayForm(1 << 20).encode)
    samples = {NodeReport: msgspec.msgpack.decode(packed)}

    def invent(chance: random.Random) -> Any:
        made = Inventor(chance, samples).make(shape)
        return mutated(chance, made) if chance.random() < 0.7 else made

    return invent


def _channel(kind: Any) -> Target:
    """What a Unix socket receives, by the channel itself."""
    invent = _invented(kind)

    def make(chance: random.Random) -> bytes:
        body = msgspec.msgpack.encode(invent(chance))
        if chance.random() < 0.1:
            body = flipped(chance, body)
        fds = chance.choice((0,) * 12 + (1, 15))
        length = chance.choice((len(body),) * 12 + (0, 1, (1 << 28) - 1))
        return struct.pack("<I", length | fds << 28) + body

    def parse(data: bytes) -> object:
        ours, theirs = socket.socketpair()
        channel = Channel(ours, kind)
        try:
            theirs.setblocking(False)
            theirs.send(data)
            theirs.close()
            return channel.feed()
        finally:
            theirs.close()
            channel.close()

    return Target(make, parse, (ConnectionError,))


def _wire(types: Any) -> Target:
    """What goes between nodes, with a consistent report in it now and then."""
    form = WireForm(types)
    invents = [_invented(kind) for kind in types]
    tables = [msgspec.msgpack.encode(_items(rank)) for rank in range(2)]

    def make(chance: random.Random) -> bytes:
        body = chance.choice(invents)(chance)
        table = [one if chance.random() < 0.8 else flipped(chance, one) for one in tables]
        which = [0, 1] * 4
        if chance.random() < 0.2:
            which = [chance.choice((0, 1, 2, -1)) for _ in range(chance.choice((0, 1, 4)))]
        raw = msgspec.Raw(msgspec.msgpack.encode(body))
        data = msgspec.msgpack.encode([table, which, raw])
        return data if chance.random() < 0.9 else flipped(chance, data)

    return Target(make, form.decode)


def _link_frame() -> Target:
    invent = _invented(Frame)
    return Target(lambda chance: msgspec.msgpack.encode(invent(chance)), decode_frame)


class _Peer:
    """A connection that sends ``data`` and then goes, as the fabric sees it."""

    patience_s = deadline = 0.0

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def receive(self, nbytes: int) -> bytes:
        self._at += nbytes
        if self._at > len(self._data):
            raise ConnectionAbortedError("the peer went")
        return self._data[self._at - nbytes : self._at]

    def send(self, data: bytes) -> None:
        pass

    def send_paced(self, views: list[memoryview]) -> None:
        pass

    def within(self, seconds: float, most_s: float) -> Any:
        return contextlib.nullcontext()

    def shut(self) -> None:
        pass


def _handshake() -> Target:
    name = "job\u00e9".encode()
    hello = _HELLO.pack(MAGIC, bytes(32), len(name)) + name + bytes(32)
    return Target(
        lambda chance: flipped(chance, hello),
        lambda data: prove_server(_Peer(data), lambda job: bytes(32)),
        (ConnectionError,),
    )


class _Provider:
    def find(self, job: str, digest: bytes, wait_s: float) -> None:
        return None

    def expects(self, job: str, digest: bytes) -> bool:
        return False


def _request() -> Target:
    server: Any = Server.__new__(Server)
    server._provider, server._closed = _Provider(), False

    def make(chance: random.Random) -> bytes:
        count = chance.choice((0, 1, 2, 512, 513, (1 << 32) - 1))
        kind = chance.choice((1, 1, 1, 2, 0, 255))
        nbytes = chance.choice((0, 1, 1 << 20, (1 << 30) + 1, (1 << 64) - 1))
        first, wait = (chance.choice((0, 5, (1 << 32) - 1)) for _ in range(2))
        data = frames.REQUEST.pack(kind, count, first, wait, nbytes)
        want = frames.WANT.pack(bytes(32), chance.choice((0, (1 << 32) - 1)), 4096, 1)
        data += want * min(count, 600)
        return data if chance.random() < 0.5 else flipped(chance, data)

    def parse(data: bytes) -> object:
        return server._answer(_Peer(data), "job")

    return Target(make, parse, (ConnectionError,))


def targets(keys_path: str) -> dict[str, Target]:
    """All parsers by name."""
    store = records.encode_store(records.StoreRecord(STORE, "job", 1, 1.5))
    rows = {".metadata": DoorFileRow(5, "0" * 64), "__values.bin": DoorFileRow(7, "1" * 64)}
    door = encode_record(str(KEY), "w", rows)
    abort = records.encode_abort(records.AbortRecord(KEY, 1, "why", (0, 1), "w", 1.5))
    inflight = records.encode_inflight(
        records.InflightRecord(KEY, 1, 2, "w", 1.5, "boot", 1, 2, "host", (), ("a", "b"))
    )
    term = records.ControllerRecord(1, "tcp://[::1]:1", "node", "0" * 32, 1.5)
    return {
        "store record": _json(store, _store_seal, lambda d: records.decode_store(d, "record")),
        "door record": _json(door, _door_seal, lambda d: decode_record(d, "record")),
        "abort": _record(abort, RecordKind.ABORT, records.decode_abort),
        "in-flight": _record(inflight, RecordKind.INFLIGHT, records.decode_inflight),
        "lineage": _record(
            records.encode_lineage(Lineage(2, 1, 5, 1.5)),
            RecordKind.LINEAGE,
            records.decode_lineage,
        ),
        "controller": _record(
            records.encode_controller(term), RecordKind.CONTROLLER, records.decode_controller
        ),
        "manifest": _manifest(),
        "catalogue": _catalogue(),
        "segment": _segment(framed=False),
        "framed segment": _segment(framed=True),
        "plain value": _plain(),
        "item table": _item_table(),
        "keys": _keys(keys_path),
        "to agent": _channel(msg.ToAgent),
        "to rank": _channel(msg.ToRank),
        "between ranks": _channel(shared_messages.Message),
        "from node": _wire(cm.FROM_NODE),
        "from controller": _wire(cm.FROM_CONTROLLER),
        "link frame": _link_frame(),
        "fabric handshake": _handshake(),
        "fabric request": _request(),
    }


def run(count: int, seed: int, keys_path: str, *, only: str = "") -> Report:
    """Feed each parser its share of ``count`` inputs, the same for the same ``seed``."""
    report = Report()
    chosen = {name: t for name, t in targets(keys_path).items() if only in ("", name)}
    for name, target in chosen.items():
        chance = random.Random(f"{seed} {name}")
        for number in range(-(-count // len(chosen))):
            data = target.make(chance)
            began = time.perf_counter()
            try:
                target.parse(data)
                report.accepted[name] += 1
            except target.errors:
                pass
            except BaseException as error:  # noqa: BLE001 (that is what is looked for)
                what = f"{name}: {type(error).__name__}"
                report.escaped.setdefault(what, f"input {number}: {error!s:.300}")
            took = time.perf_counter() - began
            if took > report.slowest_s:
                report.slowest_s, report.slowest = took, f"{name}, input {number}"
            report.inputs += 1
    return report


def main() -> None:
    """Run within a bounded address space and print the report."""
    count, seed, keys_path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    only = sys.argv[4] if len(sys.argv) > 4 else ""
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    began = time.monotonic()
    report = run(count, seed, keys_path, only=only)
    found = {**vars(report), "accepted": dict(report.accepted)}
    found |= {"seconds": round(time.monotonic() - began, 1)}
    found |= {"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10}
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
