"""What a real job saved, through the command line: list, verify, export, and find every bit."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from cli_help import Command

import groupio as library
from groupio.client.store_reader import StoreReader

RANKS = 3
EPOCHS = (1, 2)


def items(rank: int, epoch: int) -> dict[str, Any]:
    return {
        "shared": np.arange(3 << 20, dtype=np.float32),
        "own": np.full((1000, 500), rank + epoch / 8),
        "step": epoch,
    }


def save_all(store: Path) -> None:
    """Every rank saves every epoch."""

    def run(rank: int) -> None:
        with library.connect(store, rank=rank, world_size=RANKS) as client:
            for epoch in EPOCHS:
                client.save(items(rank, epoch), epoch=epoch).wait("durable", timeout_s=100)

    with ThreadPoolExecutor(RANKS) as pool:
        list(pool.map(run, range(RANKS)))


@pytest.fixture
def store(groupio: Command, tmp_path: Path) -> Path:
    path = tmp_path / "store"
    try:
        save_all(path)
    finally:
        assert groupio("agent", "drain").code == 0
    return path


def test_a_job_is_listed_verified_and_exported(
    groupio: Command, store: Path, tmp_path: Path
) -> None:
    listed = groupio("ls", store, "--json").json
    assert [epoch["epoch"] for epoch in listed["epochs"]] == list(EPOCHS)
    first, second = listed["epochs"]
    logical = sum(v.nbytes for v in items(0, 1).values() if isinstance(v, np.ndarray))
    assert first["bytes_logical"] >= RANKS * logical
    assert first["bytes_unique"] < first["bytes_logical"] / 1.5
    assert second["bytes_stored"] < first["bytes_stored"] - (12 << 20)

    verified = groupio("verify", store, "--read-data", "--json")
    assert verified.code == 0, verified.out
    assert verified.json["epochs"] == list(EPOCHS)
    assert verified.json["leftovers"] == []
    assert groupio("doctor", store).code == 0

    to = tmp_path / "out"
    assert groupio("export", store, "latest", "--to", to).code == 0
    for member in json.loads((to / "index.json").read_text())["members"]:
        data = (to / member["folder"] / "tensors.safetensors").read_bytes()
        tensors = {name: bytes(about["data"]) for name, about in safetensors.deserialize(data)}
        saved = items(member["rank"], 2)
        assert tensors == {name: saved[name].tobytes() for name in ("shared", "own")}


def test_any_flipped_bit_of_a_job_is_found(groupio: Command, store: Path) -> None:
    chance = random.Random(7)
    files = sorted(p for p in store.rglob("*") if p.is_file())
    for path in files:
        for _ in range(2):
            data = bytearray(path.read_bytes())
            at, bit = chance.randrange(len(data)), 1 << chance.randrange(8)
            data[at] ^= bit
            path.write_bytes(data)
            done = groupio("verify", store, "--read-data")
            assert done.code == 1, f"{path.name} at {at}"
            assert path.name in done.out + done.err
            data[at] ^= bit
            path.write_bytes(data)
    assert groupio("verify", store, "--read-data").code == 0


def test_truncated_and_missing_files_of_a_job_are_found(groupio: Command, store: Path) -> None:
    for path in sorted(p for p in store.rglob("*") if p.is_file()):
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2])
        assert groupio("verify", store).code in ((1,) if path.parent != store else (1, 2))
        path.unlink()
        assert groupio("verify", store).code in ((1,) if path.parent != store else (2,)), path.name
        path.write_bytes(data)
    assert groupio("verify", store).code == 0


@pytest.mark.proof
@pytest.mark.timeout(900)
def test_two_hundred_flipped_bits_are_found_and_never_loaded(groupio: Command, store: Path) -> None:
    chance = random.Random(42)
    files = sorted(p for p in store.rglob("*") if p.is_file())
    good = {(rank, epoch): items(rank, epoch) for rank in range(RANKS) for epoch in EPOCHS}
    for number in range(200):
        path = chance.choice(files)
        data = bytearray(path.read_bytes())
        at, bit = chance.randrange(len(data)), 1 << chance.randrange(8)
        data[at] ^= bit
        path.write_bytes(data)
        where = f"flip {number}: byte {at} of {path.name}"
        assert groupio("verify", store, "--read-data").code == 1, where
        rank, epoch = chance.choice(sorted(good))
        loaded = load(store, rank, epoch)
        assert loaded is None or same(loaded, good[rank, epoch]), where
        data[at] ^= bit
        path.write_bytes(data)


def load(store: Path, rank: int, epoch: int) -> dict[str, Any] | None:
    """The items, or None when the load said that something is damaged."""
    try:
        with StoreReader.open(store) as reader:
            return reader.read_items(reader.resolve(epoch), rank)
    except (library.IntegrityError, library.FormatError, library.NotFound):
        return None


def same(loaded: dict[str, Any], saved: dict[str, Any]) -> bool:
    return loaded.keys() == saved.keys() and all(
        np.array_equal(loaded[name], saved[name]) for name in saved
    )
