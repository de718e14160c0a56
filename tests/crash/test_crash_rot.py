"""Bit rot and lost files: found by load and by verify, located, and never taken for the truth."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forkserver import ForkServer
from whole_path import WORLD, Script, Step, agent, content_of, members, saves

from groupio.backend.posix import PosixBackend
from groupio.cli import main
from groupio.client.store_reader import StoreReader
from groupio.errors import FormatError, GroupIOError, IntegrityError, NotFound
from groupio.format.segment import SegmentReader

EPOCHS = (1, 2, 3)
FLIPS = 200


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with three epochs that share chunks, and an abort."""
    folder = tmp_path_factory.mktemp("rot")
    with ForkServer() as server:
        script = Script((*saves(1, 2), Step(3, diverge=True), Step(3)))
        told, code = server.play(script, folder / "store", folder / "runtime")
    assert code == 0, told
    return folder / "store"


@dataclass
class Patient:
    """A store that is hurt and healed again."""

    store: Path
    verify: Callable[..., Any]

    def file(self, folder: str, epoch: int, number: int = -1) -> Path:
        """One file of an epoch, by default its last."""
        return sorted((self.store / folder).glob(f"*-E{epoch:020d}-*"))[number]

    def damage(self, *arguments: str) -> list[dict[str, Any]]:
        """What verify finds; its exit code says the same."""
        code, document = self.verify(str(self.store), *arguments)
        assert code == (1 if document["damage"] else 0)
        found: list[dict[str, Any]] = document["damage"]
        return found

    def load(self, epoch: int, rank: int) -> dict[str, Any]:
        """One member's items of an epoch."""
        with StoreReader.open(self.store) as reader:
            return reader.read_items(reader.resolve(epoch), rank, threads=1)

    def damaged_loads(self, epochs: Sequence[int] = EPOCHS) -> list[GroupIOError]:
        """Load all members' items: right bytes, or an error that is returned."""
        errors: list[GroupIOError] = []
        for epoch in epochs:
            for rank in range(WORLD):
                try:
                    got = self.load(epoch, rank)
                except (IntegrityError, FormatError) as error:
                    errors.append(error)
                    continue
                assert_content(got, epoch, rank)
        return errors


@pytest.fixture
def patient(sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Patient:
    """A copy of the sound store, which a test may hurt."""

    def verify(*arguments: str) -> tuple[int, Any]:
        capsys.readouterr()
        code = main.run(["verify", *arguments, "--json"])
        captured = capsys.readouterr()
        return code, json.loads(captured.out) if captured.out else {"damage": [captured.err]}

    shutil.copytree(sound, tmp_path / "store")
    return Patient(tmp_path / "store", verify)


def flip(path: Path, at: int, mask: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ mask]))


def test_the_patient_is_sound(patient: Patient) -> None:
    assert patient.damage("--read-data") == []
    assert patient.damaged_loads() == []


def test_random_flips_in_segments(patient: Patient) -> None:
    chance = random.Random(20)
    segments = sorted((patient.store / "segments").iterdir())
    sizes = [path.stat().st_size for path in segments]
    indexes = {path: index_of(patient.store, path.name) for path in segments}
    in_chunks = 0
    for _ in range(FLIPS):
        (path,) = chance.choices(segments, sizes)
        at, mask = chance.randrange(path.stat().st_size), 1 << chance.randrange(8)
        flip(path, at, mask)
        chunk = next((c for start, end, c in indexes[path] if start <= at < end), None)
        found = patient.damage("--read-data")
        assert {damage["path"] for damage in found} == {str(path)}, (path, at)
        errors = patient.damaged_loads()
        if chunk is not None:
            in_chunks += 1
            assert {damage["chunk"] for damage in found} == {chunk}
            assert errors
        for error in errors:
            assert isinstance(error, IntegrityError)
            assert (error.path, error.chunk) == (str(path), chunk)
        flip(path, at, mask)
    assert in_chunks > 0.9 * FLIPS
    assert patient.damage("--read-data") == []


def index_of(store: Path, name: str) -> list[tuple[int, int, str]]:
    """The chunks of a segment: first byte, end, digest."""
    with (
        PosixBackend.open(store, create=False) as backend,
        backend.reader("segments", name) as reader,
    ):
        index = SegmentReader(reader.read, reader.size, reader.path).index
        return [
            (int(start), int(start + length), digest.tobytes().hex())
            for start, length, digest in zip(
                index.offsets, index.lengths, index.digests, strict=True
            )
        ]


@pytest.mark.parametrize("verify_each", [8, pytest.param(1, marks=pytest.mark.proof)])
def test_every_byte_of_a_manifest(patient: Patient, verify_each: int) -> None:
    chance = random.Random(21)
    path = patient.file("epochs", 2)
    for at in range(path.stat().st_size):
        mask = 1 << chance.randrange(8)
        flip(path, at, mask)
        # What only concerns another member's items may go unnoticed by one load, not by all.
        errors = patient.damaged_loads([2])
        assert errors, at
        assert {error.path for error in errors} == {str(path)}, (at, errors)
        if at % verify_each == 0:
            found = patient.damage("2")
            assert [damage["path"] for damage in found] == [str(path)], at
        flip(path, at, mask)
    assert patient.damage() == []


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.proof)])
def test_bytes_of_the_other_records(patient: Patient, step: int) -> None:
    aborted = patient.file("epochs", 3, 0)
    for path in (aborted, patient.store / "groupio.json"):
        for at in range(0, path.stat().st_size, step):
            flip(path, at, 1 << (at % 8))
            (found,) = patient.damage()
            assert str(path) in str(found), at
            flip(path, at, 1 << (at % 8))
    assert patient.damage() == []


def truncate(path: Path, other: Path) -> None:
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size // 2)


def extend(path: Path, other: Path) -> None:
    with open(path, "ab") as file:
        file.write(bytes(1))


def swap(path: Path, other: Path) -> None:
    kept = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(kept)


def zero(path: Path, other: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def empty(path: Path, other: Path) -> None:
    path.write_bytes(b"")


def remove(path: Path, other: Path) -> None:
    path.unlink()


WAYS = [truncate, extend, swap, zero, empty, remove]


@pytest.mark.parametrize("hurt", WAYS)
@pytest.mark.parametrize("folder", ["segments", "epochs"])
def test_files_that_are_not_what_they_were(
    patient: Patient, folder: str, hurt: Callable[[Path, Path], None]
) -> None:
    path, other = patient.file(folder, 3), patient.file(folder, 2)
    hurt(path, other)
    found = patient.damage("--read-data")
    assert any(str(path) == damage["path"] for damage in found), found
    if folder == "epochs" and hurt is remove:
        with pytest.raises(NotFound):  # its appearance was the commit
            patient.load(3, 0)
        return
    errors = patient.damaged_loads()
    if folder == "segments" and hurt is extend:
        assert errors == []  # every chunk is where it was
        return
    assert errors
    for error in errors:
        assert error.path in (str(path), str(other))
        assert folder == "epochs" or getattr(error, "chunk", None)


@pytest.mark.parametrize("hurt", [truncate, swap, zero, remove])
@pytest.mark.parametrize("folder", ["segments", "epochs"])
def test_latest_says_so_and_fallback_takes_the_newest_intact_epoch(
    patient: Patient, tmp_path: Path, folder: str, hurt: Callable[[Path, Path], None]
) -> None:
    if folder == "segments":
        path, other = patient.file(folder, 3, 0), patient.file(folder, 3, 1)
    else:
        path, other = patient.file(folder, 3), patient.file(folder, 1)
    hurt(path, other)
    runtime = tmp_path / "runtime"
    with agent(runtime), members(patient.store, runtime) as clients:
        failed = [client for client in clients if not loads_latest(client, {path, other})]
        if (folder, hurt) == ("epochs", remove):
            assert not failed  # there is no such commit
            return
        # Each segment has something of one member, or of both.
        assert failed
        assert folder == "segments" or failed == clients
        for client in failed:
            assert_content(client.load(fallback=True), 2, client.rank)
            ((epoch, why),) = client.skipped_epochs
            assert epoch == 3
            assert str(path) in why or str(other) in why


def loads_latest(client: Any, hurt: set[Path]) -> bool:
    """The newest epoch loads as it was saved; False when it says what is hurt."""
    try:
        got = client.load()
    except (IntegrityError, FormatError) as error:
        return error.path not in set(map(str, hurt))
    assert_content(got, got["step"], client.rank)
    return True


def assert_content(got: dict[str, Any], content: int, rank: int) -> None:
    wanted = content_of(content, rank)
    assert list(got) == list(wanted)
    for name, value in wanted.items():
        assert np.array_equal(got[name], value), name
