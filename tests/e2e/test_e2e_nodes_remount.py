"""The process of a FUSE mount dies under a job, and its store is mounted again at the same path."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nodes_help import (
    Cluster,
    MachineNode,
    call_save,
    committed,
    outcomes,
    released,
    restored,
    save,
    until,
)

from fuse_mount import FuseMount
from groupio.agent.identity import Writer
from groupio.controller.store import JobStore

pytestmark = [pytest.mark.root, pytest.mark.proof]


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Path]:
    """A directory whose mounts are seen in the mount namespaces of all nodes."""
    path = tmp_path / "shared"
    path.mkdir()
    for options in (["--bind", str(path)], ["--make-shared"]):
        subprocess.run(["mount", *options, str(path)], check=True, timeout=30)
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True, timeout=30)


@pytest.fixture
def mount(shared: Path, tmp_path: Path) -> Iterator[FuseMount]:
    made = FuseMount(tmp_path / "served", shared / "mount")
    try:
        yield made.up()
    finally:
        made.close()


# ``mount`` comes first in the tests: their agents end before it does.


def begin(make_cluster: Any, mount: FuseMount, size: int) -> tuple[Cluster, list[Any]]:
    """A job that saved its first epoch on the mount."""
    cluster: Cluster = make_cluster(size, hurry=True, replicas="2" if size > 1 else "1")
    for node in cluster.nodes:
        node.store = mount.where / "store"
    cluster.up()
    ranks = cluster.connect()
    assert committed(save(ranks, 1))
    return cluster, ranks


def ruler(cluster: Cluster) -> MachineNode:
    return cluster.nodes[0] if len(cluster.nodes) == 1 else cluster.ruler


def store_away(cluster: Cluster) -> Any:
    node = ruler(cluster)
    return until(lambda: node.status()["jobs"][0]["store_away"], 20, cluster.logs)


@pytest.mark.parametrize("size", [1, 3], ids=["one node", "three nodes"])
def test_saves_wait_for_the_mount(mount: FuseMount, make_cluster: Any, size: int) -> None:
    cluster, ranks = begin(make_cluster, mount, size)
    mount.die()
    call_save(ranks, 2)
    assert "not connected" in store_away(cluster)["error"]
    mount.again()
    released(ranks)
    assert committed(outcomes(ranks, 2))
    # And nobody notices where nothing is under way.
    mount.die()
    mount.again()
    assert committed(save(ranks, 3))
    for epoch in (1, 2, 3):
        restored(ranks[0], size, epoch)


@pytest.mark.parametrize("point", ["seal", "prepare", "decide"])
@pytest.mark.parametrize("size", [1, 3], ids=["one node", "three nodes"])
def test_a_sealed_epoch_is_stored_through_the_new_mount(
    mount: FuseMount, make_cluster: Any, size: int, point: str
) -> None:
    """Segments that were not durable yet are written anew, from memory."""
    cluster, ranks = begin(make_cluster, mount, size)
    held = cluster.nodes if point == "seal" else [ruler(cluster)]
    for node in held:
        node.hold(point)
    call_save(ranks, 2)
    for node in held:
        node.await_hold(point)
    mount.die()
    for node in held:
        node.let(point)
    released(ranks)
    for one in ranks:
        level = "replicated" if size > 1 else "staged"
        one.send("wait", epoch=2, level=level, timeout_s=20).answer()
    assert store_away(cluster)
    mount.again()
    assert committed(outcomes(ranks, 2))
    restored(ranks[0], size, 2)
    assert committed(save(ranks, 3))
    restored(ranks[-1], size, 3)
    if size == 1:
        # Nothing is left of what was cut off.
        assert len(list((mount.source / "store" / "segments").iterdir())) == 3


def test_another_store_at_the_path_is_waited_out(
    mount: FuseMount, make_cluster: Any, tmp_path: Path
) -> None:
    cluster, ranks = begin(make_cluster, mount, 3)
    other = JobStore(str(tmp_path / "other" / "store"), "store", "x", Writer.of_this_process())
    other.open(())
    other.close()
    before = sorted(str(one) for one in (tmp_path / "other").rglob("*"))
    for node in cluster.nodes:
        node.hold("seal")
    call_save(ranks, 2)
    for node in cluster.nodes:
        node.await_hold("seal")
    mount.die()
    mount.again(tmp_path / "other")
    for node in cluster.nodes:
        node.let("seal")
    released(ranks)

    def told() -> bool:
        away = ruler(cluster).status()["jobs"][0]["store_away"]
        return away is not None and other.store_id in away["error"]

    until(told, 20, cluster.logs)
    assert sorted(str(one) for one in (tmp_path / "other").rglob("*")) == before
    mount.die()
    mount.again()
    assert committed(outcomes(ranks, 2))
    restored(ranks[0], 3, 2)
