"""What callers may give as an item, and which bytes of it are saved."""

from __future__ import annotations

import array
import ctypes
import mmap
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from client_store import lease_of
from hypothesis import given
from hypothesis import strategies as st

from groupio.client.copying import copy_range, wave_bytes
from groupio.client.destinations import given_destination
from groupio.client.outgoing import Packer
from groupio.client.values import Part, prepare
from groupio.errors import InvalidInput
from groupio.format.codec import decode_plain
from groupio.model import CHUNK_BYTES, ItemKind
from groupio.plan.layout import waves

torch = pytest.importorskip("torch")


def saved_bytes(items: dict[str, Any]) -> dict[str, bytes]:
    """The bytes of each item as they come to lie in the lease."""
    out = Packer().pack(items, ())
    lease = lease_of(out)
    starts = out.layout.item_start.tolist()
    return {
        spec.name: bytes(lease[start : start + spec.nbytes])
        for spec, start in zip(out.prepared.specs, starts, strict=True)
    }


BASE = np.arange(4 * 6 * 10, dtype=np.int16).reshape(4, 6, 10)


@pytest.mark.parametrize(
    "value",
    [
        BASE,
        BASE.T,
        BASE[::2, 1::3, ::-1],
        np.broadcast_to(np.int32(7), (3, 5)),
        np.asfortranarray(BASE),
        BASE[:, :0],
        np.array(3.5),
        np.array(True),
        np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3).T,
        np.arange(6).astype(ml_dtypes.float8_e4m3fn),
        np.array([1 + 2j, np.nan]),
        np.array(["a", "bcd"]),
        np.array(["2020-02-29T00", "NaT"], "M8[h]"),
        np.arange(5, dtype=">f4"),
        np.float32([np.nan, -0.0, np.inf]),
        np.memmap,
    ],
)
def test_arrays_of_any_strides_and_dtype(value: Any, tmp_path: Any) -> None:
    if value is np.memmap:
        value = np.memmap(tmp_path / "file", np.int8, "w+", shape=(5, 3))
        value[:] = np.arange(15).reshape(5, 3)
    (spec,) = prepare({"x": value}).specs
    assert (spec.shape, spec.global_shape, spec.nbytes) == (value.shape, value.shape, value.nbytes)
    assert (spec.kind, spec.origin) == (ItemKind.TENSOR, "numpy")
    assert saved_bytes({"x": value})["x"] == np.ascontiguousarray(value).tobytes()


T = torch.arange(4 * 6 * 10, dtype=torch.float32).reshape(4, 6, 10)


@pytest.mark.parametrize(
    "value",
    [
        T,
        T.permute(2, 0, 1),
        T[1:, ::2, 3:],
        T[0, 0].expand(5, 10),
        torch.nn.Parameter(T.clone()),
        torch.tensor(3),
        torch.zeros(0, 4),
        torch.tensor([1 + 2j, 3 - 4j]).conj(),
        torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        torch.tensor([True, False]),
        T.to(torch.bfloat16).transpose(0, 2),
        T.to(torch.float8_e5m2),
        T.to(torch.uint16),
        torch.ones(3, requires_grad=True) * 2,
    ],
)
def test_tensors_save_the_values_that_they_show(value: Any) -> None:
    (spec,) = prepare({"x": value}).specs
    assert spec.dtype == str(value.dtype).removeprefix("torch.")
    assert (spec.shape, spec.origin) == (tuple(value.shape), "torch")
    plain = value.detach().resolve_conj().resolve_neg().contiguous()
    expected = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    assert saved_bytes({"x": value})["x"] == expected


def test_buffers_become_arrays_and_bytes_stay_bytes() -> None:
    mapped = mmap.mmap(-1, 4096)
    mapped[:3] = b"map"
    items = {
        "bytes": b"abc",
        "bytearray": bytearray(b"abc"),
        "array": array.array("d", [1.5, 2.5]),
        "strided": memoryview(b"abcdef")[::2],
        "mmap": mapped,
        "ctypes": (ctypes.c_int32 * 2)(3, 4),
    }
    specs = {spec.name: spec for spec in prepare(items).specs}
    assert specs["bytes"].kind is ItemKind.BYTES
    assert {n: s.dtype for n, s in specs.items() if n != "bytes"} == {
        "bytearray": "uint8",
        "array": "float64",
        "strided": "uint8",
        "mmap": "uint8",
        "ctypes": "int32",
    }
    assert {spec.origin for spec in specs.values()} == {"buffer"}
    got = saved_bytes(items)
    assert got["strided"] == b"ace"
    assert got["array"] == np.array([1.5, 2.5]).tobytes()
    assert got["mmap"][:4] == b"map\0"


def test_plain_values_are_those_at_the_call() -> None:
    config = {"lr": 0.1, "steps": [1, 2]}
    record = np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")])
    prepared = prepare({"config": config, "record": record, "n": np.int8(3), "none": None})
    config["lr"] = 9
    blobs = [source.data for source in prepared.sources]  # type: ignore[union-attr]
    assert [spec.kind for spec in prepared.specs] == [ItemKind.PLAIN] * 4
    assert decode_plain(blobs[0])["lr"] == 0.1
    assert decode_plain(blobs[1]) == record
    assert type(decode_plain(blobs[2])) is np.int8


class Custom:
    pass


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (Custom(), "Custom"),
        ({"a": [1, object()]}, r"\['a'\]\[1\] is of type object"),
        (np.array([None]), "object"),
        (np.ma.masked_array([1], [True]), "masked"),
        (torch.zeros(2).to_sparse(), "sparse"),
        (torch.zeros(2, device="meta"), "meta"),
        (torch.empty(2, dtype=torch.float4_e2m1fn_x2), "float4_e2m1fn_x2"),
        ([torch.zeros(1)], "Tensor"),
        (lambda: 0, "function"),
    ],
)
def test_what_cannot_be_stored_is_named_with_what_to_do(value: Any, says: str) -> None:
    with pytest.raises(InvalidInput, match=says) as caught:
        prepare({"good": 1, "model/bad": value})
    assert "'model/bad'" in str(caught.value)


def test_tied_memory_is_saved_once_and_other_views_are_not_tied() -> None:
    big = np.arange(1 << 20, dtype=np.int32)
    t = torch.from_numpy(big)
    items = {
        "a": big,
        "b": big,
        "part": big[: 1 << 19],
        "other dtype": big.view(np.float32),
        "t": t,
        "t2": t.view(1 << 20),
        "shaped": t.view(1024, 1024),
        "turned": t.view(1024, 1024).T,
        "turned2": t.view(1024, 1024).T,
        "flipped": big[::-1],
        "empty": big[:0],
        "empty2": big[:0],
        "replica": big,
        "shard": Part(big, (1 << 21,), (1 << 20,)),
        "shard2": Part(big, (1 << 21,), (1 << 20,)),
    }
    out = Packer().pack(items, ["replica"])
    alias = {spec.name: spec.alias for spec in out.prepared.specs if spec.alias >= 0}
    names = list(items)
    assert alias["b"] == names.index("a")
    assert alias["t"] == alias["t2"] == names.index("a")
    assert alias["shard2"] == names.index("shard")
    assert alias["turned2"] == names.index("turned")
    assert set(alias) == {"b", "t", "t2", "shard2", "turned2"}
    got = saved_bytes(items)
    assert got["b"] == got["t2"] == got["replica"] == big.tobytes()


def test_what_was_said_of_the_same_items_is_used_again_and_nothing_else() -> None:
    packer = Packer()
    items = {"w": np.zeros(5), "n": 3, "b": b"x", "tied": np.zeros(9), "t": torch.zeros(3)}
    first = packer.pack(items, ())
    again = packer.pack(dict(items, w=np.ones(5), n=4), ())
    assert again.table is first.table
    assert again.layout is first.layout
    changes: list[tuple[dict[str, Any], Any]] = [
        ({"w": np.zeros(6)}, ()),
        ({"w": np.zeros(5, np.int64)}, ()),
        ({"w": np.zeros((5, 1))}, ()),
        ({"w": torch.zeros(5, dtype=torch.float64)}, ()),
        ({"w": Part(np.zeros(5), (10,), (5,))}, ()),
        ({"w": 1.5}, ()),
        ({"n": 1 << 90}, ()),
        ({"b": bytearray(b"x")}, ()),
        ({"tied": items["w"]}, ()),
        ({"new": 1}, ()),
        ({}, ["w"]),
        ({}, ["n"]),
    ]
    for change, declared in changes:
        other = packer.pack({**items, **change}, declared)
        assert other.table != first.table
        assert other.table == Packer().pack({**items, **change}, declared).table
    assert packer.pack(dict(reversed(items.items())), ()).table != first.table


def test_replicas_are_declared_by_name_pattern_or_part() -> None:
    items = {"layer[0]": 1, "opt.a": 2, "opt.b": 3, "own": Part(4, replicated=True), "x": 5}
    specs = prepare(items, ["layer[0]", "opt.*"]).specs
    assert [spec.replicated for spec in specs] == [True, True, True, True, False]
    assert [spec.replicated for spec in prepare(items, "o*").specs] == [False, True, True, True, 0]


@given(st.data())
def test_any_cut_of_any_view_copies_the_same_bytes(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    dtype = data.draw(st.sampled_from(["<u2", "u1", "<U3", "<c16"]))
    base = np.arange(np.prod(shape)).astype(dtype).reshape(shape)
    turned = base.transpose(data.draw(st.permutations(range(len(shape)))))
    flips = tuple(slice(None, None, data.draw(st.sampled_from([1, -1, 2]))) for _ in shape)
    value: Any = turned[flips]
    if dtype in ("u1", "<c16") and data.draw(st.booleans()):
        value = torch.from_numpy(np.ascontiguousarray(turned)).permute(*range(len(shape))[::-1])
        expected = value.contiguous().numpy().tobytes()
    else:
        expected = np.ascontiguousarray(value).tobytes()
    (source,) = prepare({"x": value}).sources
    assert source is not None
    size = 1 if dtype != "<c16" else 16
    lo = data.draw(st.integers(0, len(expected) // size)) * size
    hi = data.draw(st.integers(lo // size, len(expected) // size)) * size
    if lo < hi:
        target = ctypes.create_string_buffer(hi - lo + 8)
        source.copy_range(lo, hi, ctypes.addressof(target))
        assert target.raw == expected[lo:hi] + bytes(8)


def test_a_wave_gets_exactly_its_chunks_and_a_copy_can_be_called_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("groupio.client.copying.PIECE_BYTES", 16 << 20)
    value = np.random.default_rng(0).integers(0, 255, (40, 999_983), np.uint8)
    out = Packer().pack({"a": value, "b": value[:3] + 1, "c": 5}, ())
    planned = waves(out.layout, 3 * CHUNK_BYTES)
    assert len(planned) > 3
    whole = lease_of(out)
    for wave in planned:
        lo, hi = wave_bytes(out.layout, wave.chunk_lo, wave.chunk_hi)
        lease = bytearray(b"\xee" * (wave.virt_hi - wave.virt_lo))
        address = ctypes.addressof(ctypes.c_char.from_buffer(lease)) + lo - wave.virt_lo
        assert copy_range(out.prepared, out.layout, lo, hi, address, lambda: False)
        for chunk in range(wave.chunk_lo, wave.chunk_hi):
            start, length = out.layout.chunk_start[chunk], out.layout.chunk_length[chunk]
            at = start - wave.virt_lo
            assert lease[at : at + length] == whole[start : start + length]
        assert set(lease[: lo - wave.virt_lo]) <= {0xEE}
        assert set(lease[hi - wave.virt_lo :]) <= {0xEE}
    looks = iter([False, False, True])
    lease = bytearray(out.layout.total_bytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(lease))
    end = out.layout.total_bytes
    assert not copy_range(out.prepared, out.layout, 0, end, address, lambda: next(looks))
    assert lease[: 16 << 20] == whole[: 16 << 20]
    assert not any(lease[32 << 20 :])
    assert wave_bytes(out.layout, 2, 2) == (0, 0)


def test_an_element_larger_than_a_chunk_is_cut_and_copied() -> None:
    wide = np.array([b"x" * (5 << 20), b"y" * (5 << 20)])
    value = wide[::-1]
    assert saved_bytes({"x": value})["x"] == value.tobytes()
    out = Packer().pack({"x": value}, ())
    (source,) = out.prepared.sources
    assert source is not None
    target = ctypes.create_string_buffer(2 << 20)
    source.copy_range(4 << 20, 6 << 20, ctypes.addressof(target))
    assert target.raw == b"y" * (1 << 20) + b"x" * (1 << 20)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(4, 6),
        lambda: torch.zeros(6, 4).T,
        lambda: torch.zeros(4, 6, dtype=torch.complex64).imag,
        lambda: torch.nn.Parameter(torch.zeros(4, 6)),
    ],
)
def test_torch_tensors_are_filled_in_place(make: Any) -> None:
    values = np.arange(24, dtype=np.float32).reshape(4, 6)
    (spec,) = prepare({"x": values}).specs
    target = make()
    destination = given_destination(spec, target)
    destination.view[:] = values.tobytes()
    assert destination.finish() is target
    assert torch.equal(target.detach(), torch.from_numpy(values))
    with pytest.raises(InvalidInput, match="dtype"):
        given_destination(spec, torch.zeros(4, 6, dtype=torch.int32))
    with pytest.raises(InvalidInput, match="bytes"):
        given_destination(spec, torch.zeros(4, 5))
    with pytest.raises(InvalidInput, match="strided"):
        given_destination(spec, torch.zeros(4, 6).to_sparse())
