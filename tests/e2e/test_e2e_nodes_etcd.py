"""A job whose controller is elected through a real etcd."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nodes_help import committed, restored, save

HELP = Path(__file__).parent.parent / "controller" / "etcd_help.py"


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Any]:
    spec = importlib.util.spec_from_file_location("etcd_help", HELP)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    server = module.EtcdServer(tmp_path / "etcd")
    server.start()
    yield server
    server.kill()


def test_another_node_rules_when_the_first_is_lost(make_cluster: Any, etcd: Any) -> None:
    address = f"etcd://{etcd.endpoint}"
    cluster = make_cluster(3, loopback=True, hurry=True, controller=address).up()
    ranks = cluster.connect()
    assert committed(save(ranks, 1))
    first = cluster.ruler
    first.kill_agent()
    found = [save(ranks, epoch) for epoch in (2, 3)]
    assert committed(found[1]), found
    restored(ranks[1], 3, 3)
    assert not list((cluster.store / "controllers").iterdir())
