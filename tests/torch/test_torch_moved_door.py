"""A node writes tensors of another one, and torch reads them through the door of the epoch."""

from __future__ import annotations

import queue
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

sys.path.insert(0, str(Path(__file__).parents[1] / "agent"))
from agent_tools import Saved, Store, saved, tensor
from test_agent_planned import KEY, Node

from groupio.agent import doors
from groupio.agent.doors import Doors
from groupio.agent.identity import Writer
from groupio.agent.workers import WorkerPool
from groupio.controller.store import JobStore
from groupio.door.publish import await_door, ensure_door
from groupio.errors import NotFound
from groupio.model import CHUNK_BYTES, Lineage, NodeLink, NodeReport
from groupio.plan.grouped import plan_group
from groupio.plan.labels import label_moves
from groupio.protocol import effects as fx
from groupio.protocol import messages as msg

SHAPES = {"long": (3 * CHUNK_BYTES // 40, 10), "flat": (CHUNK_BYTES // 4 + 3,), "b": (7,), "c": ()}


def member(seed: int) -> Saved:
    return saved(
        [tensor(f"{name}{seed}", *shape, origin="torch") for name, shape in SHAPES.items()], seed
    )


@pytest.fixture
def epoch(tmp_path: Path) -> Iterator[tuple[str, list[Saved]]]:
    """A committed epoch: all bytes are of rank 0 and 1 on n0, and n1 wrote many of them."""
    pool = WorkerPool()
    store = Store(tmp_path / "store", pool)
    nodes = [Node(name, store, pool, framed=True) for name in ("n0", "n1")]
    members = [member(1), member(2)]
    try:
        reports = [nodes[0].hash(*members), nodes[1].hash()]
        links = [NodeLink(node.name, 1e6, 1e9, node.name) for node in nodes]
        plan = label_moves(plan_group(reports, links, replicas=1, shares={}), reports)
        moved = sum(len(part.lengths) for part in plan.orders["n1"].fetch)
        assert 2 <= moved < len(reports[0].chunks), "some chunks move and some do not"
        addresses = {node.name: node.address for node in nodes}
        for node in nodes:
            node.flush.run_order(1, plan.orders[node.name], addresses, ())
        written: list[NodeReport] = []
        for node in nodes:
            found = node.said.get(timeout=60)
            if found[0] == "replicated":  # the node that keeps the record says so
                found = node.said.get(timeout=60)
            assert found[0] == "stored", found
            written.append(found[1][1])
        _commit(str(store.path), written)
        yield str(store.path), members
    finally:
        for node in nodes:
            node.close()
        store.backend.close()
        assert pool.close(60)


def _commit(path: str, reports: list[NodeReport]) -> None:
    store = JobStore(path, "job", "n0", Writer.of_this_process())
    store.follow(create=False)  # not opened: that would end the attempt
    store.create_lineage(Lineage(1, 0, -1, 0.0))
    effect = fx.PrepareEpoch(
        group=1,
        key=KEY,
        incarnation=1,
        world_size=2,
        reports=tuple(reports),
        replicated=(),
        metadata={},
        door="dcp",
    )
    store.prepare(effect, lambda *place: None)
    assert store.decide(fx.Decide(1, KEY, True, 1)) == (True, True)
    store.close()


def test_torch_reads_moved_tensors_where_they_lie(epoch: tuple[str, list[Saved]]) -> None:
    path, members = epoch
    made = ensure_door(path, KEY.epoch)
    assert made is not None
    assert made.copied == 0, "every tensor is shown where it lies in a segment"
    state = {
        f"{name}{seed}": torch.full(shape, 5.5) for seed in (1, 2) for name, shape in SHAPES.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=f"{path}/dcp/{KEY.epoch}")
    for one in members:
        for number, item in enumerate(one.items):
            start = int(one.layout.item_start[number])
            found = state[item.name].contiguous().reshape(-1).view(torch.uint8).numpy()
            assert found.tobytes() == one.content[start : start + item.nbytes], item.name


def test_others_wait_for_the_door_that_one_makes(epoch: tuple[str, list[Saved]]) -> None:
    path, _ = epoch
    began = time.monotonic()
    assert not await_door(path, KEY.epoch, 0.3)
    assert time.monotonic() - began >= 0.3
    seen: list[bool] = []
    waiting = threading.Thread(target=lambda: seen.append(await_door(path, KEY.epoch, 60)))
    waiting.start()
    time.sleep(0.2)
    assert seen == []
    assert ensure_door(path, KEY.epoch) is not None
    waiting.join(60)
    assert seen == [True]
    assert await_door(path, KEY.epoch, 0), "one that is there needs no wait"
    with pytest.raises(NotFound):
        await_door(path, KEY.epoch + 1, 0)


def test_a_door_of_another_write_is_not_the_one(epoch: tuple[str, list[Saved]]) -> None:
    path, _ = epoch
    ensure_door(path, KEY.epoch)
    record = Path(path, "dcp", str(KEY.epoch), "groupio.json")
    record.write_text(record.read_text().replace('"write_id": "', '"write_id": "0'))
    assert not await_door(path, KEY.epoch, 0)


class Around:
    """The driver as far as doors need it: one client of the rank, and what it was sent."""

    def __init__(self, path: str, rank: int, *, spans: bool = True) -> None:
        hello = SimpleNamespace(rank=rank)
        store = SimpleNamespace(file_mode=None, umask=0o077)
        joining = object() if spans else None
        self.jobs = {path: SimpleNamespace(path=path, store=store, joining=joining)}
        self.clients = {"c": SimpleNamespace(hello=hello, client="c")}
        self.workers = SimpleNamespace(give_way=lambda: None)
        self.sent: queue.SimpleQueue[msg.DoorDone] = queue.SimpleQueue()

    def post(self, step: Callable[[], None]) -> None:
        step()

    def send(self, peer: Any, message: msg.DoorDone) -> None:
        self.sent.put(message)


def committed(path: str, rank: int, **options: bool) -> tuple[Doors, Around]:
    """The doors of an agent one of whose clients just heard of the commit."""
    around = Around(path, rank, **options)
    made = Doors(around)  # type: ignore[arg-type]
    opened = SimpleNamespace(door="dcp", save_id=3, epoch=KEY.epoch)
    made.opened(around.jobs[path], "c", opened)  # type: ignore[arg-type]
    made.decided(fx.MemberSeat(rank, "c", 3), committed=True)
    return made, around


def test_an_agent_without_rank_0_waits_for_the_other(
    epoch: tuple[str, list[Saved]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = epoch
    monkeypatch.setattr(doors, "ELSEWHERE_S", 60.0)
    made, around = committed(path, 1)
    time.sleep(0.3)
    assert made.busy
    assert not Path(path, "dcp", str(KEY.epoch)).exists()
    first, its = committed(path, 0)
    for one in (its, around):
        assert one.sent.get(timeout=60) == msg.DoorDone(3, "")
    assert await_door(path, KEY.epoch, 0)
    for one in (made, first):
        one.close()


@pytest.mark.parametrize(("rank", "spans"), [(1, True), (1, False), (0, True)])
def test_a_door_that_nobody_else_makes_is_made(
    epoch: tuple[str, list[Saved]], monkeypatch: pytest.MonkeyPatch, rank: int, spans: bool
) -> None:
    path, _ = epoch
    patient = rank > 0 and spans
    monkeypatch.setattr(doors, "ELSEWHERE_S", 0.5 if patient else 600.0)
    began = time.monotonic()
    made, around = committed(path, rank, spans=spans)
    assert around.sent.get(timeout=60) == msg.DoorDone(3, "")
    assert (time.monotonic() - began >= 0.5) or not patient
    assert await_door(path, KEY.epoch, 0)
    assert not made.busy
    made.close()
