"""The arena: shared with another process, filled ahead of use, given back."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from groupio.agent import arena as arena_module
from groupio.agent.arena import MemberArena, map_shared, prefault
from groupio.errors import StagingFull
from groupio.model import PAGE_BYTES

MIB = 1 << 20


@pytest.fixture
def arena() -> Iterator[MemberArena]:
    made = MemberArena()
    yield made
    made.close()


def mapped_flags(arena: MemberArena) -> list[str]:
    """VmFlags of this process's mappings of ``arena``."""
    inode = str(os.fstat(arena.fd).st_ino)
    flags, inside = [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-", line):
            inside = line.split()[4] == inode
        elif inside and line.startswith("VmFlags:"):
            flags.append(line.split(":")[1])
    return flags


def address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def resident_here(view: memoryview) -> int:
    """Pages of ``view`` in this process's page table, in bytes."""
    address = address_of(view)
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(match[1], 16) == address
        elif inside and line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("not mapped")


def test_another_process_sees_the_bytes(arena: MemberArena) -> None:
    view = arena.map(4 * PAGE_BYTES, 2 * PAGE_BYTES)
    code = (
        "import mmap, sys\n"
        "m = mmap.mmap(int(sys.argv[1]), 6 * 4096)\n"
        "m[4 * 4096 : 4 * 4096 + 5] = b'hello'"
    )
    fd = os.dup(arena.fd)
    subprocess.run([sys.executable, "-c", code, str(fd)], pass_fds=[fd], check=True, timeout=60)
    os.close(fd)
    assert bytes(view[:6]) == b"hello\0"


def test_a_rank_cannot_shrink_it_under_the_agent(arena: MemberArena) -> None:
    view = arena.map(0, MIB)
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, 0)
    assert view[MIB - 1] == 0


def test_populate_gives_memory_and_keeps_content(arena: MemberArena) -> None:
    view = arena.map(0, 8 * MIB)
    view[:5] = b"bytes"
    assert arena.resident_bytes() < MIB
    arena.populate(0, 8 * MIB)
    assert arena.resident_bytes() == 8 * MIB
    assert resident_here(view) == 8 * MIB
    assert bytes(view[:5]) == b"bytes"


def test_populate_can_be_stopped_between_slices(
    arena: MemberArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena_module, "_SLICE_BYTES", MIB)
    answers = iter([False, False, True])
    arena.populate(0, 8 * MIB, should_stop=lambda: next(answers))
    assert arena.resident_bytes() == 2 * MIB


def test_memory_that_the_system_lacks_is_a_typed_error(
    arena: MemberArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(StagingFull, match="no memory for 1048576 bytes") as caught:
        arena.populate(0, MIB)
    assert caught.value.needed == MIB


def test_punch_gives_memory_back_and_leaves_zeros(arena: MemberArena) -> None:
    arena.populate(0, 4 * MIB)
    view = arena.map(0, 4 * MIB)
    view[:] = b"\xaa" * len(view)
    arena.punch(MIB, 2 * MIB)
    assert arena.resident_bytes() == 2 * MIB
    # Someone who still looks reads zeros instead of crashing.
    assert view[MIB] == 0
    assert view[0] == 0xAA
    again = arena.map(0, 4 * MIB)
    assert bytes(again[MIB : MIB + 4]) == bytes(4)
    assert again[4 * MIB - 1] == 0xAA
    arena.punch(64 * MIB, MIB)  # beyond the end: nothing there


def test_maps_are_cached_by_extent(arena: MemberArena) -> None:
    whole = arena.map(0, 4 * MIB)
    inner = arena.map(MIB, MIB)
    assert address_of(inner) == address_of(whole) + MIB
    assert len(mapped_flags(arena)) == 1
    del whole, inner
    larger = arena.map(0, 8 * MIB)
    assert len(mapped_flags(arena)) == 1, "the smaller map is gone"
    del larger
    arena.punch(0, PAGE_BYTES)
    assert mapped_flags(arena) == []


def test_forked_children_do_not_get_the_maps(arena: MemberArena) -> None:
    view = arena.map(0, MIB)
    assert all("dc" in flags.split() for flags in mapped_flags(arena))
    assert len(view) == MIB


@pytest.mark.parametrize(("offset", "length"), [(0, 0), (1, PAGE_BYTES), (0, 100), (-4096, 4096)])
def test_extents_are_whole_pages(arena: MemberArena, offset: int, length: int) -> None:
    for step in (arena.map, arena.populate, arena.punch):
        with pytest.raises(ValueError, match="whole pages"):
            step(offset, length)


def test_close_ends_it_but_not_views_in_use() -> None:
    arena = MemberArena()
    view = arena.map(0, MIB)
    view[:2] = b"ok"
    arena.close()
    arena.close()
    assert arena.fd == -1
    assert bytes(view[:2]) == b"ok"


def test_prefault_says_when_the_kernel_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    anonymous = mmap.mmap(-1, MIB)
    assert prefault(anonymous, 0, MIB)
    monkeypatch.setattr(arena_module, "_MADV_POPULATE_WRITE", 0x7FFF)
    assert not prefault(anonymous, 0, MIB)


def test_prefault_reports_pages_that_cannot_be_had() -> None:
    fd = os.memfd_create("cut")
    os.ftruncate(fd, MIB)
    mapped = map_shared(fd, 0, MIB)
    os.ftruncate(fd, 0)
    with pytest.raises(OSError, match="Bad address"):
        prefault(mapped, 0, MIB)
    mapped.close()
    os.close(fd)


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid():
        pytest.skip("only root can mount")
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8M", "tmpfs", place], check=True)
    yield place
    subprocess.run(["umount", place], check=True)


def test_memory_that_the_system_does_not_have_is_an_error_and_no_signal(small_tmpfs: Path) -> None:
    program = Path(__file__).with_name("full_tmpfs.py")
    done = subprocess.run(
        [sys.executable, program, small_tmpfs], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    errors = [line.split(":")[0] for line in done.stdout.splitlines()]
    assert errors == ["StagingFull", "StagingFull", "OSError", "OSError"]


def test_only_holes_are_filled(arena: MemberArena) -> None:
    arena.map(0, 8 * MIB)
    arena.back(0, 4 * MIB)
    assert arena.resident_bytes() == 4 * MIB
    arena.back(4 * MIB, 4 * MIB)[:] = b"x" * (4 * MIB)
    arena.punch(0, MIB)
    arena.back(0, 8 * MIB)
    assert arena.resident_bytes() == 8 * MIB
    assert bytes(arena.map(0, 8 * MIB)[4 * MIB :]) == b"x" * (4 * MIB)
