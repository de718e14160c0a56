"""Memory that was freed in pieces goes back to the system, but not between saves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from groupio.agent.rest import REST_S, Rest, give_back

MIB = 1 << 20
PIECE = 64 << 10


def resident() -> int:
    """The private memory of this process, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no RssAnon")


def test_what_was_freed_between_pieces_in_use_is_given_back() -> None:
    give_back()
    before = resident()
    # Too small for pages of their own, and every other one stays.
    pieces: list[bytearray | None] = [bytearray(b"x") * PIECE for _ in range(128 * MIB // PIECE)]
    pieces[::2] = [None] * len(pieces[::2])
    freed = resident()
    give_back()
    print(f"{before >> 20} MiB before, {freed >> 20} freed, {resident() >> 20} given back")
    assert resident() < freed - 32 * MIB
    assert pieces[1] == b"x" * PIECE


def test_it_is_given_back_once_and_only_after_a_rest() -> None:
    ran: list[Callable[[], None]] = []
    clock = [0.0]
    rest = Rest(ran.append, lambda: clock[0])

    def look(at: float) -> int:
        clock[0] = at
        rest.look()
        return len(ran)

    assert look(100.0) == 0, "nothing has happened yet"
    rest.group_over()
    assert look(100.0 + REST_S - 0.1) == 0
    rest.group_over()
    assert look(100.0 + REST_S + 0.1) == 0, "another group ended meanwhile"
    assert look(100.0 + 2 * REST_S) == 1
    assert look(100.0 + 9 * REST_S) == 1
    assert ran == [give_back]
