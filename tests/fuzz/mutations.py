"""Random values by the types that a parser expects, and random changes of what it accepts."""

from __future__ import annotations

import copy
import random
import struct
from typing import Any

import msgspec
from msgspec import inspect

HOSTILE: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1 << 31,
    (1 << 63) - 1,
    (1 << 64) - 1,
    -(1 << 63),
    0.5,
    float("nan"),
    float("inf"),
    "",
    "\0",
    "../../x",
    "x" * 70_000,
    "\u0661",
    b"",
    bytes(32),
    [],
    {},
    msgspec.Raw(b"\xa2\xff\xfe"),
    msgspec.Raw(b"\x91" * 3000 + b"\xc0"),
    msgspec.Raw(b"\x81\xa1x" * 3000 + b"\xc0"),
    msgspec.Raw(b"\xdd\xff\xff\xff\xff"),
    msgspec.Raw(b"\xdf\xff\xff\xff\xff"),
    msgspec.Raw(b"\xc6\xff\xff\xff\xff"),
    msgspec.msgpack.Ext(1, b"\0" * 40),
    msgspec.msgpack.Ext(2, struct.pack("<4sQqq", b"<i8", 1 << 62, 0, 0)),
    msgspec.msgpack.Ext(2, struct.pack("<4sQqq", b"<i8", 1 << 20, 0, 1)),
    msgspec.msgpack.Ext(127, b""),
)


def mutated(chance: random.Random, value: Any) -> Any:
    """``value`` (lists, dicts and plain values) with one to three changes, its shape often kept."""
    changed = [copy.deepcopy(value)]
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        _change(chance, changed)
    return changed[0]


def flipped(chance: random.Random, data: bytes) -> bytes:
    """``data`` with some bytes changed, cut or repeated."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 8))):
        at = chance.randrange(len(changed)) if changed else 0
        match chance.randrange(5):
            case 0 | 1 if changed:
                changed[at] ^= 1 << chance.randrange(8)
            case 2 if changed:
                changed[at] = chance.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 3:
                del changed[at : at + chance.choice((1, 4, 8, len(changed)))]
            case _:
                changed[at:at] = chance.randbytes(chance.choice((1, 4, 8, 32)))
    return bytes(changed)


def _change(chance: random.Random, box: list[Any]) -> None:
    """Change one node below ``box``, found by a random walk."""
    parent: Any = box
    while True:
        keys = list(parent) if isinstance(parent, dict) else range(len(parent))
        if not keys:
            return
        key = chance.choice(keys)
        child = parent[key]
        if not isinstance(child, list | dict) or not child or chance.random() < 0.2:
            break
        parent = child
    match chance.randrange(8):
        case 0 if isinstance(parent, list) and parent is not box:
            del parent[key]
        case 1 if isinstance(parent, list) and parent is not box:
            parent.append(copy.deepcopy(child))
        case 2 if isinstance(parent, dict):
            del parent[key]
        case 3 | 4 if isinstance(child, int):
            near = child + chance.choice((-1, 1, 1 << 12, -(1 << 12), child))
            parent[key] = max(-(1 << 63), min(near, (1 << 64) - 1))
        case 3 | 4 | 5 if isinstance(child, bytes):
            parent[key] = flipped(chance, child)
        case 3 | 4 if isinstance(child, str):
            parent[key] = flipped(chance, child.encode()).decode(errors="replace")
        case _:
            chosen = chance.choice(HOSTILE)
            parent[key] = type(chosen)() if chosen in ([], {}) else chosen


class Inventor:
    """Makes msgpack-ready values of a type, most of them right."""

    def __init__(self, chance: random.Random, samples: dict[type, Any]) -> None:
        """``samples`` are right values of some types, used more often than not."""
        self.chance = chance
        self._samples = samples
        self._depth = 0

    def make(self, kind: Any) -> Any:
        """A value of ``kind`` (of :mod:`msgspec.inspect`)."""
        self._depth += 1
        try:
            return self._make(kind)
        finally:
            self._depth -= 1

    def _make(self, kind: Any) -> Any:
        chance = self.chance
        match kind:
            case inspect.UnionType(types=types):
                return self.make(chance.choice(types))
            case inspect.StructType():
                return self._struct(kind)
            case inspect.DataclassType(cls=cls) if cls in self._samples and chance.random() < 0.8:
                return copy.deepcopy(self._samples[cls])
            case inspect.DataclassType(fields=fields):
                return {field.encode_name: self.make(field.type) for field in fields}
            case inspect.NamedTupleType(fields=fields):
                return [self.make(field.type) for field in fields]
            case inspect.IntType():
                return chance.choice((0, 0, 1, 1, 2, 3, 7, 64, 1 << 20, 1 << 40))
            case inspect.FloatType():
                return chance.choice((0.0, 1.5, 1.7e9))
            case inspect.StrType():
                names = ("", "a", "node0", "00" * 16, "tcp://127.0.0.1:7400", "*.weight")
                return chance.choice(names)
            case inspect.BytesType():
                return chance.choice((b"", b"x", bytes(32), bytes(range(16))))
            case inspect.BoolType():
                return chance.random() < 0.5
            case inspect.NoneType():
                return None
            case inspect.EnumType(cls=cls):
                return chance.choice(list(cls)).value
            case inspect.LiteralType(values=values):
                return chance.choice(values)
            case inspect.TupleType(item_types=types):
                return [self.make(one) for one in types]
            case inspect.DictType(key_type=key, value_type=value):
                return {self.make(key): self.make(value) for _ in range(self._few())}
            case inspect.CollectionType(item_type=item):
                return [self.make(item) for _ in range(self._few())]
            case inspect.CustomType():
                return self._custom()
            case _:
                return chance.choice((None, 1, "x", [1], {"a": 1}))

    def _struct(self, kind: inspect.StructType) -> Any:
        tag = [] if kind.tag is None else [kind.tag]
        if kind.array_like:
            return [*tag, *(self.make(field.type) for field in kind.fields)]
        made = {} if kind.tag is None else {kind.tag_field: kind.tag}
        for field in kind.fields:
            if field.required or self.chance.random() < 0.5:
                made[field.encode_name] = self.make(field.type)
        return made

    def _few(self) -> int:
        return 0 if self._depth > 12 else self.chance.choice((0, 1, 1, 2, 3))

    def _custom(self) -> Any:
        """An array or an error."""
        chance = self.chance
        if chance.random() < 0.3:
            return {"kind": "StorageError", "message": "x", "fields": {"path": "p", "errno": 5}}
        word, width = chance.choice(((b"<i8", 8), (b"<i4", 4), (b"|u1", 1), (b"<f8", 8)))
        count = chance.choice((0, 1, 2, 3))
        if word == b"|u1":
            head = struct.pack("<4sBQQ", word, 2, count, 32)
            return msgspec.msgpack.Ext(1, head + bytes(32 * count))
        return msgspec.msgpack.Ext(1, struct.pack("<4sBQ", word, 1, count) + bytes(width * count))
