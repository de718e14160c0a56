"""Doors: whole or not at all, replaced in one step, and removed."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from groupio.backend import doors as module
from groupio.backend.doors import Doors
from groupio.backend.posix import PosixBackend
from groupio.errors import InvalidInput, StorageError, StorageFull


@pytest.fixture
def doors(tmp_path: Path) -> Iterator[Doors]:
    with PosixBackend.open(tmp_path, create=True, file_mode=0o666) as store, store.doors() as found:
        yield found


def make(doors: Doors, name: str, content: bytes) -> None:
    with doors.create(name) as new:
        for part in (".metadata", "__values.bin"):
            file = new.create(part)
            file.write(content[:2])
            file.write(memoryview(content)[2:])
            assert (file.size, file.digest()) == (len(content), blake3(content).digest())
            file.sync_close()
        new.publish()


def names(doors: Doors) -> list[str]:
    return sorted(os.listdir(doors.path))


def test_a_door_appears_whole(doors: Doors) -> None:
    assert doors.list() == []
    assert doors.read("7", ".metadata") is None
    with doors.create("7") as new:
        file = new.create(".metadata")
        file.write(b"content")
        file.sync_close()
        assert doors.list() == []
        new.publish()
    assert doors.list() == names(doors) == ["7"]
    assert doors.read("7", ".metadata") == b"content"
    assert doors.read("7", "other") is None
    assert doors.sizes("7") == {".metadata": 7}
    assert doors.sizes("8") == {}


def test_what_is_not_published_leaves_nothing(doors: Doors) -> None:
    with doors.create("7") as new:
        new.create("part").write(b"x")
    assert names(doors) == []


@pytest.mark.parametrize("exchange", [True, False])
def test_an_older_door_is_replaced(doors: Doors, monkeypatch: Any, exchange: bool) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EINVAL, "no flags")

    if not exchange:
        monkeypatch.setattr(module, "rename_with", refuse)
    make(doors, "7", b"older")
    make(doors, "7", b"newer!")
    assert doors.read("7", ".metadata") == b"newer!"
    assert names(doors) == ["7"]


def test_a_foreign_file_in_the_place_of_a_door_is_replaced(doors: Doors) -> None:
    make(doors, "1", b"one")
    Path(doors.path, "7").write_text("foreign")
    make(doors, "7", b"newer")
    assert doors.read("7", ".metadata") == b"newer"
    assert names(doors) == ["1", "7"]


def test_remove(doors: Doors) -> None:
    doors.remove("7")
    make(doors, "7", b"gone")
    doors.remove("7")
    doors.remove("7")
    assert names(doors) == []


def test_what_killed_processes_left_goes_after_an_hour(doors: Doors) -> None:
    make(doors, "7", b"x")
    for leftover, age in ((".7.tmp-old", 7200), (".7.tmp-new", 60)):
        path = Path(doors.path, leftover)
        path.mkdir()
        (path / "part").write_text("x")
        now = path.stat().st_mtime
        os.utime(path, (now - age, now - age))
    make(doors, "8", b"x")
    assert names(doors) == [".7.tmp-new", "7", "8"]


def test_a_door_has_the_modes_of_the_job_that_makes_it(tmp_path: Path) -> None:
    """Also in a store that was made with others: it has copies of the values in it."""
    with PosixBackend.open(tmp_path, create=True, file_mode=0o666) as store:
        store.ensure_store_record("job")
    with PosixBackend.open(tmp_path, create=False, umask=0o027) as store, store.doors() as doors:
        make(doors, "7", b"x")
    modes = [
        stat.S_IMODE((tmp_path / p).stat().st_mode) for p in ("dcp", "dcp/7", "dcp/7/.metadata")
    ]
    assert modes == [0o750, 0o750, 0o640]


def test_names_and_links_are_refused(doors: Doors, tmp_path: Path) -> None:
    for name in ("../7", ".7", "", "a/b"):
        with pytest.raises(InvalidInput):
            doors.create(name)
    with doors.create("7") as new, pytest.raises(InvalidInput):
        new.create("../part")
    doors.close()
    os.rename(doors.path, tmp_path / "real")
    os.symlink(tmp_path / "real", doors.path)
    with pytest.raises(StorageError, match="symbolic link"):
        doors.create("7")


@pytest.mark.parametrize(
    ("call", "number", "kind"),
    [
        ("pwrite", errno.ENOSPC, StorageFull),
        ("fsync", errno.EIO, StorageError),
        ("rename", errno.EROFS, StorageError),
        ("fchmod", errno.EPERM, StorageError),
    ],
)
def test_errors_of_the_system(
    doors: Doors, monkeypatch: Any, call: str, number: int, kind: type[StorageError]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    make(doors, "1", b"x")
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(kind):
            make(doors, "7", b"content")
    assert doors.list() == ["1"]
    assert names(doors) == ["1"]
