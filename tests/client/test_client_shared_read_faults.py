"""A rank that dies, fails or hangs in a grouped read: all others raise, name it, leave nothing."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from client_store import StoreBuilder
from shared_ranks import Outcome, Role, run

from groupio.client import shared_link
from groupio.client.shared_link import LinkFailed, Meeting, host_identity
from groupio.errors import GroupAborted, GroupTimeout, StagingFull, StorageError
from groupio.model import CHUNK_BYTES

CHUNKS = 10
RANKS = [3, 4, 5]
"""Numbers in the job; the hub is rank 3."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    builder = StoreBuilder(tmp_path_factory.mktemp("faults") / "store")
    random = np.random.default_rng(8)
    builder.commit(1, [{f"large.{i}": random.bytes(CHUNK_BYTES) for i in range(CHUNKS)}])
    yield builder.path
    builder.close()


def roles_with(place: int, act: str, point: str, seconds: float = 0.0) -> list[Role]:
    roles = [Role(range(CHUNKS)) for _ in RANKS]
    roles[place].act, roles[place].point, roles[place].seconds = act, point, seconds
    return roles


def survivors(store: Path, roles: list[Role], place: int) -> list[Outcome]:
    """What became of the others; none of them leaves anything behind."""
    outcomes = run(store, roles, window_bytes=1, ranks=RANKS)
    others = [outcome for number, outcome in enumerate(outcomes) if number != place]
    for outcome in outcomes:
        if outcome is not None:
            assert (outcome.fds_left, outcome.threads_left, outcome.maps_left) == ([], 0, 0)
    assert all(outcome is not None for outcome in others)
    return [outcome for outcome in others if outcome is not None]


@pytest.mark.parametrize("point", ["linked", "fill", "read:1", "read:3", "copy:1", "copy:2"])
@pytest.mark.parametrize("place", [0, 2], ids=["hub", "other"])
def test_a_killed_rank_is_named_by_all_within_a_second(store: Path, place: int, point: str) -> None:
    start = time.monotonic()
    others = survivors(store, roles_with(place, "kill", point), place)
    for outcome in others:
        assert type(outcome.error) is GroupAborted
        assert outcome.error.members == (RANKS[place],)
        assert f"rank {RANKS[place]}" in outcome.error.message
        assert outcome.error.epoch == 1
    ends = [outcome.ended_at for outcome in others]
    assert max(ends) - min(ends) < 1.0
    assert max(ends) - start < 10.0  # the deadlines are at 30 s


@pytest.mark.parametrize("place", [0, 1], ids=["hub", "other"])
def test_a_rank_that_ends_after_its_part_is_not_missed(store: Path, place: int) -> None:
    others = survivors(store, roles_with(place, "kill", "done"), place)
    assert all(outcome.error is None and outcome.content for outcome in others)


@pytest.mark.parametrize("point", ["fill", "read:2", "copy:2"])
@pytest.mark.parametrize("place", [0, 2], ids=["hub", "other"])
def test_a_failed_rank_tells_all_why(store: Path, place: int, point: str) -> None:
    for outcome in survivors(store, roles_with(place, "fail", point), place):
        assert type(outcome.error) is StorageError
        assert outcome.error.message == f"rank {RANKS[place]}: the disk is on fire"
        assert outcome.error.errno == 5


@pytest.mark.parametrize(
    ("act", "kind", "word"),
    [("no map", StagingFull, "ulimit -v"), ("no thread", GroupAborted, "ulimit -u")],
)
@pytest.mark.parametrize("place", [0, 2], ids=["hub", "other"])
def test_a_limit_of_one_rank_is_told_to_all(
    store: Path, place: int, act: str, kind: type, word: str
) -> None:
    outcomes = run(store, roles_with(place, act, "fill"), window_bytes=1, ranks=RANKS)
    for outcome in outcomes:
        assert outcome is not None
        assert type(outcome.error) is kind
        assert word in outcome.error.message


@pytest.mark.parametrize("place", [0, 2], ids=["hub", "other"])
def test_a_defect_of_one_rank_is_raised_by_all(store: Path, place: int) -> None:
    for outcome in survivors(store, roles_with(place, "break", "copy:2"), place):
        assert type(outcome.error) is GroupAborted
        assert outcome.error.members == (RANKS[place],)
        assert "ZeroDivisionError: a defect" in outcome.error.message


@pytest.mark.parametrize("place", [0, 2], ids=["hub", "other"])
def test_a_rank_that_does_not_come_is_named_after_the_deadline(store: Path, place: int) -> None:
    roles = roles_with(place, "late", "fill", 3.5)
    for number, role in enumerate(roles):
        role.deadline_s = 30.0 if number == place else 0.5
    for outcome in survivors(store, roles, place):
        assert type(outcome.error) is GroupTimeout
        assert outcome.error.missing == (RANKS[place],)


@pytest.mark.parametrize("place", [0, 2], ids=["hub", "other"])
def test_a_store_that_hangs_ends_at_the_deadline(store: Path, place: int) -> None:
    roles = roles_with(place, "late", "read:2", 3.0)
    for role in roles:
        role.deadline_s = 1.5
    outcomes = run(store, roles, window_bytes=1, ranks=RANKS)
    for number, outcome in enumerate(outcomes):
        assert outcome is not None
        if number == place:
            assert type(outcome.error) is StorageError
            assert outcome.error.errno == errno.ETIMEDOUT
        else:
            named = getattr(outcome.error, "missing", ()) or outcome.error.message
            assert str(RANKS[place]) in str(named)


def test_a_stranger_is_not_let_in() -> None:
    meeting = Meeting()
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect("\0" + meeting.address.name)
        stranger.sendall(b"\x07\x00\x00\x00garbage")
        with pytest.raises(LinkFailed, match="0 of 1 ranks connected"):
            meeting.link([0, 1], 0, meeting.address, 0.4)
    meeting.close()
    other = Meeting()
    with pytest.raises(LinkFailed, match="Refused"):
        other.link([0, 1], 1, meeting.address, 0.4)
    other.close()


def test_another_user_is_refused_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    meeting, other = Meeting(), Meeting()
    monkeypatch.setattr(shared_link.os, "geteuid", lambda: 12345)
    with pytest.raises(LinkFailed, match="another user"):
        other.link([0, 1], 1, meeting.address, 0.4)
    with pytest.raises(LinkFailed, match="0 of 1"):
        meeting.link([0, 1], 0, meeting.address, 0.4)
    meeting.close()
    other.close()


def test_processes_of_one_host_and_user_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = host_identity()
    assert mine == host_identity()
    monkeypatch.setattr(shared_link.os, "geteuid", lambda: 12345)
    assert host_identity() != mine
