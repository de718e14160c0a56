"""Checks of what callers pass in: one clear sentence instead of a late surprise."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from groupio.errors import InvalidInput
from groupio.model import EPOCH_MAX
from groupio.settings import is_unicode

METADATA_BYTES_MAX = 64 << 10
"""Largest encoded ``metadata`` of a save."""

WHEN_FULL = ("wait", "skip", "fail")

_METADATA_DEPTH_MAX = 32


def check_epoch(epoch: object, name: str = "epoch") -> int:
    """``epoch`` as an int; InvalidInput unless it is one from 0 to EPOCH_MAX."""
    if isinstance(epoch, bool) or not isinstance(epoch, int):
        # Integers of other libraries say what they are.
        index = None if isinstance(epoch, bool) else getattr(epoch, "__index__", None)
        if index is None:
            raise InvalidInput(
                f"{name}={epoch!r} is of type {type(epoch).__name__}; give the training step as int"
            )
        epoch = index()
    assert isinstance(epoch, int)
    if not 0 <= epoch <= EPOCH_MAX:
        raise InvalidInput(f"{name}={epoch} is not between 0 and {EPOCH_MAX}")
    return int(epoch)


def check_rewind(rewind_to: object, epoch: int) -> int | None:
    """``rewind_to`` of a save of ``epoch``; InvalidInput unless it is None or an older epoch."""
    if rewind_to is None:
        return None
    after = check_epoch(rewind_to, "rewind_to")
    if after >= epoch:
        raise InvalidInput(
            f"rewind_to={after} is not older than epoch {epoch}, which is saved; give the epoch "
            "that was loaded"
        )
    return after


def check_deadline(deadline_s: object) -> float:
    """``deadline_s`` as a float; InvalidInput unless it is a finite number above 0."""
    good = isinstance(deadline_s, int | float) and not isinstance(deadline_s, bool)
    if not good or not 0 < deadline_s < math.inf:  # type: ignore[operator]
        raise InvalidInput(f"deadline_s={deadline_s!r} must be a number of seconds above 0")
    return float(deadline_s)  # type: ignore[arg-type]


def check_patterns(replicated: Iterable[str]) -> tuple[str, ...]:
    """``replicated`` as a sorted tuple without repetitions; InvalidInput unless all are str.

    Sorted, because members that mean the same must say the same.
    """
    try:
        given = (replicated,) if isinstance(replicated, str) else tuple(replicated)
    except TypeError:
        raise InvalidInput(
            f"replicated is of type {type(replicated).__name__}; give a list of names or patterns"
        ) from None
    for pattern in given:
        if not isinstance(pattern, str):
            raise InvalidInput(
                f"replicated contains {pattern!r} of type {type(pattern).__name__}; give names or "
                "glob patterns of items"
            )
        if not is_unicode(pattern):
            raise InvalidInput(f"replicated contains {pattern!r}, which is not valid Unicode")
    return tuple(sorted(set(given)))


def check_when_full(when_full: object) -> str:
    """``when_full``; InvalidInput unless it is one of WHEN_FULL."""
    if when_full not in WHEN_FULL:
        raise InvalidInput(f"when_full={when_full!r} must be one of {', '.join(WHEN_FULL)}")
    return str(when_full)


def check_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """``metadata`` as a dict that travels and is stored as it is.

    InvalidInput when it is no dict with str keys of None, bool, int (64 bits), float, str, bytes,
    lists (tuples become lists) and such dicts, or when it is too large.
    """
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        raise InvalidInput(f"metadata is of type {type(metadata).__name__}; give a dict")
    checked: dict[str, Any] = _checked(metadata, "metadata", 0)
    size = len(msgspec.msgpack.encode(checked))
    if size > METADATA_BYTES_MAX:
        raise InvalidInput(
            f"metadata takes {size} bytes, more than {METADATA_BYTES_MAX}; save large values as "
            "items"
        )
    return checked


def _checked(value: Any, path: str, depth: int) -> Any:
    if depth > _METADATA_DEPTH_MAX:
        raise InvalidInput(f"{path} is nested deeper than {_METADATA_DEPTH_MAX}; flatten it")
    if value is None or type(value) in (bool, float, bytes):
        return value
    if type(value) is int:
        if -(1 << 63) <= value < 1 << 64:
            return value
        raise InvalidInput(f"{path}={value} does not fit 64 bits; give it as str")
    if type(value) is str:
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidInput(f"{path} is not valid Unicode: {value[:80]!a}") from None
        return value
    if isinstance(value, list | tuple):
        return [_checked(v, f"{path}[{i}]", depth + 1) for i, v in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if type(key) is not str:
                raise InvalidInput(f"{path} has the key {key!r}; its keys must be str")
            _checked(key, f"{path}[{key!r}] (the key)", depth + 1)
        return {k: _checked(v, f"{path}[{k!r}]", depth + 1) for k, v in value.items()}
    raise InvalidInput(
        f"{path} is of type {type(value).__name__}; metadata holds None, bool, int, float, str, "
        "bytes, lists and dicts"
    )
