"""One store under two paths, a copy beside its original, and one path that leads two ways."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_help import data, save_all
from nodes_help import call_save, committed, items, outcomes, released, save
from test_e2e_nodes_etcd import etcd

from groupio.errors import GroupIOError, GroupTimeout, Outcome, StorageError, from_wire

__all__ = ["etcd"]

SMALL = 70_000


@pytest.fixture
def covered(tmp_path: Path) -> Iterator[Path]:
    """A directory on which a test mounts another one."""
    where = tmp_path / "seen" / "store"
    where.mkdir(parents=True)
    yield where
    subprocess.run(["umount", "-l", str(where)], check=False, capture_output=True, timeout=30)


def bind(source: Path, where: Path) -> None:
    subprocess.run(["mount", "--bind", str(source), str(where)], check=True, timeout=30)


def with_mount(source: Path, where: Path) -> tuple[str, ...]:
    """The prefix of a process that alone sees ``source`` at ``where``, as in a container."""
    script = f'mount --bind "{source}" "{where}" && exec "$@"'
    return "unshare", "-m", "sh", "-c", script, "sh"


def connect(node: Any, rank: int, world: int, store: Path, prefix: tuple[str, ...] = ()) -> Any:
    one = node.start(rank, prefix)
    one.ask("connect", store=str(store), rank=rank, world_size=world)
    return one


def failure(one: Any, epoch: int) -> GroupIOError:
    answer = one.ask("save", epoch=epoch, items=data(epoch, SMALL), deadline_s=30)
    assert answer["error"] is not None
    return from_wire(answer["error"])


@pytest.mark.root
@pytest.mark.parametrize("controller", ["local", "store"])
def test_ranks_that_reach_one_directory_by_two_mounts_are_one_job(
    controller: str, make_node: Any, covered: Path, tmp_path: Path
) -> None:
    node = make_node(idle_s="30", controller=controller)
    store = tmp_path / "store"
    store.mkdir()
    bind(store, covered)
    ranks = [connect(node, 0, 2, store), connect(node, 1, 2, covered)]
    save_all(ranks, 1, lambda rank: rank)
    assert [job["store"] for job in node.status()["jobs"]] == [str(store)]
    for one in ranks:
        one.ask("load", epoch=1, member=1 - one.rank, expect=data(1 - one.rank))


def test_ranks_that_use_a_store_and_its_copy_are_told_so(node: Any, tmp_path: Path) -> None:
    store, copy = tmp_path / "store", tmp_path / "copy"
    save_all([connect(node, 0, 1, store)], 1, lambda rank: 7)
    shutil.copytree(store, copy)
    ranks = [connect(node, 0, 2, store), connect(node, 1, 2, copy)]
    for one in ranks:
        one.send("save", epoch=2, items=data(1, SMALL), deadline_s=1)
    for one in ranks:
        one.answer()
    for one, theirs, ours in zip(ranks, (copy, store), (store, copy), strict=True):
        one.send("wait", epoch=2)
        error = one.outcome()
        assert isinstance(error, GroupTimeout)
        assert f"Rank {1 - one.rank} came with {theirs}, a copy of {ours}" in error.message
    # Each by itself is a store like any other.
    save_all([connect(node, 0, 1, store), connect(node, 0, 1, copy)], 3, lambda rank: 9)


def test_an_agent_takes_no_copy_for_the_store_of_its_job(etcd: Any, make_cluster: Any) -> None:
    address = f"etcd://{etcd.endpoint}"
    cluster = make_cluster(1, loopback=True, hurry=True, controller=address).up()
    (node,) = cluster.nodes
    assert committed(save(cluster.connect(per_node=2), 1))
    node.end_ranks()
    copy = cluster.folder / "copy"
    subprocess.run(["cp", "-a", str(cluster.store), str(copy)], check=True, timeout=60)
    first, second = cluster.connect(per_node=2)
    second.ask("connect", store=str(copy), rank=1, world_size=2)
    call_save([first], 2, deadline_s=5)
    # The agent has the original in use; which one is the copy, nobody can tell.
    call_save([second], 2, deadline_s=5)
    released([first, second])
    (waits,), (refused,) = outcomes([first], 2), outcomes([second], 2)
    assert isinstance(refused, StorageError), refused
    assert refused.outcome is Outcome.NOT_COMMITTED
    for text in (str(cluster.store), str(copy), "the same id", "save to a new path"):
        assert text in refused.message
    assert isinstance(waits, GroupTimeout)
    assert f"Rank 1 came with {copy}, a copy of {cluster.store}" in waits.message
    assert not list((copy / "inflight").iterdir())
    second.ask("load", epoch=1, member=0, expect=items(0, 1))
    second.ask("connect", store=str(cluster.store), rank=1, world_size=2)
    assert committed(save([first, second], 3))
    # Once the original is not in use here, the copy may be.
    node.end_ranks()
    cluster.store, node.store = copy, copy
    assert committed(save(cluster.connect(per_node=2), 4))


@pytest.mark.root
def test_a_rank_whose_path_leads_elsewhere_than_its_agents(make_node: Any, tmp_path: Path) -> None:
    node = make_node(idle_s="30")
    store, inside = tmp_path / "store", tmp_path / "inside"
    save_all([connect(node, 0, 1, store)], 1, lambda rank: 7)
    save_all([connect(node, 0, 1, inside)], 5, lambda rank: 8)
    one = connect(node, 0, 1, store, with_mount(inside, store))
    error = failure(one, 6)
    assert isinstance(error, StorageError)
    for text in (str(store), "another directory", "GROUPIO_RUNTIME_DIR"):
        assert text in error.message
    # It reads what it sees itself.
    assert one.ask("epochs")["epochs"] == [5]
    one.ask("load", expect=data(8))
    assert not list(tmp_path.glob("*/.tmp-*")), "proofs leave nothing behind"


@pytest.mark.root
def test_a_rank_that_sees_a_store_where_its_agent_sees_none(make_node: Any, tmp_path: Path) -> None:
    node = make_node(idle_s="30")
    mount, inside = tmp_path / "mount", tmp_path / "inside"
    mount.mkdir()
    save_all([connect(node, 0, 1, inside / "run")], 5, lambda rank: 8)
    one = connect(node, 0, 1, mount / "run", with_mount(inside, mount))
    assert isinstance(failure(one, 6), StorageError)
    assert not list(mount.iterdir()), "the agent makes no store where nobody would look for it"
    # Neither sees a store yet, and the next one would be made in two places.
    one = connect(node, 0, 1, mount / "new", with_mount(inside, mount))
    assert isinstance(failure(one, 6), StorageError)
    assert not list(mount.iterdir())


@pytest.mark.root
def test_a_rank_in_another_mount_namespace_that_sees_the_same(
    make_node: Any, tmp_path: Path
) -> None:
    node = make_node(idle_s="30")
    store = tmp_path / "store"
    store.mkdir()
    ranks = [connect(node, 0, 2, store), connect(node, 1, 2, store, with_mount(store, store))]
    save_all(ranks, 1, lambda rank: rank)
    ranks[1].ask("load", epoch=1, member=0, expect=data(0))
