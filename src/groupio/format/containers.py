"""Containers of the standard library other than list, tuple and dict, as plain values and back.

Each has a kind, which is stored, and content that is made of list, tuple, dict and atoms. No class
is looked up by a stored name: a named tuple comes back as a named tuple made of its field names.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, UserDict, UserList, UserString, defaultdict, deque
from collections import namedtuple as make_named
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

from groupio.errors import InvalidInput

NAMED_FIELDS_MAX = 256
"""Most fields of a named tuple."""

FACTORIES: dict[str, type] = {
    factory.__name__: factory
    for factory in (
        *(bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset),
        *(OrderedDict, Counter, deque),
    )
}
"""The factories of a defaultdict that are kept."""


class Kind(NamedTuple):
    """``take`` gives the content of a container, ``make`` the container of a content.

    ``make`` raises TypeError, ValueError or OverflowError when the content is none of this kind.
    """

    name: str
    take: Callable[[Any], Any]
    make: Callable[[Any], Any]


def kind_of_class(cls: type) -> Kind | None:
    """The kind of the containers of class ``cls``; None for an unknown class."""
    found = _KINDS.get(cls)
    if found is None and is_named_tuple(cls):
        return NAMED
    return found


def kind_of(value: Any) -> Kind | None:
    """The kind of ``value``; None when it would not come back as what it is."""
    kind = kind_of_class(type(value))
    if kind is _DEFAULT and factory_name(value) is None:
        return None
    return kind


def known_base(cls: type) -> type | None:
    """The class as which containers of the unknown class ``cls`` are stored; None: as none."""
    for base in cls.__mro__:
        if base in (list, tuple, dict) or (base in _KINDS and base is not defaultdict):
            return base
    return dict if issubclass(cls, Mapping) else None


def as_base(value: Any, base: type) -> Any:
    """The elements of a container of an unknown class, in one of the class ``base``."""
    if base is deque:
        return deque(value, value.maxlen)
    if issubclass(base, Mapping):
        return base(dict(value.items()))  # type: ignore[call-arg]
    if base is SimpleNamespace:
        return SimpleNamespace(**vars(value))
    return base(value)  # type: ignore[call-arg]


def factory_name(value: Any) -> str | None:
    """The name under which the factory of a defaultdict is kept, "" for none; None: it is not."""
    factory = value.default_factory
    if factory is None:
        return ""
    name = getattr(factory, "__name__", "")
    return name if FACTORIES.get(name) is factory else None


def is_named_tuple(cls: type) -> bool:
    """Whether ``cls`` is a named tuple that can be made again of its name and fields."""
    fields = getattr(cls, "_fields", None)
    if not issubclass(cls, tuple) or type(fields) is not tuple or not hasattr(cls, "_make"):
        return False
    try:
        named_tuple_class(cls.__name__, fields)
    except (TypeError, ValueError):
        return False
    return True


@lru_cache(1024)
def named_tuple_class(name: str, fields: tuple[str, ...]) -> Any:
    """A class of named tuples; ValueError or TypeError when the names cannot be those of one."""
    if type(name) is not str or not all(type(field) is str for field in fields):
        raise TypeError("names are str")
    if len(fields) > NAMED_FIELDS_MAX or sum(map(len, (name, *fields))) > 1 << 16:
        raise ValueError("too many fields")
    # Renamed fields are called _0, _1, ... by their place, and are so again.
    make: Any = make_named
    made = make(name, fields, rename=True, module=__name__)
    if made._fields != fields:
        raise ValueError("not the fields of a named tuple")
    made.__reduce__ = _reduced
    return made


def make_named_tuple(content: tuple[str, tuple[str, ...], tuple[Any, ...]]) -> Any:
    """The named tuple of (class name, field names, values)."""
    name, fields, values = content
    if type(fields) is not tuple or type(values) is not tuple:
        raise TypeError("not a named tuple")
    return named_tuple_class(name, fields)._make(values)


def _reduced(value: Any) -> tuple[Any, ...]:
    return make_named_tuple, (_take_named(value),)


def _take_named(value: Any) -> tuple[Any, ...]:
    return type(value).__name__, type(value)._fields, tuple(value)


def _make_default(content: Any) -> Any:
    name, entries = content
    if type(name) is not str or type(entries) is not dict or (name and name not in FACTORIES):
        raise ValueError("not a defaultdict")
    return defaultdict(FACTORIES[name] if name else None, entries)


def _make_deque(content: Any) -> Any:
    maxlen, values = content
    if type(values) is not list:
        raise TypeError("not a list")
    if maxlen is not None and (type(maxlen) is not int or not len(values) <= maxlen <= sys.maxsize):
        raise ValueError("longer than its limit")
    return deque(values, maxlen)


def _make_distinct(cls: type) -> Callable[[Any], Any]:
    def make(content: Any) -> Any:
        if type(content) is not list:
            raise TypeError("not a list")
        made = cls(content)
        if len(made) != len(content):
            raise ValueError("an element stands twice")
        return made

    return make


def _of(content_type: type, cls: type) -> Callable[[Any], Any]:
    def make(content: Any) -> Any:
        if type(content) is not content_type:
            raise TypeError(f"not a {content_type.__name__}")
        return cls(content)

    return make


def _make_counter(content: Any) -> Any:
    if type(content) is not dict:
        raise TypeError("not a dict")
    made: Counter[Any] = Counter()
    made.update(content)  # of an empty counter: the counts as they are, whatever their types
    return made


def _make_namespace(content: Any) -> Any:
    if type(content) is not dict or not all(type(key) is str for key in content):
        raise TypeError("not a dict of names")
    return SimpleNamespace(**content)


def _make_span(cls: type) -> Callable[[Any], Any]:
    def make(content: Any) -> Any:
        if type(content) is not tuple or len(content) != 3:
            raise TypeError("not three numbers")
        return cls(*content)

    return make


def _span(value: Any) -> tuple[Any, Any, Any]:
    return value.start, value.stop, value.step


def _entries(value: Any) -> dict[Any, Any]:
    return dict(value.items())


_DEFAULT = Kind("defaultdict", lambda v: (factory_name(v), _entries(v)), _make_default)
NAMED = Kind("namedtuple", _take_named, make_named_tuple)

_KINDS: dict[type, Kind] = {
    OrderedDict: Kind("OrderedDict", _entries, _of(dict, OrderedDict)),
    defaultdict: _DEFAULT,
    Counter: Kind("Counter", _entries, _make_counter),
    UserDict: Kind("UserDict", _entries, _of(dict, UserDict)),
    UserList: Kind("UserList", list, _of(list, UserList)),
    UserString: Kind("UserString", lambda value: value.data, _of(str, UserString)),
    deque: Kind("deque", lambda value: (value.maxlen, list(value)), _make_deque),
    set: Kind("set", list, _make_distinct(set)),
    frozenset: Kind("frozenset", list, _make_distinct(frozenset)),
    range: Kind("range", _span, _make_span(range)),
    slice: Kind("slice", _span, _make_span(slice)),
    SimpleNamespace: Kind("SimpleNamespace", lambda v: dict(vars(v)), _make_namespace),
}

KINDS = {kind.name: kind for kind in (*_KINDS.values(), NAMED)}
"""All kinds by their names."""


def make_container(name: str, content: Any) -> Any:
    """The container of kind ``name``; InvalidInput when there is none of this kind and content."""
    kind = KINDS.get(name)
    try:
        if kind is not None:
            return kind.make(content)
    except (TypeError, ValueError, OverflowError):
        pass
    raise InvalidInput(f"no container of kind {name[:80]!r} has this content")
