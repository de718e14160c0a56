"""A node of a job has a copy of the store: nothing is acknowledged, and both ranks hear why."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nodes_help import (
    Cluster,
    call_save,
    committed,
    items,
    outcomes,
    released,
    restored,
    save,
    until,
)
from test_e2e_nodes_etcd import etcd

from groupio.errors import Outcome, Retry, StorageError

__all__ = ["etcd"]


def refused(found: list[Any], *told: str) -> None:
    """Every rank heard that nothing was committed, because the stores are two."""
    for error in found:
        assert isinstance(error, StorageError), found
        assert (error.outcome, error.retry) == (Outcome.NOT_COMMITTED, Retry.WHOLE)
        for text in (*told, "the same file system"):
            assert text in error.message


def restart(cluster: Cluster, *, first: int) -> list[Any]:
    """The job starts again; the agent of node ``first`` gets the controller."""
    for node in cluster.nodes:
        node.end_ranks()
        node.drain_agent()
    cluster.up()
    ranks = cluster.connect(nodes=(first,))
    call_save(ranks, 2)
    until(cluster.nodes[first].rules, 20, cluster.logs)
    others = cluster.connect(nodes=(1 - first,))
    call_save(others, 2)
    found = [*ranks, *others] if first == 0 else [*others, *ranks]
    released(found)
    return found


@pytest.mark.parametrize("first", [0, 1], ids=["controller on the original", "on the copy"])
def test_a_copied_store_acknowledges_nothing(etcd: Any, make_cluster: Any, first: int) -> None:
    address = f"etcd://{etcd.endpoint}"
    cluster = make_cluster(2, loopback=True, hurry=True, controller=address).up()
    assert committed(save(cluster.connect(), 1))
    original, copy = cluster.store, cluster.folder / "copy"
    subprocess.run(["cp", "-a", str(original), str(copy)], check=True, timeout=60)
    cluster.nodes[1].store = copy
    ranks = restart(cluster, first=first)
    refused(outcomes(ranks, 2), str(original), str(copy), "n1" if first == 0 else "n0")
    for path in (original, copy):
        assert not list((path / "prepared").iterdir())
        assert len(list((path / "epochs").iterdir())) == 1
    for one in ranks:
        # Each goes on reading what both stores have.
        one.ask("load", epoch=1, member=0, expect=items(0, 1))


@pytest.fixture
def covered(tmp_path: Path) -> Iterator[Path]:
    """A directory where a node sees the store through a mount, for as long as it is mounted."""
    where = tmp_path / "seen"
    where.mkdir()
    yield where
    subprocess.run(["umount", "-l", str(where)], check=False, capture_output=True, timeout=30)


@pytest.mark.root
def test_a_copy_that_takes_the_place_of_the_mount_between_two_saves(
    covered: Path, make_cluster: Any
) -> None:
    # Each node writes its own bytes: what the other one wrote would be in the store after all.
    cluster = make_cluster(2, loopback=True, hurry=True, equal_links=True).up()
    cluster.store.mkdir()
    subprocess.run(["mount", "--bind", str(cluster.store), str(covered)], check=True, timeout=30)
    cluster.nodes[1].store = covered
    ranks = cluster.connect(nodes=(0,))
    call_save(ranks, 1)
    assert cluster.ruler.number == 0
    ranks += cluster.connect(nodes=(1,))
    call_save(ranks[1:], 1)
    released(ranks)
    assert committed(outcomes(ranks, 1))
    subprocess.run(["umount", "-l", str(covered)], check=True, timeout=30)
    shutil.copytree(cluster.store, covered, dirs_exist_ok=True)
    refused(save(ranks, 2), str(covered), str(cluster.store))
    assert len(list((cluster.store / "epochs").iterdir())) <= 2  # epoch 1, and an abort
    restored(ranks[0], 2, 1)
