"""groupio: grouped I/O for AI jobs.

The whole public API::

    client = groupio.connect("/checkpoints/run-7")          # one per rank
    handle = client.save({"w": w, "step": 3}, epoch=3)      # returns when w may be overwritten
    handle.wait("durable")
    state = client.load()                                   # the newest committed epoch
    client.close()

Everything else (``groupio.client``, ``groupio.agent``, ...) is internal, except ``groupio.torch``
(import it by name) and ``groupio.testing``. The client is loaded when it is first used, and numpy
by the first save or load: ``import groupio`` and ``connect`` cost little.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from groupio.client.handle import SaveHandle
from groupio.errors import (
    AgentLost,
    ControllerLost,
    EpochConflict,
    FormatError,
    GroupAborted,
    GroupIOError,
    GroupTimeout,
    IntegrityError,
    InvalidInput,
    LateMember,
    LevelUnreachable,
    NotFound,
    Outcome,
    ReplicaDivergence,
    Retry,
    StagingFull,
    StaleEpoch,
    StateMismatch,
    StorageError,
    StorageFull,
    WaitTimeout,
)
from groupio.model import EpochInfo, Level, Timeline
from groupio.settings import Settings

if TYPE_CHECKING:
    from groupio.client.client import Client, connect

__version__ = "0.1.0"

__all__ = [
    "AgentLost",
    "Client",
    "ControllerLost",
    "EpochConflict",
    "EpochInfo",
    "FormatError",
    "GroupAborted",
    "GroupIOError",
    "GroupTimeout",
    "IntegrityError",
    "InvalidInput",
    "LateMember",
    "Level",
    "LevelUnreachable",
    "NotFound",
    "Outcome",
    "ReplicaDivergence",
    "Retry",
    "SaveHandle",
    "Settings",
    "StagingFull",
    "StaleEpoch",
    "StateMismatch",
    "StorageError",
    "StorageFull",
    "Timeline",
    "WaitTimeout",
    "__version__",
    "connect",
]

_LAZY = ("Client", "connect")


def __getattr__(name: str) -> Any:
    if name == "torch":
        return import_module("groupio.torch")
    if name not in _LAZY:
        raise AttributeError(f"module 'groupio' has no attribute {name!r}")
    value = getattr(import_module("groupio.client.client"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
