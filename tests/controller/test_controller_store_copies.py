"""A node writes to a copy of the store: its segments are missed before the record is made."""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "plan"))
from plan_help import raw, report

from groupio.agent.identity import Writer
from groupio.backend.posix import PosixBackend
from groupio.controller import store as store_module
from groupio.controller.store import JobStore
from groupio.errors import IntegrityError, Outcome, Retry, StorageError
from groupio.format.items import encode_items, items_id
from groupio.format.records import segment_name
from groupio.model import DecisionKey, Lineage, NodeReport, SegmentRef
from groupio.protocol import effects as fx
from groupio.protocol.reasons import is_away

WRITER = Writer.of_this_process()
ITEMS = [raw("a", 100), raw("b", 200)]
KEY = DecisionKey(1, 3, 1)
BODY = b"s" * 8192


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JobStore]:
    made = JobStore(str(tmp_path / "store"), "job", "n0", WRITER)
    made.open(())
    made.create_lineage(Lineage(1, 0, -1, 0.0))
    yield made
    made.close()


@pytest.fixture
def copy(store: JobStore, tmp_path: Path) -> Iterator[JobStore]:
    shutil.copytree(store.path, tmp_path / "copy", symlinks=True)
    made = JobStore(str(tmp_path / "copy"), "job", "n1", WRITER)
    made.follow(create=False)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def short_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "LOOK_S", 0.3)


def write(store: JobStore, node: str, body: bytes = BODY) -> SegmentRef:
    """A durable segment of the attempt; nothing here looks at what is in it."""
    name = segment_name(KEY, node, 0)
    file = store.backend.create_segment(name)
    file.write_tail(0, body)
    file.sync_close(len(body))
    store.backend.sync_folder("segments")
    return SegmentRef(name, len(body), True)


def part(node: str, rank: int, *segments: SegmentRef) -> NodeReport:
    found = report(node, {rank: (ITEMS, [f"p{rank}", f"q{rank}"])})
    members = tuple(replace(m, items_id=items_id(encode_items(m.items))) for m in found.members)
    return replace(found, segments=segments, members=members)


def order(*parts: NodeReport) -> fx.PrepareEpoch:
    return fx.PrepareEpoch(1, KEY, 1, len(parts), parts, (), {})


def see(*_: Any) -> None:
    return None


def test_segments_of_two_nodes_in_one_store_are_prepared(store: JobStore) -> None:
    other = JobStore(store.path, "job", "n1", WRITER)
    other.follow(create=False)
    parts = part("n0", 0, write(store, "n0")), part("n1", 1, write(other, "n1"))
    store.prepare(order(*parts), see)
    assert store.backend.exists("prepared", str(KEY))
    other.close()


def test_a_segment_in_a_copy_is_missed_before_the_record_is_made(
    store: JobStore, copy: JobStore
) -> None:
    parts = part("n0", 0, write(store, "n0")), part("n1", 1, write(copy, "n1"))
    with pytest.raises(StorageError) as caught:
        store.prepare(order(*parts), see, {"n1": copy.path})
    error = caught.value
    assert (error.outcome, error.retry) == (Outcome.NOT_COMMITTED, Retry.WHOLE)
    assert not is_away(error)  # nobody waits for the other store
    for told in ("n1", copy.path, store.path, "the same file system"):
        assert told in error.message
    assert store.backend.list("prepared") == []


def test_a_segment_of_another_size_is_another_segment(store: JobStore, copy: JobStore) -> None:
    """The copies went different ways: both have a segment of this name."""
    write(store, "n1", b"other")
    parts = part("n0", 0, write(store, "n0")), part("n1", 1, write(copy, "n1"))
    with pytest.raises(StorageError, match="5 bytes instead of 8192"):
        store.prepare(order(*parts), see)
    assert store.backend.list("prepared") == []


def test_an_older_segment_that_only_the_copy_has_is_missed(store: JobStore, copy: JobStore) -> None:
    older = replace_own(write(copy, "n1"))
    parts = part("n0", 0, write(store, "n0")), part("n1", 1, older)
    with pytest.raises(IntegrityError, match="save again") as caught:
        store.prepare(order(*parts), see)
    assert caught.value.retry is Retry.WHOLE


def replace_own(segment: SegmentRef) -> SegmentRef:
    return SegmentRef(segment.name, segment.bytes, False)


def test_a_segment_that_is_shown_late_is_waited_for(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a network file system whose caches are slow."""
    monkeypatch.setattr(store_module, "LOOK_S", 20.0)
    other = JobStore(store.path, "job", "n1", WRITER)
    other.follow(create=False)
    parts = part("n0", 0, write(store, "n0")), part("n1", 1, write(other, "n1"))
    looked = threading.Event()
    sizes = PosixBackend.sizes

    def late(self: PosixBackend, folder: str, names: Any) -> dict[str, int]:
        found = sizes(self, folder, names)
        if not looked.is_set():
            looked.set()
            found[parts[1].segments[0].name] = -1
        return found

    monkeypatch.setattr(PosixBackend, "sizes", late)
    store.prepare(order(*parts), see)
    assert looked.is_set()
    other.close()
