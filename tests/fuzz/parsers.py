"""Every parser of what others wrote or send, fed with inputs whose digests are right.

``python parsers.py COUNT SEED`` prints a report as JSON; COUNT inputs are shared out evenly. Only
errors of groupio may come out (of sockets: what ends the connection), in bounded time and, by the
limit of this process's address space, in bounded memory.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import random
import resource
import socket
import struct
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import network_parsers
import numpy as np
from blake3 import blake3
from msgspec import inspect
from mutations import Inventor, flipped, mutated
from target import Parse, Target

from groupio.agent.process import read_ready
from groupio.agent.read_node import _checked
from groupio.client import shared_messages
from groupio.client.address import recorded_job
from groupio.client.parts import Catalogue
from groupio.controller import messages as cm
from groupio.controller.keys import Keys
from groupio.door.record import DoorFileRow, decode_record, encode_record
from groupio.errors import (
    AgentLost,
    FormatError,
    GroupTimeout,
    InvalidInput,
    from_wire,
    to_wire,
)
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
from groupio.format.structure import (
    Branch,
    Leaf,
    Step,
    decode_structure,
    encode_structure,
    rebuild,
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
from groupio.protocol import link
from groupio.protocol import messages as msg
from groupio.protocol.arrayform import ArrayForm
from groupio.protocol.linkframe import Frame, FrameKind, decode_frame, reject
from groupio.protocol.listener import Listener
from groupio.protocol.wireform import WireForm
from groupio.torch.members import decode_word
from groupio.torch.saved import _paths_of, _plant
from groupio.wire import Channel

KEY = DecisionKey(1, 5, 0)
STORE = "00112233445566778899aabbccddeeff"
SECTIONS_AT = 18
SECONDS_MAX = 5.0
"""No single input may take longer, on a machine that has other things to do."""

ADDRESS_SPACE_BYTES = 3 << 30


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
    keys = Keys.make()
    with contextlib.suppress(FileExistsError):
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


class _Ends:
    """A listening process as its peers' frames find it; ``names`` are ends that are known."""

    def __init__(self) -> None:
        numbers = iter(range(1, 1 << 30))
        self.listener = Listener("0" * 32, numbers.__next__, hello=b"hello", ends_max=4)
        self.now = 0.0
        self.take(Frame("peer.1", "", FrameKind.OPEN))
        self.take(Frame("peer.1", f"{'0' * 32}.1", FrameKind.ACK))

    def take(self, frame: Frame) -> None:
        self.now += 0.01
        end = self.listener.route(self.now, frame)
        if end is None:
            reject(frame)
            return
        for effect in end.handle(link.Received(self.now, frame)):
            if isinstance(effect, link.Lost):
                self.listener.drop(end)
        assert end.held_bytes <= end.config.message_bytes


def _link() -> Target:
    """Frames of a peer whose session stands, in any order."""
    ends = ("peer.1", "", "peer.2", f"{'0' * 32}.1", f"{'0' * 32}.9")

    def make(chance: random.Random) -> bytes:
        rows = []
        for _ in range(chance.choice((1, 3, 10))):
            source, target = ends[0], ends[3]
            if chance.random() < 0.2:
                source, target = chance.choice(ends), chance.choice(ends)
            kind = chance.choice((0, 1, 2, 2, 2, 2, 3, 3, 4, 5))
            seq, ack = (chance.choice((0, 1, 1, 2, 3, 300, 1 << 53)) for _ in range(2))
            more, payload = chance.random() < 0.3, chance.choice((b"", b"x", bytes(70_000)))
            rows.append([source, target, kind, seq, ack, more, payload])
        return msgspec.msgpack.encode(rows)

    def parse(data: bytes) -> object:
        taken = _Ends()
        for row in msgspec.msgpack.decode(data, type=list[msgspec.Raw]):
            taken.take(decode_frame(row))
        return taken

    return Target(make, parse)


def _error() -> Target:
    """Errors as they travel; what comes out is always one that can be shown and sent on."""
    wire = to_wire(GroupTimeout("ranks are missing", missing=[1, 2], epoch=5))

    def parse(data: bytes) -> object:
        made = from_wire(msgspec.msgpack.decode(data))
        assert type(made.message) is str
        str(made)
        to_wire(made)
        if isinstance(made, FormatError):
            raise made
        return made

    return Target(lambda chance: _packed(mutated(chance, wire)), parse)


def _packed(value: Any) -> bytes:
    data = msgspec.msgpack.encode(value)
    try:
        msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return msgspec.msgpack.encode({})  # the decoder of the message refuses it
    return data


def _structure() -> Target:
    """The structure record of a nested state, up to the containers that it describes."""
    kinds: tuple[tuple[str, Any, tuple[Any, ...]], ...] = (
        ("odict", {"": {"version": 1}}, ("a", 5)),
        ("namedtuple", ("Named", ("one", "two")), (0, 1)),
        ("deque", 3, (0, 1)),
        ("defaultdict", "list", (1, "1", 1.5, None, (2, "x"))),
        *((kind, None, (0, 1)) for kind in ("dict", "list", "tuple", "Counter", "UserDict")),
    )
    root = Branch((), "dict")
    for kind, detail, keys in kinds:
        path = (Step(kind, False),)
        below = Branch(path, kind, detail=detail)
        below.children = {key: Leaf((*path, Step(key, not below.keyed))) for key in keys}
        root.children[kind] = below
    tokens = encode_structure(root)

    def parse(data: bytes) -> object:
        root = decode_structure(decode_plain(data))
        return rebuild(root, lambda leaf: 0)

    return Target(lambda chance: _as_plain(mutated(chance, tokens)), parse)


def _as_plain(value: Any) -> bytes:
    try:
        return encode_plain(value)
    except Exception:  # noqa: BLE001 (a value that is none of ours)
        return encode_plain([1])


def _paths() -> Target:
    """The paths that the DCP classes keep."""
    paths = {"model.weight": ["model", "weight"], "optim.0": ["optim", 0, "state"]}

    def parse(data: bytes) -> object:
        root = Branch((), "dict")
        for name, keys in _paths_of(decode_plain(data)).items():
            _plant(root, keys, name)
        return root

    return Target(lambda chance: _as_plain(mutated(chance, paths)), parse)


def _names() -> Target:
    """The names of files in a store, which anybody may put there."""
    made = (
        str(KEY), records.segment_name(KEY, "node0", 0), records.lineage_name(1),
        records.controller_name(3), f"{KEY}.tmp", ".tmp-1-2",
    )  # fmt: skip
    parsers = (
        records.parse_key, records.parse_segment_name, records.parse_lineage_name,
        records.parse_controller_name,
    )  # fmt: skip

    def parse(data: bytes) -> object:
        name = os.fsdecode(data)
        found = [one(name) for one in parsers]
        if not any(found):
            raise InvalidInput("a stranger")
        return found

    return Target(lambda chance: flipped(chance, chance.choice(made).encode()), parse)


def _ready() -> Target:
    """What a starting agent says through its pipe."""
    sample = json.dumps({"ready": True, "pid": 5}).encode()

    def make(chance: random.Random) -> bytes:
        usual = sample if chance.random() < 0.1 else flipped(chance, sample)
        return b"[" * 60_000 if chance.random() < 0.01 else usual

    def parse(data: bytes) -> object:
        reader, writer = os.pipe()
        try:
            os.write(writer, data)
            os.close(writer)
            answer = read_ready(reader, time.monotonic() + 1)
        finally:
            os.close(reader)
        if not (answer or {}).get("ready"):
            raise AgentLost(str(answer))
        return answer

    return Target(make, parse)


def _recorded_job(path: str) -> Target:
    """The job by which a client that names none goes on with a store."""
    sample = records.encode_store(records.StoreRecord(STORE, "job", 1, 1.5))
    os.makedirs(path, exist_ok=True)

    def make(chance: random.Random) -> bytes:
        return b'{"job":' * 20_000 if chance.random() < 0.01 else flipped(chance, sample)

    def parse(data: bytes) -> object:
        with open(os.path.join(path, "groupio.json"), "wb") as file:
            file.write(data)
        if not (job := recorded_job(path)):
            raise InvalidInput("none")
        return job

    return Target(make, parse)


def _store_key() -> Target:
    """The key that agents share where there is no token."""
    sample = b"groupio store key 1\n" + b"ab" * 32 + b"\n"

    class Store:
        path = "store"

        def __init__(self, data: bytes) -> None:
            self._data = data

        def private_file(self, *_: object) -> bytes:
            return self._data

    def make(chance: random.Random) -> bytes:
        return sample if chance.random() < 0.1 else flipped(chance, sample)

    def parse(data: bytes) -> object:
        store: Any = Store(data)
        return Keys.of(store)

    return Target(make, parse, share=0.2)


def _read_request() -> Target:
    """The columns in which a rank asks its agent for chunks."""
    lengths = np.array([10, 20, 30], np.int64)

    def column(chance: random.Random, form: str, values: list[int]) -> bytes:
        data = np.array(values, form).tobytes()
        return flipped(chance, data) if chance.random() < 0.4 else data

    def make(chance: random.Random) -> bytes:
        rows = column(chance, "<i4", [0, 2])
        starts, stops = column(chance, "<i8", [0, 5]), column(chance, "<i8", [10, 30])
        columns = [rows, starts, stops if chance.random() < 0.8 else b""]
        return msgspec.msgpack.encode(columns)

    def parse(data: bytes) -> object:
        rows, starts, stops = msgspec.msgpack.decode(data, type=tuple[bytes, bytes, bytes])
        key = DecisionKey(1, 1, 0)
        message = msg.ReadOpen(1, key, rows=rows, starts=starts, stops=stops)
        return _checked(message, lengths)

    return Target(make, parse)


def _member_word() -> Target:
    """What the members of a process group write into its store for each other."""
    sample = {"id": "a", "launches": {}, "error": None, "number": 3}
    return Target(
        lambda chance: flipped(chance, msgspec.msgpack.encode(mutated(chance, sample))),
        lambda data: decode_word(data, "key"),
    )


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
        "store key": _store_key(),
        "recorded job": _recorded_job(f"{keys_path}.store"),
        "file names": _names(),
        "structure": _structure(),
        "dcp paths": _paths(),
        "error": _error(),
        "agent's answer": _ready(),
        "read request": _read_request(),
        "link": _link(),
        "member's word": _member_word(),
        "to agent": _channel(msg.ToAgent),
        "to rank": _channel(msg.ToRank),
        "between ranks": _channel(shared_messages.Message),
        "from node": _wire(cm.FROM_NODE),
        "from controller": _wire(cm.FROM_CONTROLLER),
        "link frame": _link_frame(),
        **network_parsers.targets(),
    }


def run(count: int, seed: int, keys_path: str, *, only: str = "") -> Report:
    """Feed each parser its share of ``count`` inputs, the same for the same ``seed``."""
    report = Report()
    chosen = {name: t for name, t in targets(keys_path).items() if only in ("", name)}
    shares = sum(target.share for target in chosen.values())
    for name, target in chosen.items():
        chance = random.Random(f"{seed} {name}")
        for number in range(math.ceil(count * target.share / shares)):
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
    logging.disable()
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    began = time.monotonic()
    report = run(count, seed, keys_path, only=only)
    found = {**vars(report), "accepted": dict(report.accepted)}
    found |= {"seconds": round(time.monotonic() - began, 1)}
    found |= {"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10}
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
