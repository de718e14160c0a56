"""State dicts for the tests of doors, and what unmodified torch makes of a door."""

from __future__ import annotations

import json
import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

import groupio.torch as gt
from groupio.client.store_reader import StoreReader
from groupio.door.publish import has_door
from groupio.format.segment import SegmentReader


def save(state: Any, store: str, step: int, **more: Any) -> None:
    """Save an epoch and wait for it and its door."""
    handle = gt.save(state, store, step=step, **more)
    notes = handle.wait("durable", 60).notes
    assert not [note for note in notes if note.startswith("door")], notes


def nested() -> dict[str, Any]:
    """A model, its optimizer, and plain values of all kinds."""
    torch.manual_seed(1)
    weight = torch.randn(1500, 1000)
    return {
        "model": {"w": weight, "b": torch.randn(7), "half": torch.randn(33, 9).bfloat16()},
        "optim": {
            "state": {
                "0": {"step": torch.tensor(3.0), "exp_avg": torch.randn(1500, 1000)},
                "1": {"step": 7, "exp_avg": torch.randn(7)},
            },
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0, 1]}, {"lr": 1e-3}],
        },
        "list": [torch.ones(2), {"deep": [1, torch.zeros(3)]}],
        "plain": [None, True, 1 << 70, -0.0, float("nan"), 1j, "é\0", b"\0\xff", (1, {"a": [2]})],
        "array": np.arange(6, dtype=">i4").reshape(2, 3),
        "scalar": np.float32(1.5),
        "tuple of lists": ([1, 2], {"a": 3}),
    }


def stock_load(store: str, step: int, template: Any) -> Any:
    """``template`` filled by torch alone; its values are other ones before."""
    wiped = wipe(template)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(wiped, checkpoint_id=f"{store}/dcp/{step}")
    return wiped


def wipe(value: Any) -> Any:
    """The same state dict with other content; tensors are new ones."""
    if isinstance(value, torch.Tensor):
        garbage = torch.full((value.numel() * value.element_size(),), 0x55, dtype=torch.uint8)
        if value.dtype == torch.bool:
            garbage.fill_(1)
        return garbage.view(value.dtype).reshape(value.shape)
    if isinstance(value, dict):
        return {key: wipe(child) for key, child in value.items()}
    if isinstance(value, list):
        return [wipe(child) for child in value]
    return "wiped"


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor, row-major."""
    plain = tensor.detach().contiguous().reshape(-1)
    return bytes(plain.view(torch.uint8).numpy().tobytes()) if plain.numel() else b""


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """The paths at which the two differ in type, dtype, shape or bits."""
    if type(one) is not type(other):
        return [f"{path}: {type(one).__name__} and {type(other).__name__}"]
    if isinstance(one, torch.Tensor):
        same = (one.dtype, one.shape) == (other.dtype, other.shape)
        return [] if same and bits(one) == bits(other) else [path]
    if isinstance(one, dict):
        if list(one) != list(other):
            return [f"{path}: {list(one)} and {list(other)}"]
        return [d for key in one for d in differences(one[key], other[key], f"{path}[{key!r}]")]
    if isinstance(one, list | tuple):
        if len(one) != len(other):
            return [f"{path}: {len(one)} and {len(other)} entries"]
        pairs = enumerate(zip(one, other, strict=True))
        return [d for i, (a, b) in pairs for d in differences(a, b, f"{path}[{i}]")]
    if isinstance(one, np.ndarray):
        same = (one.dtype, one.shape) == (other.dtype, other.shape)
        return [] if same and one.tobytes() == other.tobytes() else [path]
    return [] if one == other or (one != one and other != other) else [path]


def door_files(store: str, step: int) -> dict[str, int]:
    """The files of a door and their sizes."""
    return {path.name: path.stat().st_size for path in Path(store, "dcp", str(step)).iterdir()}


def is_current(store: str, step: int) -> bool:
    """Whether the door of the epoch is there, whole."""
    with StoreReader.open(store) as reader, reader.backend.doors() as doors:
        return has_door(doors, reader.resolve(step).header)


def pieces(store: str, step: int) -> dict[str, list[tuple[str, int]]]:
    """Name -> file and offset of the archive of each piece of a tensor or value."""
    metadata = dcp.FileSystemReader(f"{store}/dcp/{step}").read_metadata()
    found: dict[str, list[tuple[str, int]]] = {}
    for index, info in metadata.storage_data.items():
        found.setdefault(index.fqn, []).append((info.relative_path, info.offset))
    return found


def runs(store: str) -> int:
    """How many runs the segments of the store have."""
    count = 0
    for path in Path(store, "segments").iterdir():
        with path.open("rb") as file:
            read = partial(os.pread, file.fileno())
            frames = SegmentReader(
                lambda at, n, read=read: read(n, at),  # type: ignore[misc]
                path.stat().st_size,
                str(path),
            ).frames
        assert frames is not None
        count += len(set(frames.table.run_offsets.tolist()))
    return count


def record(store: str, step: int) -> Any:
    """``groupio.json`` of the door."""
    return json.loads(Path(store, "dcp", str(step), "groupio.json").read_bytes())
