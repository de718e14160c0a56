"""groupio: grouped I/O for AI jobs.

The whole public API::

    client = groupio.connect("/checkpoints/run-7")          # one per rank
    handle = client.save({"w": w, "step": 3}, epoch=3)      # returns when w may be overwritten
    handle.wait("durable")
    state = client.load()                                   # the newest committed epoch
    client.close()

Everything else (``groupio.client``, ``groupio.agent``, ...) is internal, except ``groupio.torch``
(import it by name) and ``groupio.testing``. Names are loaded when they are first used, so that
``import groupio`` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from groupio.client.client import Client, connect
    from groupio.client.handle import SaveHandle
    from groupio.client.settings import Settings
    from groupio.model import EpochInfo, Level, Timeline

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

_HOMES = {
    "Client": "groupio.client.client",
    "connect": "groupio.client.client",
    "SaveHandle": "groupio.client.handle",
    "Settings": "groupio.client.settings",
    "EpochInfo": "groupio.model",
    "Level": "groupio.model",
    "Timeline": "groupio.model",
}


def __getattr__(name: str) -> Any:
    if name == "torch":
        return import_module("groupio.torch")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'groupio' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
