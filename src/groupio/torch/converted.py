"""Containers of unknown classes, which are stored as those of a known one: the notes of them, and
the classes that the caller's own state dict has for what was loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import numpy as np

from groupio.client.values import Encoded
from groupio.format.codec import Converted, encode_plain
from groupio.format.containers import is_named_tuple
from groupio.format.structure import Path, path_text

LISTED = 20
"""At most so many containers are named."""

ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes))

_KIND_NAMES = {"odict": "OrderedDict"}


class ConvertedNotes:
    """Collects them during a save or a load: each by its path."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[str, str]] = {}

    def add(self, path: str, was: str, kind: str) -> None:
        """The container at ``path`` is of the class ``was`` and comes back as ``kind``."""
        self._found[path] = (was, _KIND_NAMES.get(kind, kind))

    def extend(self, path: str, converted: Iterable[Converted]) -> None:
        """Those in the value at ``path``."""
        for where, was, kind in converted:
            self.add(f"{path}{where}", was, kind)

    def encoded(self, name: str, value: Any, path: Path) -> Any:
        """The plain value ``value`` of the item ``name`` for the client, encoded if it has parts.

        InvalidInput, with its path, for what cannot be stored.
        """
        if type(value) in ATOMS or isinstance(value, np.ndarray | np.generic):
            return value
        converted: list[Converted] = []
        data = encode_plain(value, name=f"item {name!r}", converted=converted)
        if converted:
            self.extend(path_text(path), converted)
        return Encoded(data)

    def saved(self) -> list[str]:
        """The notes of a save."""
        return self._notes("{path} is a {was}, which is saved as a {kind}")

    def loaded(self) -> list[str]:
        """The notes of a load."""
        return self._notes("{path} was saved as a {was} and is loaded as a {kind}")

    def _notes(self, form: str) -> list[str]:
        notes = [
            form.format(path=path, was=was, kind=kind)
            for path, (was, kind) in list(self._found.items())[:LISTED]
        ]
        if len(self._found) > LISTED:
            notes.append(f"and so do {len(self._found) - LISTED} other containers")
        return notes


def adopt(here: Any, loaded: Any) -> Any:
    """``loaded`` with the named tuples of ``here``, the value that it replaces, where they fit."""
    return _adopted(here, loaded) if _holds_named_tuple(loaded) else loaded


def _holds_named_tuple(loaded: Any) -> bool:
    level: Iterable[Any] = [loaded]
    kinds = {type(loaded)}
    while not kinds <= ATOMS:
        if any(issubclass(kind, tuple) and hasattr(kind, "_fields") for kind in kinds):
            return True
        mappings = {kind for kind in kinds if issubclass(kind, dict)}
        others = {kind for kind in kinds if issubclass(kind, tuple | list)}
        containers = level if kinds == others else [one for one in level if type(one) in others]
        inner = [*map(dict.values, (one for one in level if type(one) in mappings)), *containers]
        level = list(chain.from_iterable(inner))
        kinds = set(map(type, level))
    return False


def _adopted(here: Any, loaded: Any) -> Any:
    if type(loaded) in ATOMS:
        return loaded
    if isinstance(loaded, tuple) and isinstance(here, tuple):
        values = [_adopted(*pair) for pair in zip(here, loaded, strict=False)]
        values += loaded[len(here) :]
        cls: Any = type(here) if _same_fields(here, loaded) else type(loaded)
        return cls._make(values) if is_named_tuple(cls) else tuple(values)
    if type(here) is type(loaded) is list:
        loaded[: len(here)] = [_adopted(*pair) for pair in zip(here, loaded, strict=False)]
    elif isinstance(here, Mapping) and isinstance(loaded, dict):
        for key in loaded.keys() & here.keys():
            loaded[key] = _adopted(here[key], loaded[key])
    return loaded


def _same_fields(here: Any, loaded: Any) -> bool:
    fields = getattr(loaded, "_fields", None)
    return fields is not None and getattr(here, "_fields", None) == fields
