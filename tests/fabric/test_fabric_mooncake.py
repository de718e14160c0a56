"""The fabric over a real Mooncake Transfer Engine passes the suite of all fabrics."""

from __future__ import annotations

import functools

import pytest

pytest.importorskip("mooncake.engine", reason="peer not installed: mooncake", exc_type=ImportError)

from groupio.fabric.base import Fabric
from groupio.fabric.mooncake import MooncakeFabric
from groupio.fabric.mooncake_engine import Engine
from groupio.fabric.pacing import Pacer
from groupio.testing.fabric_suite import FabricSuite


@functools.cache
def shared_engine() -> Engine:
    """One engine for all fabrics of this process: to end one takes a second."""
    return Engine("127.0.0.1")


class TestMooncake(FabricSuite):
    @staticmethod
    def open_fabric(*, token: bytes | None, pace: Pacer) -> Fabric:
        return MooncakeFabric(token=token, pace=pace, engine=shared_engine())
