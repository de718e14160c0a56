"""Loads of a job of three nodes: each chunk leaves the store once, or not at all while a node has
it in memory; a node that fails, lies or comes late keeps nobody from getting the right bytes."""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nodes_help import Cluster, bytes_from, total, until
from rank_process import items_of

import groupio
from groupio.client.agent_read import through_agent
from groupio.client.store_reader import StoreReader, member_layout
from groupio.client.wants import Collector
from groupio.errors import IntegrityError
from groupio.plan.read import Box
from groupio.settings import Settings

MIB = 1 << 20
SHARED = {"seed": 7, "bytes": 24 * MIB}
OWN_BYTES = 8 * MIB


def items(rank: int) -> dict[str, Any]:
    return {
        "shared": SHARED,
        "own": {"seed": 100 + rank, "bytes": OWN_BYTES},
        "few": {"seed": 200 + rank, "bytes": 1000},
        "step": 5,
    }


def unique_bytes(cluster: Cluster) -> int:
    with StoreReader.open(cluster.store) as reader:
        manifest = reader.resolve(1)
        return int(manifest.chunks.lengths.sum())


class Reading:
    """Clusters of three nodes, and ``before``: a store that three ranks have saved."""

    def __init__(self, folder: Path, before: Path) -> None:
        self.folder = folder
        self.before = before
        self.clusters: list[Cluster] = []

    def cluster(self, **settings: str) -> Cluster:
        folder = self.folder / f"c{len(self.clusters)}"
        made = Cluster(folder, 3, None, hurry=True, **settings)
        made.store = self.folder / "store"
        for node in made.nodes:
            node.script = "reading_agent.py"
            node.store = made.store
        self.clusters.append(made)
        return made.up()

    def saved(self, cluster: Cluster) -> list[Any]:
        ranks = cluster.connect()
        for one in ranks:
            one.send("save", items=items(one.rank), epoch=1)
        for one in ranks:
            assert one.answer()["error"] is None
            one.ask("wait", epoch=1, level="durable", timeout_s=60)
        return ranks

    def fresh(self, **settings: str) -> Cluster:
        """Nodes that have nothing of the saved epoch in memory."""
        shutil.copytree(self.before, self.folder / "store")
        return self.cluster(**settings)

    def close(self) -> None:
        for one in self.clusters:
            one.close()


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("before")
    settings = Settings(runtime_dir=str(folder / "run"), memory_bytes=256 * MIB, idle_s=0.2)
    (folder / "run").mkdir(mode=0o700)

    def save(rank: int) -> None:
        place: dict[str, Any] = {"rank": rank, "world_size": 3, "controller": "local"}
        with groupio.connect(folder / "store", settings=settings, **place) as client:
            client.save(items_of(items(rank)), epoch=1).wait("durable", timeout_s=40)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(save, range(3)))
    return folder / "store"


@pytest.fixture
def reading(tmp_path: Path, before: Path) -> Iterator[Reading]:
    made = Reading(tmp_path, before)
    try:
        yield made
    finally:
        made.close()


def load_all(ranks: list[Any]) -> None:
    for one in ranks:
        one.send("load", epoch=1, expect=items(one.rank))
    for one in ranks:
        one.answer()


def test_what_nodes_have_in_memory_is_not_read_again(reading: Reading) -> None:
    cluster = reading.cluster()
    ranks = reading.saved(cluster)
    load_all(ranks)
    for one in ranks:
        one.ask("load", epoch=1, member=(one.rank + 1) % 3, expect=items((one.rank + 1) % 3))
    assert total(cluster, "store") == 0
    assert total(cluster, "memory") > 3 * 24 * MIB
    assert total(cluster, "peer") >= 3 * OWN_BYTES


def test_each_chunk_leaves_the_store_once(reading: Reading) -> None:
    cluster = reading.fresh(memory_bytes="512M")  # late ranks find the state in the windows
    ranks = cluster.connect()
    load_all(ranks)
    read = [bytes_from(node, "store") for node in cluster.nodes]
    assert sum(read) == unique_bytes(cluster)
    assert min(read) >= OWN_BYTES  # all uplinks took part
    assert total(cluster, "peer") >= 2 * 24 * MIB  # the shared ones, each twice


def test_who_comes_late_gets_it_from_the_others(reading: Reading) -> None:
    cluster = reading.fresh(memory_bytes="512M")  # the whole state stays in the windows
    ranks = cluster.connect()
    ranks[0].ask("load", epoch=1, expect=items(0))
    read = total(cluster, "store")
    assert 32 * MIB < read < 33 * MIB  # by the uplinks of those that want nothing, too
    ranks[1].ask("load", epoch=1, names=["shared"], expect={"shared": SHARED})
    ranks[2].ask("load", epoch=1, names=["shared"], expect={"shared": SHARED})
    assert total(cluster, "store") == read


@pytest.mark.parametrize("ruler", [False, True], ids=["a follower", "the controller's"])
def test_an_agent_that_dies_in_the_middle(reading: Reading, ruler: bool) -> None:
    cluster = reading.fresh()
    ranks = cluster.connect()
    victim = cluster.ruler if ruler else cluster.others[0]
    (victim.holds / "slow_read").write_text("0.2")
    for one in ranks:
        one.send("load", epoch=1, expect=items(one.rank))
    until(lambda: bytes_from(victim, "store") > 0, 20, cluster.logs)
    victim.kill_agent()
    for one in ranks:
        one.answer()


def test_a_damaged_chunk_is_named(reading: Reading) -> None:
    cluster = reading.fresh()
    with StoreReader.open(cluster.store) as reader:
        manifest = reader.resolve(1)
        row = min(set(manifest.member(1).refs.tolist()) - set(manifest.member(0).refs.tolist()))
        table = manifest.chunks
        name = manifest.segments[int(table.segments[row])].name
        digest, offset = table.digests[row].tobytes().hex(), int(table.offsets[row])
    path = cluster.store / "segments" / name
    with path.open("r+b") as file:
        file.seek(offset + 3)
        byte = file.read(1)
        file.seek(offset + 3)
        file.write(bytes([byte[0] ^ 1]))
    ranks = cluster.connect()
    for one in ranks:
        one.send("load", epoch=1, expect=items(one.rank))
    ranks[0].answer()
    ranks[2].answer()
    with pytest.raises(IntegrityError) as caught:
        ranks[1].answer()
    assert caught.value.chunk == digest
    assert str(path) in caught.value.message


def test_a_node_that_lies_is_named_and_avoided(reading: Reading) -> None:
    cluster = reading.fresh()
    ranks = cluster.connect()
    liar = cluster.nodes[2]
    (liar.holds / "lie").touch()
    load_all(ranks)
    assert bytes_from(liar, "store") > 0
    assert "sent node" in cluster.ruler.log()
    assert re.search(r"node n2 sent node n[01] wrong bytes", cluster.ruler.log())


def test_a_window_smaller_than_the_state(reading: Reading) -> None:
    cluster = reading.fresh(memory_bytes="256M")  # a window of 32 MiB
    ranks = cluster.connect()
    (cluster.nodes[1].holds / "slow_read").write_text("0.02")
    load_all(ranks)
    # A chunk that left all windows before the slow node asked for it is read once more.
    assert total(cluster, "store") <= unique_bytes(cluster) + SHARED["bytes"]


def test_parts_of_chunks_come_as_parts(reading: Reading) -> None:
    cluster = reading.fresh(memory_bytes="512M")
    ranks = cluster.connect()
    node = cluster.nodes[1]
    settings = Settings(runtime_dir=node.environ["GROUPIO_RUNTIME_DIR"], node=node.name)
    expected = np.random.default_rng(7).integers(0, 256, 24 * MIB, dtype=np.uint8)
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(
            groupio.connect(
                cluster.store, rank=1, world_size=3, controller="store", settings=settings
            )
        )
        reader = stack.enter_context(StoreReader.open(cluster.store))
        manifest = reader.resolve(1)
        member = manifest.member(0)
        index = next(i for i, spec in enumerate(member.items) if spec.name == "shared")
        spec = member.items[index]
        layout = member_layout(manifest, member)
        lo, hi = layout.chunk_range(index)
        start, size = 5 * MIB + 17, 6 * MIB
        array = np.zeros(size, np.uint8)
        wants = Collector()
        wants.add_box(spec, member.refs[lo:hi], Box((start,), (size,)), array)
        through = through_agent(client)
        assert through is not None
        ranks[0].ask("load", epoch=1, expect=items(0))
        read, moved = total(cluster, "store"), total(cluster, "peer")
        reader.read_wants(manifest, wants.finish(), fetch=through.fetch_of(manifest))
    assert np.array_equal(array, expected[start : start + size])
    assert through.notes == []
    # What this node read for the others counts for the first of its own ranks that takes it.
    assert through.bytes_read <= read
    assert total(cluster, "store") == read
    # Two of its chunks are wanted in part.
    assert total(cluster, "peer") - moved <= size


def test_without_agents_the_store_is_read(reading: Reading) -> None:
    cluster = reading.fresh()
    ranks = cluster.connect()
    for node in cluster.nodes:
        node.hold("read")
    for one in ranks:
        one.send("load", epoch=1, expect=items(one.rank))
    for node in cluster.nodes:
        node.await_hold("read")
    for node in cluster.nodes:
        node.kill_agent()
    started = time.monotonic()
    for one in ranks:
        one.answer()
    assert time.monotonic() - started < 20
