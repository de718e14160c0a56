"""A store on a FUSE mount whose process dies, and that is mounted again at the same path."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_controller_store_again import (
    BODY,
    WRITER,
    committed,
    content,
    decide,
    in_time,
    key,
    order,
    publish,
    see,
    segment,
)

from fuse_mount import FuseMount
from groupio.controller.by_store import StoreCoordinator
from groupio.controller.store import JobStore
from groupio.errors import StorageError
from groupio.model import Lineage
from groupio.protocol.reasons import is_away

pytestmark = pytest.mark.root


@pytest.fixture
def store(mount: FuseMount) -> Iterator[JobStore]:
    made = JobStore(str(mount.where / "store"), "job", "n0", WRITER)
    made.open(())
    made.create_lineage(Lineage(1, 0, -1, 0.0))
    yield made
    made.close()


def away(call: Callable[[], Any]) -> StorageError:
    with pytest.raises(StorageError) as caught:
        call()
    assert is_away(caught.value), caught.value
    return caught.value


@pytest.mark.parametrize("step", range(4))
def test_a_save_goes_on_where_it_was_when_the_mount_is_back(
    store: JobStore, mount: FuseMount, step: int
) -> None:
    name = ""

    def write() -> None:
        nonlocal name
        store.renew()
        name = segment(store, 3)

    steps: list[Callable[[], Any]] = [
        lambda: publish(store, 3),
        write,
        lambda: store.prepare(order(3, name), see),
        lambda: decide(store, 3),
    ]
    for one in steps[:step]:
        one()
    mount.die()
    for _ in range(3):
        assert away(steps[step]).errno == errno.ENOTCONN
    mount.unmount()
    for _ in range(2):
        # What is below the mount point is no store: nothing is made there.
        assert away(steps[step]).errno in (errno.ENOTCONN, errno.EREMCHG)
    assert list(mount.where.iterdir()) == []
    mount.up()
    answers = [in_time(one) for one in steps[step:]]
    assert answers[-1] == (True, True)
    publish(store, 4)
    assert committed(store.path) == {3}
    assert committed(str(mount.source / "store")) == {3}


@pytest.mark.parametrize("dies", [True, False], ids=["after it died", "over it"])
def test_another_store_at_its_path_is_not_written_to(
    store: JobStore, mount: FuseMount, tmp_path: Path, dies: bool
) -> None:
    publish(store, 3)
    name = segment(store, 3)
    other = JobStore(str(tmp_path / "other" / "store"), "job", "n0", WRITER)
    other.open(())
    other.close()
    before = content(tmp_path / "other")
    over = FuseMount(tmp_path / "other", mount.where)
    try:
        if dies:
            mount.die()
            mount.unmount()
        over.up()
        for call in (
            lambda: publish(store, 4),
            lambda: store.prepare(order(3, name), see),
            lambda: store.open((key(3),)),
            store.current,
        ):
            away(call)
            assert away(call).errno == errno.EREMCHG
        assert content(tmp_path / "other") == before
        over.unmount()
        over.die()
        if dies:
            mount.up()
        in_time(lambda: store.prepare(order(3, name), see))
        assert decide(store, 3) == (True, True)
    finally:
        over.close()
    assert committed(str(mount.source / "store")) == {3}


def test_between_two_saves_nobody_notices(store: JobStore, mount: FuseMount) -> None:
    """Not one call fails for handles that died while nothing was under way."""
    for epoch in (3, 4, 5):
        mount.die()
        mount.again()
        publish(store, epoch)
        store.prepare(order(epoch, segment(store, epoch)), see)
        assert decide(store, epoch) == (True, True)
    assert committed(store.path) == {3, 4, 5}


def test_a_segment_that_was_cut_off_is_not_trusted(store: JobStore, mount: FuseMount) -> None:
    file = store.backend.create_segment("s")
    file.write_tail(0, BODY)
    mount.die()
    mount.again()
    with pytest.raises(StorageError):
        file.sync_close(len(BODY))
    store.renew()
    assert segment(store, 3) in store.backend.list("segments")


def test_the_coordinator_in_the_store_goes_on(store: JobStore, mount: FuseMount) -> None:
    with StoreCoordinator(store.backend, after=store.after) as one:
        rule = one.campaign("n0", "a" * 32, "tcp://h:1", time.monotonic() + 5, over=0)
        mount.die()
        away(one.keep)
        mount.again()
        assert one.keep()
        mount.die()
        mount.again()
        assert one.current(time.monotonic() + 5) == rule
