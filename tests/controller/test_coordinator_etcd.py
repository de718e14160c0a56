"""Coordination by a real etcd passes the suite; each agent has its own way to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from etcd_help import HOST, EtcdServer, Gate

from groupio.controller.by_etcd import EtcdCoordinator
from groupio.controller.coordinator import Coordinator, OnLost
from groupio.testing.coordinator_suite import CoordinatorSuite

TTL_S = 3


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    server.start()
    yield server
    server.kill()


class TestByEtcd(CoordinatorSuite):
    @pytest.fixture(autouse=True)
    def gates(self, server: EtcdServer) -> Iterator[None]:
        self.server = server
        self.gates_of_test: dict[Coordinator, Gate] = {}
        yield
        for gate in self.gates_of_test.values():
            gate.shut()

    def open_coordinator(self, place: Path, on_lost: OnLost) -> Coordinator:
        gate = Gate((HOST, self.server.port))
        made = EtcdCoordinator([gate.endpoint], place.name, ttl_s=TTL_S, on_lost=on_lost)
        self.gates_of_test[made] = gate
        return made

    def silence(self, coordinator: Coordinator) -> None:
        self.gates_of_test[coordinator].stall()

    def cut_off(self, place: Path) -> None:
        for gate in self.gates_of_test.values():
            gate.shut()
