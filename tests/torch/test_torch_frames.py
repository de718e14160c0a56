"""What groupio.format writes for torch, read by torch as ``torch.distributed.checkpoint`` does."""

from __future__ import annotations

import io
import pickle
import time
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.utils import _create_file_view

from groupio.format.dcp_metadata import METADATA_NAME, TensorEntry, ValueEntry, encode_metadata
from groupio.format.frames import (
    DTYPE_BYTES,
    LOCAL_HEADER,
    Frames,
    FrameTable,
    Kind,
    value_zip,
)
from groupio.torch.tensors import STORED_DTYPES, dtype_text

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor, NaNs and negative zeros included."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Any bits that the dtype can hold."""
    element = DTYPE_BYTES[dtype_text(dtype)]
    top = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, top, (prod(shape) * element,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


class File:
    """A file of framed runs; ``places`` of its rows once it is closed."""

    def __init__(self) -> None:
        self.data = bytearray(b"any bytes before")
        self.rows: list[tuple[int, int, Kind]] = []

    def add(self, record: torch.Tensor, *wanted: tuple[tuple[int, ...], int]) -> None:
        """A run, and a row for each (shape, skip) in elements."""
        self.data += LOCAL_HEADER
        run, dtype = len(self.data), dtype_text(record.dtype)
        self.data += bits(record) + b"between"
        for shape, skip in wanted:
            kind = Kind(dtype, shape, skip, record.numel())
            self.rows.append((run + skip * DTYPE_BYTES[dtype], run, kind))

    def close(self) -> list[tuple[int, int]]:
        """Writes the frames region; (offset, length) of each row."""
        kinds = tuple(dict.fromkeys(kind for _, _, kind in self.rows))
        table = FrameTable(
            np.array([row[0] for row in self.rows], np.int64),
            np.array([row[1] for row in self.rows], np.int64),
            np.array([kinds.index(row[2]) for row in self.rows], np.int32),
            kinds,
        )
        frames = Frames(table, len(self.data))
        self.data += frames.encode() + b"any bytes behind"
        return [frames.slice_of(row) for row in range(len(table))]

    def load(self, place: tuple[int, int], **how: Any) -> Any:
        """What torch reads there."""
        view = _create_file_view(io.BytesIO(bytes(self.data)), *place)
        return torch.load(view, map_location="cpu", **{"weights_only": True, **how})


@pytest.mark.parametrize("dtype", sorted(STORED_DTYPES, key=str), ids=dtype_text)
def test_torch_reads_every_dtype_from_anywhere_in_a_run(dtype: torch.dtype) -> None:
    record = random_tensor((4, 6), dtype)
    wanted = [((4, 6), 0), ((3, 6), 6), ((), 23), ((24,), 0), ((0, 3), 24), ((1, 1, 5), 7)]
    file = File()
    file.add(record, *wanted)
    for (shape, skip), place in zip(wanted, file.close(), strict=True):
        found = file.load(place)
        expected = record.flatten()[skip : skip + prod(shape)].reshape(shape)
        assert found.dtype == dtype
        assert found.shape == shape
        assert found.stride() == torch.empty(shape).stride()
        assert not found.requires_grad
        assert bits(found) == bits(expected)


def test_the_dtypes_are_those_of_the_adapter() -> None:
    older = {name for name in DTYPE_BYTES if not hasattr(torch, name)}
    assert {dtype_text(dtype) for dtype in STORED_DTYPES} == set(DTYPE_BYTES) - older
    for name in set(DTYPE_BYTES) - older:
        assert getattr(torch, name).itemsize == DTYPE_BYTES[name]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_torch_reads_any_shapes_and_runs(drawn: st.DataObject) -> None:
    file, expected = File(), []
    shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
    for _ in range(drawn.draw(st.integers(1, 4))):
        record = random_tensor((drawn.draw(st.integers(0, 700)),), torch.int16)
        wanted = []
        for shape in drawn.draw(st.lists(shapes, min_size=1, max_size=3)):
            if prod(shape) <= record.numel():
                wanted.append((shape, drawn.draw(st.integers(0, record.numel() - prod(shape)))))
        file.add(record, *wanted)
        expected += [record[skip : skip + prod(s)].reshape(s) for s, skip in wanted]
    for place, tensor in zip(file.close(), expected, strict=True):
        assert torch.equal(file.load(place), tensor)


def test_torch_reads_large_offsets_and_a_large_run() -> None:
    file = File()
    record = random_tensor((17 << 20,), torch.uint8)
    file.add(record, ((4096, 4096), 1 << 20), ((70_000,), 70_000))
    whole, part = (file.load(place) for place in file.close())
    assert torch.equal(whole.flatten(), record[1 << 20 :])
    assert torch.equal(part, record[70_000:140_000])


@pytest.mark.parametrize("value", [1, None, "x" * 70_000, {"a": [1.5, b"y"]}, np.arange(5)])
def test_torch_reads_values(value: Any) -> None:
    data = io.BytesIO(value_zip(pickle.dumps(value, protocol=2)))
    assert repr(torch.load(data, weights_only=False)) == repr(value)


def state() -> dict[str, Any]:
    """Everything that DCP treats in its own way."""
    return {
        "model": {"w": torch.randn(8, 3), "scalar": torch.tensor(5, dtype=torch.uint16)},
        "empty": torch.zeros(0, 3),
        "fp8": torch.ones(4).to(torch.float8_e4m3fn),
        "half": torch.ones(2, 2, dtype=torch.bfloat16),
        "complex": torch.ones(2, dtype=torch.complex64),
        "groups": [{"lr": 0.1, "w": torch.ones(2)}, {"lr": 0.2}],
        "list": [1, 2],
        "none": None,
        "int": {3: 1},
        "ü": {"a b": True},
    }


def entries_of(metadata: Metadata) -> tuple[list[TensorEntry], list[ValueEntry]]:
    """The entries from which the emitter is to make ``metadata`` again."""
    tensors, values = [], []
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            found = metadata.storage_data[MetadataIndex(name)]
            values.append(ValueEntry(name, (found.relative_path, found.offset, found.length)))
            continue
        boxes = [(tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks]
        stored = [metadata.storage_data[MetadataIndex(name, box[0])] for box in boxes]
        places = [(info.relative_path, info.offset, info.length) for info in stored]
        dtype = dtype_text(entry.properties.dtype)
        tensors.append(TensorEntry(name, dtype, tuple(entry.size), boxes, places))
    return tensors, values


def test_the_metadata_equals_that_of_torch(tmp_path: Path) -> None:
    dcp.save(state(), checkpoint_id=tmp_path)
    stock = pickle.loads((tmp_path / METADATA_NAME).read_bytes())  # noqa: S301 (written above)
    mine = pickle.loads(encode_metadata(*entries_of(stock), stock.planner_data))  # noqa: S301
    stock.storage_meta = None  # where and by which run it was saved
    assert type(mine) is Metadata
    assert mine.planner_data == stock.planner_data
    assert mine.storage_data == stock.storage_data
    assert list(mine.state_dict_metadata) == list(stock.state_dict_metadata)
    for name, entry in stock.state_dict_metadata.items():
        found = mine.state_dict_metadata[name]
        assert type(found) is type(entry)
        if isinstance(entry, TensorStorageMetadata):
            assert type(found.size) is torch.Size
            assert {type(chunk.offsets) for chunk in found.chunks} == {torch.Size}
            assert found.properties.memory_format is torch.contiguous_format
    assert mine == stock


def write_checkpoint(folder: Path, source: dict[str, Any], pieces: int) -> None:
    """A door by hand: tensors in ``pieces`` boxes of one framed file, values in another."""
    flat, paths = flatten_state_dict(source)
    file, values_file = File(), bytearray()
    tensors, values = [], []
    for name, value in flat.items():
        if not isinstance(value, torch.Tensor):
            data = value_zip(pickle.dumps(value, protocol=2))
            values.append(ValueEntry(name, ("__values.bin", len(values_file), len(data))))
            values_file += data
            continue
        boxes = []
        rows = -(-value.shape[0] // pieces) if value.ndim and value.shape[0] > 1 else 0
        for at in range(0, value.shape[0] if rows else 1, rows or 1):
            part = value[at : at + rows] if rows else value
            # The archive has more than the box: torch takes the leading part of it.
            shown = value[at:] if rows else value
            boxes.append(((at, *(0,) * (value.ndim - 1))[: value.ndim], tuple(part.shape)))
            file.add(value, (tuple(shown.shape), value.numel() - shown.numel()))
        dtype = dtype_text(value.dtype)
        tensors.append(TensorEntry(name, dtype, tuple(value.shape), boxes, ()))
    places = iter([("../data/file.seg", *place) for place in file.close()])
    tensors = [entry._replace(places=[next(places) for _ in entry.boxes]) for entry in tensors]
    (folder / "door").mkdir()
    (folder / "data").mkdir()
    (folder / "data" / "file.seg").write_bytes(file.data)
    (folder / "door" / "__values.bin").write_bytes(values_file)
    (folder / "door" / METADATA_NAME).write_bytes(encode_metadata(tensors, values, paths))


@pytest.mark.parametrize("pieces", [1, 3])
def test_stock_dcp_loads_a_checkpoint_made_by_hand(tmp_path: Path, pieces: int) -> None:
    source = state()
    write_checkpoint(tmp_path, source, pieces)
    target, expected = blank(source), blank(source)
    dcp.load(target, checkpoint_id=tmp_path / "door")
    # DCP files the value under 3 as "3", also in what it saves itself.
    dcp.save(source, checkpoint_id=tmp_path / "stock")
    dcp.load(expected, checkpoint_id=tmp_path / "stock")
    assert_equal(target, expected)
    assert target.pop("int") == {3: "other", "3": 1}
    assert_equal(target, {key: value for key, value in source.items() if key != "int"})


def test_torch_converts_a_checkpoint_made_by_hand(tmp_path: Path) -> None:
    """The converter has no template: names, nesting and order come from the metadata alone."""
    source = state()
    write_checkpoint(tmp_path, source, 2)
    dcp_to_torch_save(tmp_path / "door", tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt", weights_only=False)
    assert_equal(found, {**source, "int": {"3": 1}})


def blank(value: Any) -> Any:
    """The same structure with other content."""
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    if isinstance(value, list):
        return [blank(item) for item in value]
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else "other"


def assert_equal(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_equal(found[key], expected[key])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        assert bits(found) == bits(expected)
    else:
        assert found == expected


def test_frames_and_metadata_of_20_000_tensors_are_quick() -> None:
    n = 20_000
    offsets = np.arange(n, dtype=np.int64) * 128 + 4134
    kinds = tuple(Kind("float32", (16, 1 + k), 0, 16 * (1 + k)) for k in range(50))
    table = FrameTable(offsets, offsets, (np.arange(n) % 50).astype(np.int32), kinds)
    entries = [
        TensorEntry(f"model.layers.{k}.weight", "float32", (16, 1), [((0, 0), (16, 1))],
                    [("../../segments/one.seg", 4096 + 128 * k, 3_000_000_000)])
        for k in range(n)
    ]  # fmt: skip
    paths = {entry.name: ("model", entry.name[6:]) for entry in entries}
    frames_s, metadata_s = [], []
    for _ in range(3):
        start = time.process_time()
        Frames(table, n * 128 + 8192).encode()
        frames_s.append(time.process_time() - start)
        start = time.process_time()
        data = encode_metadata(entries, (), paths)
        metadata_s.append(time.process_time() - start)
    assert min(frames_s) < 0.1
    assert min(metadata_s) < 0.3
    assert len(data) < 200 * n
