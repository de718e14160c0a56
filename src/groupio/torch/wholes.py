"""Large containers that were saved whole: compared with the caller's, and put into them.

The rules are those of :mod:`groupio.torch.matching` for containers whose values are items, but no
object is made for each value.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, MutableMapping
from itertools import chain
from operator import eq
from typing import Any, NamedTuple

import torch

from groupio.torch.converted import ATOMS, adopt
from groupio.torch.flatten import is_branch

Keys = tuple[Any, ...]


class Differences(NamedTuple):
    """The names of values that only one side has, and why others do not fit."""

    missing: list[str]
    unexpected: list[str]
    different: dict[str, str]


def fits(here: Any, saved: Any) -> bool:
    """Whether the container ``here`` can take values of ``saved``: both are mappings, or neither.

    A sequence is a container of this kind only if it holds a mapping or a tensor.
    """
    if isinstance(here, Mapping):
        return isinstance(saved, Mapping)
    return not isinstance(saved, Mapping) and is_branch((), saved)


def compare(here: Any, saved: Any, keys: Keys, found: Differences) -> None:
    """Add to ``found`` how the containers differ, which fit; ``keys`` lead to them."""
    mine, others = _keys_of(here), _keys_of(saved)
    if not _are_equal(mine, others):
        found.missing.extend(_name(keys, key) for key in mine if key not in others)
        found.unexpected.extend(_name(keys, key) for key in others if key not in mine)
    if set(map(type, _values_of(here))) <= ATOMS or _hold_alike(here, saved):
        return  # they take anything
    for key in mine:
        child = here[key]
        if type(child) in ATOMS or key not in others or _are_alike(child, saved[key]):
            continue
        if isinstance(child, torch.Tensor):
            found.different[_name(keys, key)] = "a tensor here, a plain value saved"
        elif is_branch((), child):
            if fits(child, saved[key]):
                compare(child, saved[key], (*keys, key), found)
            else:
                found.missing.append(_name(keys, key))
                found.unexpected.append(_name(keys, key))


def merged(here: Any, saved: Any) -> Any:
    """The container ``here`` with the values of ``saved`` under the keys that both have.

    It is changed in place where it can be; a tuple or a constant mapping gets a new one.
    """
    if _are_alike(here, saved):
        here.update(saved)
        return here
    if _hold_alike(here, saved):
        # Calls update for each pair of dicts.
        deque(map(dict.update, _values_of(here), _values_of(saved)), maxlen=0)
        return here
    others = _keys_of(saved)
    changed = {key: _value(here[key], saved[key]) for key in _keys_of(here) if key in others}
    if isinstance(here, tuple):
        return like(here, [changed.get(at, child) for at, child in enumerate(here)])
    if isinstance(here, Mapping) and not isinstance(here, MutableMapping):
        return {key: changed.get(key, child) for key, child in here.items()}
    for key, value in changed.items():
        here[key] = value
    return here


def like(given: tuple[Any, ...], values: list[Any]) -> Any:
    """A tuple of the class of ``given``."""
    cls = type(given)
    if hasattr(cls, "_make"):
        return cls._make(values)
    try:
        return cls(values)
    except Exception:  # noqa: BLE001  the caller's own class may want anything
        return tuple(values)


def _value(here: Any, saved: Any) -> Any:
    if type(here) in ATOMS:
        return saved
    if _are_alike(here, saved):
        here.update(saved)
        return here
    if not is_branch((), here):
        return adopt(here, saved)
    return merged(here, saved) if fits(here, saved) else here


def _are_alike(here: Any, saved: Any) -> bool:
    """Whether both are dicts of the same keys, and those of ``here`` take anything."""
    if type(here) is not dict or type(saved) is not dict:
        return False
    return _are_equal(here.keys(), saved.keys()) and set(map(type, here.values())) <= ATOMS


def _hold_alike(here: Any, saved: Any) -> bool:
    """Whether both have the same keys in the same order, and only dicts that are alike."""
    mine, others = _values_of(here), _values_of(saved)
    if not set(map(type, mine)) == set(map(type, others)) == {dict}:
        return False
    if len(mine) != len(others) or not all(map(eq, _keys_of(here), _keys_of(saved))):
        return False
    if not set(map(type, chain.from_iterable(map(dict.values, mine)))) <= ATOMS:
        return False
    return all(map(eq, map(dict.keys, mine), map(dict.keys, others)))


def _are_equal(keys: Any, others: Any) -> bool:
    """Whether the keys of two containers are equal; quick where their order is, too."""
    return len(keys) == len(others) and (all(map(eq, keys, others)) or keys == others)


def _values_of(container: Any) -> Collection[Any]:
    """The elements of a container, in its order."""
    return container.values() if isinstance(container, Mapping) else container


def _keys_of(container: Any) -> Any:
    """The keys or indexes of a container, in its order."""
    return container.keys() if isinstance(container, Mapping) else range(len(container))


def _name(keys: Keys, key: Any) -> str:
    return ".".join(map(str, (*keys, key)))
