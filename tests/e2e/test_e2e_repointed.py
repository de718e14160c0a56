"""A path that leads to another store than before: no client uses two stores without a word."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from e2e_help import data

from groupio.errors import AgentLost, GroupIOError, StorageError, from_wire

SMALL = 70_000


def epochs(one: Any) -> list[int]:
    found: list[int] = one.ask("epochs")["epochs"]
    return found


def fill(node: Any, store: Path, epoch: int) -> None:
    """Another program's store, with one epoch."""
    one = node.rank(0, 1, store)
    save(one, epoch)
    one.ask("close")
    one.end()


def save(one: Any, epoch: int) -> None:
    answer = one.ask("save", epoch=epoch, items=data(epoch, SMALL), wait_for="durable")
    assert answer["error"] is None, answer


def failure(one: Any, ask: str, **command: Any) -> GroupIOError:
    if ask == "save":
        return from_wire(one.ask(ask, **command)["error"])
    with pytest.raises(GroupIOError) as caught:
        one.ask(ask, **command)
    return caught.value


def refused(one: Any, ask: str, **command: Any) -> None:
    error = failure(one, ask, **command)
    if isinstance(error, AgentLost):  # the first call after an agent was killed may meet its end
        error = failure(one, ask, **command)
    assert isinstance(error, StorageError)
    assert "connect" in error.message


def test_a_client_stays_with_the_store_that_its_path_led_to(node: Any, tmp_path: Path) -> None:
    fill(node, tmp_path / "b", 77)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "a")
    (tmp_path / "a").mkdir()
    one = node.rank(0, 1, link)
    save(one, 1)
    link.unlink()
    link.symlink_to(tmp_path / "b")
    save(one, 2)
    assert epochs(one) == [1, 2]
    one.ask("load", expect=data(2, SMALL))
    # It connects again, and still means the same.
    node.kill_agent()
    one.ask("load", expect=data(1, SMALL), epoch=1)
    save(one, 3)
    assert epochs(one) == [1, 2, 3]
    # Who connects now means what the path leads to now.
    assert epochs(node.rank(0, 1, link)) == [77]


@pytest.mark.parametrize("first", ["save", "epochs"])
def test_another_store_in_the_place_of_a_clients_store_is_an_error_of_each_call(
    first: str, make_node: Any, tmp_path: Path
) -> None:
    node = make_node(idle_s="30")
    store, other = tmp_path / "store", tmp_path / "other"
    fill(node, store, 1)
    fill(node, other, 77)
    one = node.rank(0, 1, store)
    if first == "save":
        save(one, 2)
    else:
        assert epochs(one) == [1]
    store.rename(tmp_path / "away")
    other.rename(store)
    for _ in range(2):
        refused(one, "load", expect={})
        refused(one, "epochs")
        refused(one, "save", epoch=90, items=data(5, SMALL), wait_for="durable")
    # A new agent does not make it better.
    node.kill_agent()
    refused(one, "save", epoch=91, items=data(5, SMALL), wait_for="durable")
    refused(one, "epochs")
    assert epochs(node.rank(0, 1, store)) == [77]
    # The store is back: so is the client.
    store.rename(other)
    (tmp_path / "away").rename(store)
    save(one, 92)
    assert epochs(one)[-1] == 92


def test_a_store_that_is_gone_is_not_begun_again_by_its_client(
    make_node: Any, tmp_path: Path
) -> None:
    node = make_node(idle_s="30")
    store = tmp_path / "store"
    one = node.rank(0, 1, store)
    assert epochs(one) == []  # it does not exist yet, which is no error
    save(one, 1)
    os.rename(store, tmp_path / "away")
    for ask in ("epochs", "load"):
        refused(one, ask, **({"expect": {}} if ask == "load" else {}))
    node.kill_agent()
    refused(one, "save", epoch=2, items=data(5, SMALL), wait_for="durable")
    assert not store.exists()
    # A copy is the same store, as far as one can know.
    shutil.copytree(tmp_path / "away", store)
    save(one, 3)
    assert epochs(one) == [1, 3]
