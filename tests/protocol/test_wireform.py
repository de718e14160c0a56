"""Events and effects between nodes: what goes in comes out, and nothing else gets in."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from protocol_help import opened

from groupio.errors import FormatError, GroupIOError, GroupTimeout, InvalidInput, Outcome
from groupio.format.records import segment_name
from groupio.model import (
    ChunkTable,
    DecisionKey,
    ItemKind,
    ItemSpec,
    Level,
    MemberTable,
    NodeReport,
    SegmentRef,
)
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol import wireform
from groupio.protocol.wireform import WireForm

EFFECTS = (fx.AdmitGroup, fx.StartCopy, fx.AbortGroup, fx.CloseGroup, fx.TellReached, fx.TellFailed)


def items_of(count: int, rank: int = 0) -> tuple[ItemSpec, ...]:
    return tuple(
        ItemSpec(f"layer.{i}", ItemKind.TENSOR, "float32", (3, 5), (3, 50), (0, 5 * rank), 60)
        for i in range(count)
    )


def report(n: int = 5, **columns: Any) -> NodeReport:
    name = segment_name(DecisionKey(1, 3, 1), "n0", 2)
    table = ChunkTable(
        digests=np.arange(n * 32, dtype=np.uint8).reshape(n, 32),
        lengths=np.full(n, 1 << 20, np.int64),
        segments=np.full(n, 0, np.int32),
        offsets=np.arange(n, dtype=np.int64) << 20,
    )
    shared = items_of(4)
    members = tuple(
        MemberTable(rank, items, b"i" * 32, np.arange(n, dtype=np.int64), 240)
        for rank, items in ((0, shared), (1, shared), (2, items_of(3, 2)), (3, ()))
    )
    segments = (SegmentRef(name, n << 20, True),)
    return NodeReport("n0", segments, dataclasses.replace(table, **columns), members)


def same(a: Any, b: Any) -> bool:
    """Equal, with the very same types, down to the last array."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, GroupIOError):
        return vars(a) == vars(b)
    if isinstance(a, msgspec.Struct):
        return all(same(getattr(a, f), getattr(b, f)) for f in a.__struct_fields__)
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


PLAIN: dict[Any, Any] = {
    int: 7,
    float: 1.5,
    bool: True,
    str: "word",
    bytes: b"\x00\xff",
    NodeReport: report(),
    Level: Level.REMOTE,
    GroupIOError: GroupTimeout("ranks 1, 3 did not come", missing=[1, 3], epoch=5),
    dict[str, Any]: {"loss": 0.5, "tags": ["a"], "none": None},
    npt.NDArray[np.uint8]: np.arange(64, dtype=np.uint8).reshape(2, 32),
}


def example(kind: Any) -> Any:
    """A value of the annotated type, with every optional field given."""
    if kind in PLAIN:
        return PLAIN[kind]
    options = typing.get_args(kind)
    if isinstance(kind, types.UnionType):
        return example(options[0])
    if typing.get_origin(kind) is tuple:
        return (example(options[0]),) * 2
    hints = typing.get_type_hints(kind)
    return kind(**{name: example(hints[name]) for name in kind.__struct_fields__})


def travelling(union: Any) -> list[Any]:
    local = (ev.Planned, ev.StoreOpened)  # answers of the controller's own driver
    return [kind for kind in typing.get_args(union) if kind not in local]


@pytest.mark.parametrize("kind", travelling(ev.ControllerEvent), ids=lambda k: k.__name__)
def test_events_survive_the_wire(kind: Any) -> None:
    form = WireForm(ev.ControllerEvent)
    message = example(kind)
    assert same(form.decode(form.encode(message)), message)


@pytest.mark.parametrize("kind", EFFECTS, ids=lambda k: k.__name__)
def test_effects_survive_the_wire(kind: Any) -> None:
    form = WireForm(EFFECTS)
    message = example(kind)
    assert same(form.decode(memoryview(form.encode(message))), message)


def test_a_report_without_anything_survives() -> None:
    form = WireForm((ev.NodeHashed,))
    empty = report(0, segments=np.zeros(0, np.int32))
    message = ev.NodeHashed(1, "n0", dataclasses.replace(empty, segments=(), members=()))
    assert same(form.decode(form.encode(message)), message)


def test_a_compared_report_has_no_places() -> None:
    form = WireForm((ev.NodeHashed,))
    nowhere = np.full(5, -1, np.int64)
    message = ev.NodeHashed(1, "n0", report(offsets=nowhere, segments=nowhere.astype(np.int32)))
    assert same(form.decode(form.encode(message)), message)


def test_equal_item_tables_travel_once_and_are_shared() -> None:
    form = WireForm((ev.NodeHashed,))
    message = ev.NodeHashed(1, "n0", report())
    data = form.encode(message)
    assert data.count(b"layer.0") == 2, "of the four members' tables only two have it"
    first, second = form.decode(data), form.decode(form.encode(message))
    assert first.report.members[0].items is second.report.members[1].items


def test_item_tables_are_not_remembered_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wireform, "TABLES_KEPT_BYTES", 150)
    form = WireForm((ev.NodeHashed,))
    for _ in range(3):
        message = ev.NodeHashed(1, "n0", report())
        assert same(form.decode(form.encode(message)), message)
        assert form._sent._bytes <= 150
        assert form._received._bytes <= 150


def test_numbers_of_numpy_become_numbers() -> None:
    form = WireForm((ev.MemberCopied,))
    message = ev.MemberCopied(np.int64(3), np.int32(4), "n0")  # type: ignore[arg-type]
    assert form.decode(form.encode(message)) == ev.MemberCopied(3, 4, "n0")


def test_only_the_union_travels() -> None:
    form = WireForm(ev.MemberCopied)
    with pytest.raises(AssertionError, match="Drain does not travel"):
        form.encode(ev.Drain())
    with pytest.raises(FormatError, match="Invalid value"):
        form.decode(WireForm((ev.Drain,)).encode(ev.Drain()))


@pytest.mark.parametrize("value", [object(), np.zeros(1, "c16"), np.zeros((1, 1, 1)), {1j}])
def test_what_has_no_form_does_not_travel(value: Any) -> None:
    form = WireForm((ev.MemberOpened,))
    with pytest.raises(TypeError, match=r"cannot travel|unsupported"):
        form.encode(opened(metadata={"x": value}))


def test_messages_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    form = WireForm((ev.NodeHashed,))
    message = ev.NodeHashed(1, "n0", report())
    data = form.encode(message)
    monkeypatch.setattr(wireform, "MESSAGE_BYTES_MAX", len(data) - 1)
    with pytest.raises(InvalidInput, match=r"NodeHashed message of .* save fewer items"):
        form.encode(message)
    with pytest.raises(FormatError, match="exceeds the limit"):
        form.decode(data)


# -- what a peer must not get through ---------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"lengths": np.ones(4, np.int64)}, "different lengths"),
        ({"lengths": np.zeros(5, np.int64)}, "not of 1 to 4194304 bytes"),
        ({"lengths": np.full(5, (4 << 20) + 1, np.int64)}, "not of 1 to 4194304 bytes"),
        ({"segments": np.full(5, 1, np.int32)}, "places that do not exist"),
        ({"segments": np.full(5, -2, np.int32)}, "places that do not exist"),
        ({"offsets": np.full(5, -1, np.int64)}, "places that do not exist"),
        ({"offsets": np.zeros(5, np.int32)}, "of int32 and not of int64"),
        ({"digests": np.zeros((5, 31), np.uint8)}, r"has the shape \(5, 31\)"),
        ({"digests": np.zeros(5, np.uint8)}, r"has the shape \(5,\)"),
        ({"lengths": np.ones((5, 1), np.int64)}, r"has the shape \(5, 1\)"),
        ({"lengths": 5}, "a int is no array"),
    ],
)
def test_broken_columns(changed: dict[str, Any], why: str) -> None:
    form = WireForm((ev.NodeHashed,))
    data = form.encode(ev.NodeHashed(1, "n0", report(**changed)))
    with pytest.raises(FormatError, match=why):
        form.decode(data)


@pytest.mark.parametrize(
    "changed",
    [
        {"segments": (SegmentRef("../../etc/passwd", 1, True),)},
        {"segments": (SegmentRef(segment_name(DecisionKey(1, 3, 1), "n0", 2), -1, True),)},
        {"members": (MemberTable(-1, (), b"", np.zeros(0, np.int64), 0),)},
        {"members": (MemberTable(1, (), b"", np.array([5]), 0),)},
        {"members": (MemberTable(1, (), b"", np.array([-1]), 0),)},
    ],
)
def test_broken_reports_anywhere_in_a_message(changed: dict[str, Any]) -> None:
    wrong = dataclasses.replace(report(), **changed)
    record = ev.SealedRecord(DecisionKey(1, 3, 1), 1, 1, (), (report(), wrong))
    form = WireForm((ev.SealedRecord,))
    with pytest.raises(FormatError, match=r"the report of node 'n0' (names|has)"):
        form.decode(form.encode(record))


def test_a_member_without_a_table() -> None:
    form = WireForm((ev.NodeHashed,))
    tables, which, body = msgspec.msgpack.decode(form.encode(ev.NodeHashed(1, "n0", report())))
    for broken in (which[:-1], [*which[:-1], 3], [*which[:-1], -1]):
        data = msgspec.msgpack.encode((tables, broken, body))
        with pytest.raises(FormatError, match="no table of items"):
            form.decode(data)
    data = msgspec.msgpack.encode(([b"\xc1", *tables[1:]], which, body))
    with pytest.raises(FormatError):
        form.decode(data)


def array_bytes(word: bytes, shape: tuple[int, ...], raw: bytes, ndim: int = -1) -> bytes:
    head = word.ljust(4, b"\0") + bytes([len(shape) if ndim < 0 else ndim])
    return head + b"".join(n.to_bytes(8, "little") for n in shape) + raw


@pytest.mark.parametrize(
    "error",
    [
        {},
        {"kind": "Exception", "message": "m", "outcome": "unknown", "retry": "none"},
        {"kind": "GroupTimeout", "message": 5, "outcome": "unknown", "retry": "none"},
        {"kind": "GroupTimeout", "message": "m", "outcome": "gone", "retry": "none"},
        {"kind": "GroupTimeout", "message": "m", "outcome": "unknown", "retry": "none",
         "fields": [1]},
        {"kind": ["GroupTimeout"], "message": "m"},
        [1],
        "text",
        msgspec.msgpack.Ext(1, array_bytes(b"|u1", (1, 32), bytes(32))),
    ],
)  # fmt: skip
def test_broken_errors(error: Any) -> None:
    body = {"type": "NodeFailed", "group": 1, "node": "n0", "error": error}
    data = msgspec.msgpack.encode(((), (), body))
    with pytest.raises(FormatError):
        WireForm((ev.NodeFailed,)).decode(data)


def test_an_error_keeps_its_fields() -> None:
    form = WireForm((ev.NodeFailed,))
    error = GroupTimeout("late", missing=[1, 2], epoch=3, outcome=Outcome.UNKNOWN)
    back = form.decode(form.encode(ev.NodeFailed(1, "n0", error))).error
    assert type(back) is GroupTimeout
    assert vars(back) == vars(error)


@pytest.mark.parametrize(
    ("code", "data"),
    [
        (2, array_bytes(b"|u1", (1, 32), bytes(32))),
        (1, b"|u1"),
        (1, array_bytes(b"|O", (1, 32), bytes(32))),
        (1, array_bytes(b"\xff", (1, 32), bytes(32))),
        (1, array_bytes(b"|u1", (1, 1, 32), bytes(32))),
        (1, array_bytes(b"|u1", (), b"", ndim=2)),
        (1, array_bytes(b"|u1", (2, 32), bytes(32))),
        (1, array_bytes(b"|u1", (1 << 62, 1 << 62), bytes(32))),
        (1, array_bytes(b"|u1", (0, 1 << 62), b"")),
        (1, array_bytes(b"|u1", (1 << 62, 0), b"")),
    ],
)
def test_broken_arrays_cost_no_memory(code: int, data: bytes) -> None:
    body = {"type": "NodeReplicated", "group": 1, "node": "n0", "round": 1,
            "copies": msgspec.msgpack.Ext(code, data)}  # fmt: skip
    with pytest.raises(FormatError, match="array"):
        WireForm((ev.NodeReplicated,)).decode(msgspec.msgpack.encode(((), (), body)))


@given(st.binary(max_size=200))
def test_noise_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError, match="cannot be read"):
        WireForm(EFFECTS).decode(data)


@given(st.data())
def test_flipped_bytes_never_break_the_decoder(data: st.DataObject) -> None:
    form = WireForm(ev.ControllerEvent)
    whole = bytearray(form.encode(ev.NodeHashed(1, "n0", report())))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        message = form.decode(bytes(whole))
    except FormatError:
        return
    assert type(message) in typing.get_args(ev.ControllerEvent)


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(FormatError):
        WireForm((ev.MemberOpened,)).decode(b"\x93\x90\x90" + b"\x91" * 100_000)
