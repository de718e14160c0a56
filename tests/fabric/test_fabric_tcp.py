"""The TCP fabric passes the suite of all fabrics."""

from __future__ import annotations

from groupio.fabric.base import Fabric
from groupio.fabric.pacing import Pacer
from groupio.fabric.tcp import TcpFabric
from groupio.testing.fabric_suite import FabricSuite


class TestTcp(FabricSuite):
    @staticmethod
    def open_fabric(*, token: bytes | None, pace: Pacer) -> Fabric:
        return TcpFabric(token=token, pace=pace)
