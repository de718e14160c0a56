"""One of two processes of ``groupio controller run`` takes over from the other."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from controller_help import controller
from etcd_help import EtcdServer


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[str]:
    """A real etcd, as ``--coordinator`` names it."""
    server = EtcdServer(tmp_path / "etcd")
    server.start()
    yield f"etcd://{server.endpoint}"
    server.kill()


def test_with_etcd_the_second_one_stands_by(start: Any, tmp_path: Path, etcd: str) -> None:
    store = tmp_path / "store"
    first = start(controller(store, "--coordinator", etcd))
    assert first.news()["state"] == "rules"
    second = start(controller(store, "--coordinator", etcd))
    assert second.news()["state"] == "stands by"
    third = start(controller(store, "--coordinator", etcd))
    assert third.news()["state"] == "stands by"
    ended = third.end(signal.SIGTERM)
    assert ended[0] == 0, ended

    began = time.monotonic()
    first.process.kill()
    news = second.news()
    assert news["state"] == "rules"
    assert time.monotonic() - began < 15  # the lease of 5 s, and some time on a busy machine
    assert second.end(signal.SIGTERM)[0] == 0


def test_one_that_was_paused_too_long_ends(start: Any, tmp_path: Path) -> None:
    store = tmp_path / "store"
    first = start(controller(store))
    first.news()
    first.process.send_signal(signal.SIGSTOP)
    second = start(controller(store))
    assert "term 2" in second.news()["detail"]
    code, err = first.end(signal.SIGCONT)
    assert code == 1
    assert "the rule over" in err
    assert "term 2 is in the store" in err
    assert second.end(signal.SIGTERM)[0] == 0
