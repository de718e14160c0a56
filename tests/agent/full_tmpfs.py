"""Uses arenas and windows whose files lie in a small tmpfs, at argv[1], instead of in memfds: what
touches a page that the system cannot give dies here by SIGBUS, as under a strict overcommit."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path

from groupio.agent import arena, read_window
from groupio.agent.arena import MemberArena
from groupio.agent.read_window import ReadWindow
from groupio.client.arena import ClientArena
from groupio.errors import StagingFull

MIB = 1 << 20
ROOM = Path(sys.argv[1])


def new_file(name: str) -> int:
    path = ROOM / name
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    path.unlink()
    return fd


def fill_up() -> Path:
    path = ROOM / "full"
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(MIB))
        except OSError:
            return path


def fails(step: Callable[[], object], kind: type[Exception]) -> None:
    try:
        step()
    except kind as error:
        print(f"{type(error).__name__}: {error}")
    else:
        raise AssertionError("there was room")


def touch(address: int, length: int) -> None:
    ctypes.memset(address, 1, length)


def main() -> None:
    arena.sealed_memfd = read_window.sealed_memfd = new_file
    fd = new_file("ranks")
    os.ftruncate(fd, 64 * MIB)
    ranks = ClientArena(os.dup(fd))
    fails(lambda: ranks.address(0, 32 * MIB), StagingFull)
    agents = MemberArena()
    agents._fd, agents._size = fd, 64 * MIB
    agents.punch(0, 64 * MIB)
    _, address = ranks.address(0, 2 * MIB)
    touch(address, 2 * MIB)
    agents.punch(0, 2 * MIB)
    full = fill_up()
    fails(lambda: ranks.address(0, 2 * MIB), StagingFull)  # a range that is mapped already
    fails(lambda: agents.back(0, 2 * MIB), OSError)
    full.unlink()
    _, address = ranks.address(0, 2 * MIB)
    touch(address, 2 * MIB)
    assert bytes(agents.back(0, 2 * MIB)[:4]) == b"\1" * 4

    window = ReadWindow(64 * MIB)
    slot = window.arriving.take(0, 2 * MIB)
    assert slot is not None
    full = fill_up()
    fails(lambda: window.view(slot), OSError)
    full.unlink()
    window.view(slot)[:] = bytes(2 * MIB)
    window.close()


if __name__ == "__main__":
    main()
