"""Members agree, or all of them raise; a member that does not answer is named."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from groupio.errors import (
    GroupAborted,
    GroupIOError,
    GroupTimeout,
    InvalidInput,
    NotFound,
    StateMismatch,
)
from groupio.torch import members
from groupio.torch.members import Council, Members, find_members

groups = itertools.count()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.HashStore:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=5))
    monkeypatch.setattr(members, "_store", lambda: store)
    monkeypatch.setattr(members, "VERDICT_MARGIN_S", 3.0)
    return store


def together(
    world: int, act: Callable[[Council, int], Any], absent: tuple[int, ...] = (), wait: float = 3.0
) -> list[Any]:
    """What each rank got: a result or an error of groupio."""
    group = f"group{next(groups)}"

    def one(rank: int) -> Any:
        try:
            return act(Council(Members(rank, world, group), "load", wait), rank)
        except GroupIOError as error:
            return error

    ranks = [rank for rank in range(world) if rank not in absent]
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(one, ranks))


def test_all_get_what_rank_0_decides(store: dist.HashStore) -> None:
    def act(council: Council, rank: int) -> Any:
        first = council.decide({"n": rank}, lambda all_: {"sum": sum(o["n"] for o in all_)})
        second = council.decide({"n": 1}, lambda all_: {"again": len(all_)})
        return first["sum"], second["again"]

    assert together(4, act) == [(6, 4)] * 4


def test_a_failure_of_one_is_raised_by_all_and_names_it(store: dist.HashStore) -> None:
    def act(council: Council, rank: int) -> Any:
        mine: Any = {"ok": 1}
        if rank == 2:
            mine = StateMismatch("3 differences", missing=["a", "b"])
        return council.decide(mine, lambda all_: {"fine": 1})

    errors = together(4, act)
    assert all(type(error) is StateMismatch for error in errors)
    assert errors[2].message == "3 differences"
    assert {e.message for i, e in enumerate(errors) if i != 2} == {"rank 2: 3 differences"}
    assert all(error.missing == ("a", "b") for error in errors)


def test_a_failure_of_rank_0_or_of_its_judgement_reaches_all(store: dist.HashStore) -> None:
    def judge(opinions: list[dict[str, Any]]) -> dict[str, Any]:
        raise NotFound("no epoch")

    assert [type(e) for e in together(3, lambda c, r: c.decide({}, judge))] == [NotFound] * 3

    def act(council: Council, rank: int) -> Any:
        return council.decide(NotFound("mine") if rank == 0 else {}, lambda all_: {})

    assert [e.message for e in together(3, act)] == ["mine", "rank 0: mine", "rank 0: mine"]


@pytest.mark.parametrize(("absent", "named"), [((1, 3), (1, 3)), ((0,), (0,))])
def test_absent_members_are_named(
    store: dist.HashStore, absent: tuple[int, ...], named: tuple[int, ...]
) -> None:
    errors = together(4, lambda c, r: c.decide({}, lambda all_: {}), absent, wait=0.5)
    assert len(errors) == 4 - len(absent)
    assert all(type(error) is GroupTimeout and error.missing == named for error in errors)


def test_alone_nobody_is_asked() -> None:
    council = Council(Members(0, 1), "load", 1.0)
    assert council.decide({"n": 3}, lambda all_: {"got": all_}) == {"got": [{"n": 3}]}
    with pytest.raises(NotFound):
        council.decide(NotFound("x"), lambda all_: {})


def test_a_store_that_is_gone_is_an_error_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def set(self, key: str, value: bytes) -> None:
            raise RuntimeError("Broken pipe\nmore")

        def wait(self, keys: list[str], timeout: timedelta) -> None:
            raise RuntimeError("Connection reset")

    monkeypatch.setattr(members, "_store", Gone)
    for rank in (0, 1):
        with pytest.raises(GroupAborted, match="cannot be reached"):
            Council(Members(rank, 2, "gone"), "load", 5.0).decide({}, lambda all_: {})


def test_the_place_comes_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert find_members(None) == Members(2, 3)
    with pytest.raises(InvalidInput, match="not initialised"):
        find_members(object())  # type: ignore[arg-type]
