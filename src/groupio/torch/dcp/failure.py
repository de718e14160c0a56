"""Brings a failure to the caller of ``dcp.save`` and ``dcp.load``.

DCP catches what a rank raises and raises ``CheckpointException`` on all of them, which is a
``BaseException``: ``except Exception`` does not catch it. Where DCP hands out what the coordinator
returns (the plans), groupio lets it hand out an error that is both: an instance of the typed error
of groupio, hence an ordinary exception, and of ``CheckpointException``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

from groupio.errors import (
    AgentLost,
    GroupAborted,
    GroupIOError,
    GroupTimeout,
    from_wire,
    to_wire,
)

_SECONDARY = (GroupAborted, GroupTimeout, AgentLost)
"""What members say when another one is the cause."""

_joined: dict[type[GroupIOError], type[GroupIOError]] = {}


def for_all(errors: Mapping[int, GroupIOError]) -> GroupIOError:
    """One error for all ranks, from those of some of them.

    It has the type and the fields of the one that says most, its message begins with the rank,
    and ``failures`` has the errors of all as ``CheckpointException`` gives them.
    """
    rank = min(errors, key=lambda rank: (isinstance(errors[rank], _SECONDARY), rank))
    wire = to_wire(errors[rank])
    if not wire["message"].startswith("rank "):
        wire["message"] = f"rank {rank}: {wire['message']}"
    return _build(wire, {number: to_wire(error) for number, error in errors.items()})


def _build(wire: dict[str, Any], failures: dict[int, dict[str, Any]]) -> GroupIOError:
    cls = _joined_type(type(from_wire(wire)))
    error = cls.__new__(cls)
    plain = from_wire(wire)
    error.__dict__.update(plain.__dict__)
    error.args = plain.args
    caught = {rank: _wrap_exception(from_wire(data)) for rank, data in failures.items()}
    cast(Any, error)._failures = caught
    return error


def _joined_type(cls: type[GroupIOError]) -> type[GroupIOError]:
    """``cls`` that is also a CheckpointException."""
    found = _joined.get(cls)
    if found is None:

        def reduce(self: Any) -> tuple[Any, ...]:
            wires = {rank: to_wire(pair[0]) for rank, pair in self.failures.items()}
            return _build, (to_wire(self), wires)

        body = {
            "__reduce__": reduce,
            "__str__": cls.__str__,
            "__doc__": cls.__doc__,
            "__module__": cls.__module__,
        }
        found = cast(type[GroupIOError], type(cls.__name__, (cls, CheckpointException), body))
        _joined[cls] = found
    return found
