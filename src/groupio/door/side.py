"""The side files of a door: values, and the chunks that lie nowhere in a form that torch reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

import numpy as np
from blake3 import blake3

from groupio.backend.base import SEGMENTS, Backend, RandomReader
from groupio.client.chunk_reader import damage
from groupio.door.values import pickle_value
from groupio.errors import IntegrityError
from groupio.format.frames import LOCAL_HEADER, Frames, FrameTable, Kind, value_zip
from groupio.format.manifest import ManifestReader

VALUES = "__values.bin"
"""The file with the values: an archive for each, one behind the other."""

EXTRA = "__extra.bin"
"""The file with copied chunks; a second one is called ``__extra-1.bin``."""

EXTRA_BYTES = 2 << 30
"""A file of copied chunks ends near this size: the offsets in an archive have 32 bits."""

Place = tuple[str, int, int]
"""Where an archive is: path relative to the door, offset, length."""


class SideFile(Protocol):
    """A new file of a door: :class:`groupio.backend.doors.DoorFile`."""

    size: int

    def write(self, data: bytes | memoryview) -> None:
        """Append ``data``."""
        ...

    def sync_close(self) -> None:
        """Make the bytes durable and close."""
        ...


Create = Callable[[str], SideFile]


def write_values(values: Mapping[str, Any], create: Create) -> dict[str, Place]:
    """Write the values; where each is. Equal bytes are written once. No file without values."""
    places: dict[str, Place] = {}
    known: dict[bytes, tuple[int, int]] = {}
    file: SideFile | None = None
    for name, value in values.items():
        pickled = pickle_value(value)
        content = blake3(pickled).digest()
        if content not in known:
            file = file or create(VALUES)
            archive = value_zip(pickled)
            known[content] = file.size, len(archive)
            file.write(archive)
        places[name] = (VALUES, *known[content])
    if file is not None:
        file.sync_close()
    return places


@dataclass(slots=True)
class _File:
    """One file of copies: runs of chunks, and the rows that make tensors of them."""

    name: str
    size: int = 0
    runs: dict[tuple[int, ...], int] = field(default_factory=dict)
    rows: dict[tuple[int, Kind], int] = field(default_factory=dict)
    frames: Frames | None = None


class Copies:
    """Chunks that are to be copied; equal ones are copied once, whatever the tensors are."""

    def __init__(self, backend: Backend, manifest: ManifestReader) -> None:
        self._backend = backend
        self._manifest = manifest
        self._lengths = manifest.chunks.lengths
        self._files: list[_File] = []
        self._homes: dict[tuple[int, ...], _File] = {}
        self._wanted: list[tuple[_File, int, list[Place], int]] = []

    def add(
        self, rows: tuple[int, ...], dtype: str, shape: tuple[int, ...], places: list[Place]
    ) -> None:
        """Copy the chunks ``rows``, which are the whole tensor of ``shape``.

        Where they are is appended to ``places``; it is true after :meth:`write`.
        """
        file = self._homes.get(rows)
        if file is None:
            length = int(self._lengths[list(rows)].sum())
            if not self._files or self._files[-1].size + length > EXTRA_BYTES:
                number = len(self._files)
                name = EXTRA if not number else EXTRA.replace(".", f"-{number}.")
                self._files.append(_File(name))
            file = self._homes[rows] = self._files[-1]
            file.runs[rows] = file.size + len(LOCAL_HEADER)
            file.size += len(LOCAL_HEADER) + length
        key = (file.runs[rows], Kind(dtype, shape, 0, prod(shape)))
        row = file.rows.setdefault(key, len(file.rows))
        self._wanted.append((file, row, places, len(places)))
        places.append((file.name, 0, 0))

    def write(self, create: Create, pause: Callable[[], None]) -> None:
        """Write the files; ``pause`` is called before each chunk.

        Every chunk is verified on the way: IntegrityError names the first damaged one.
        """
        with _Source(self._backend, self._manifest) as source:
            for file in self._files:
                target = create(file.name)
                for rows in file.runs:
                    target.write(LOCAL_HEADER)
                    for row in rows:
                        pause()
                        target.write(source.chunk(row))
                file.frames = _frames(file)
                target.write(file.frames.encode())
                target.sync_close()
        for file, number, places, at in self._wanted:
            assert file.frames is not None
            places[at] = (file.name, *file.frames.slice_of(number))

    @property
    def bytes(self) -> int:
        """The bytes of the chunks that are copied."""
        heads = sum(len(file.runs) for file in self._files) * len(LOCAL_HEADER)
        return sum(file.size for file in self._files) - heads


def _frames(file: _File) -> Frames:
    kinds: dict[Kind, int] = {}
    numbers = [kinds.setdefault(kind, len(kinds)) for _, kind in file.rows]
    starts = np.array([start for start, _ in file.rows], np.int64)
    return Frames(FrameTable(starts, starts, np.array(numbers, np.int32), tuple(kinds)), file.size)


class _Source:
    """Reads chunks of the epoch, one after the other."""

    def __init__(self, backend: Backend, manifest: ManifestReader) -> None:
        self._backend = backend
        self._manifest = manifest
        self._readers: dict[int, RandomReader] = {}

    def chunk(self, row: int) -> bytes:
        """The verified bytes of a chunk."""
        table = self._manifest.chunks
        segment = int(table.segments[row])
        digest = table.digests[row].tobytes()
        name = self._manifest.segments[segment].name
        try:
            if segment not in self._readers:
                self._readers[segment] = self._backend.reader(SEGMENTS, name)
            data = self._readers[segment].read(int(table.offsets[row]), int(table.lengths[row]))
        except IntegrityError:
            data = b""
        if blake3(data).digest() != digest:
            path = f"{self._backend.path}/{SEGMENTS}/{name}"
            raise damage(path, digest, 1, self._manifest.header.epoch)
        return data

    def __enter__(self) -> _Source:
        return self

    def __exit__(self, *_: object) -> None:
        for reader in self._readers.values():
            reader.close()
