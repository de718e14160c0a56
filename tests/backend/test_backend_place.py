"""Whether the path of one process and a descriptor of another are one directory."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from groupio.backend import place
from groupio.errors import StorageError


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where one network file system is mounted twice: only files tell."""
    monkeypatch.setattr(os.path, "samestat", lambda a, b: False)


@pytest.fixture
def shown(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "a").mkdir()
    fd = os.open(tmp_path / "a", os.O_PATH)
    yield fd
    os.close(fd)


def test_the_deepest_directory_that_exists(tmp_path: Path, shown: int) -> None:
    status = os.stat(tmp_path / "a")
    known = (status.st_dev, status.st_ino)
    assert place.find_place(str(tmp_path / "a")) == (*known, "")
    assert place.find_place(str(tmp_path / "a/b/c")) == (*known, "b/c")
    assert place.find_place("b/c", shown) == (*known, "b/c")
    assert place.find_place("", shown) == (*known, "")
    (tmp_path / "a" / "file").touch()
    assert place.find_place(str(tmp_path / "a/file")) == (*known, "file")


@pytest.mark.usefixtures("two_devices")
def test_a_new_file_tells_whether_two_directories_are_one(
    tmp_path: Path, shown: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, "LOOK_S", 0.1)
    (tmp_path / "b").mkdir()
    for rest in ("", "later"):
        assert place.is_same_place(str(tmp_path / "a" / rest), shown, rest)
        assert not place.is_same_place(str(tmp_path / "b" / rest), shown, rest)
    assert not list(tmp_path.glob("*/*"))


@pytest.mark.usefixtures("two_devices")
def test_a_file_that_is_seen_late(
    tmp_path: Path, shown: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[bool] = []
    really = place._is_in

    def late(directory: int, name: str) -> bool:
        looks.append(len(looks) >= 3 and really(directory, name))
        return looks[-1]

    monkeypatch.setattr(place, "_is_in", late)
    assert place.is_same_place(str(tmp_path / "a"), shown, "")
    assert looks == [False, False, False, True]


def test_a_directory_that_another_process_is_just_making(tmp_path: Path, shown: int) -> None:
    path = tmp_path / "b"
    made = threading.Timer(0.05, path.symlink_to, (tmp_path / "a",))
    made.start()
    assert place.is_same_place(str(path), shown, "")
    made.join()


@pytest.mark.usefixtures("two_devices")
def test_where_no_file_can_be_made(tmp_path: Path, shown: int) -> None:
    (tmp_path / "a").rmdir()
    (tmp_path / "a").touch()
    gone = os.open(".", os.O_PATH, dir_fd=shown)
    try:
        with pytest.raises(StorageError, match="prove which directory is at"):
            place.is_same_place(f"/proc/self/fd/{gone}", shown, "")
    finally:
        os.close(gone)
