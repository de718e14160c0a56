"""A nested state dict as named leaves; :mod:`groupio.format.structure` has the record of it.

Lists are traversed when they hold mappings or tensors, so ``param_groups.0.lr`` is a leaf and
``betas`` is one too. A large container without tensors or arrays is one leaf, whole.
"""

from __future__ import annotations

from collections import OrderedDict, UserList, deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from groupio.errors import InvalidInput
from groupio.format.codec import encode_plain
from groupio.format.containers import kind_of as container_kind
from groupio.format.containers import kind_of_class, known_base
from groupio.format.structure import DEPTH_MAX, Branch, Leaf, Path, Step, name_leaves, path_text

KEY_TYPES = (str, int, bool, float, bytes, type(None))
_ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes))

WHOLE_FROM = 4096
"""A container without tensors whose mappings have so many entries in all is one leaf."""

WHOLE_BYTES_MAX = 1 << 28
"""No container is one leaf whose texts and bytes are longer than this together."""


def flatten(state_dict: Mapping[Any, Any]) -> Branch:
    """The tree of ``state_dict``, its leaves named.

    Raises InvalidInput, naming the path, for keys that are no plain values, values nested deeper
    than 100 levels (or in themselves), and objects that are no tensors or plain values.
    """
    if not isinstance(state_dict, Mapping):
        raise InvalidInput(
            f"the state dict is a {type_text(state_dict)}; give a dict that maps names to values"
        )
    root = _branch((), state_dict, wholes=True)
    name_leaves(list(root.leaves()))
    return root


def taken_apart(path: Path, value: Any) -> Branch:
    """The tree of a container at ``path``, each value in it a leaf. The leaves have no names.

    Raises InvalidInput as :func:`flatten`.
    """
    return _branch(path, value, wholes=False)


def type_text(value: Any) -> str:
    """The type of ``value`` for a message: ``module.Name``, or the bare name of a builtin."""
    cls = type(value)
    return cls.__name__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


class Form(NamedTuple):
    """What a container is, its content left out; see :class:`Branch`."""

    kind: str
    detail: Any = None
    was: str = ""


_FORMS: dict[type, Form] = {dict: Form("dict"), list: Form("list"), tuple: Form("tuple")}
_BASES = {dict: "dict", list: "list", tuple: "tuple", OrderedDict: "odict"}
_BRANCHES = ("defaultdict", "Counter", "UserDict", "UserList", "deque", "namedtuple")


def form_of(value: Any) -> Form | None:
    """The form of a container whose elements can be leaves; None for any other value."""
    cls = type(value)
    plain: Form | None = _FORMS.get(cls)
    if plain is not None:
        return plain
    if cls is OrderedDict:
        return Form("odict", _module_metadata(value))
    kind = container_kind(value)
    if kind is not None:
        if kind.name not in _BRANCHES:
            return None
        content = kind.take(value)
        match kind.name:
            case "namedtuple":
                return Form(kind.name, content[:2])
            case "defaultdict" | "deque":
                return Form(kind.name, content[0])
        return Form(kind.name)
    base = known_base(cls)
    if base is None:
        return None
    if base in _BASES:
        return Form(_BASES[base], None, type_text(value))
    if base.__name__ not in _BRANCHES:
        return None
    return Form(base.__name__, value.maxlen if base is deque else None, type_text(value))


def _module_metadata(value: OrderedDict[Any, Any]) -> Any:
    """``_metadata`` of a module's state dict (its versions), if that can be stored."""
    found = getattr(value, "_metadata", None)
    if not isinstance(found, Mapping) or not found:
        return None
    try:
        encode_plain(found)
    except InvalidInput:
        return None
    return found


def dcp_tree(state_dict: Mapping[Any, Any]) -> Branch:
    """The tree of ``state_dict`` as ``torch.distributed.checkpoint`` takes it apart, its leaves
    named and without values.

    InvalidInput for a container that contains itself, and for two values of one name: with both
    paths, since DCP cannot tell them apart.
    """
    root = _dcp_branch((), state_dict, ())
    seen: dict[str, Leaf] = {}
    for leaf in root.leaves():
        leaf.name = ".".join([str(step.key) for step in leaf.path])
        other = seen.setdefault(leaf.name, leaf)
        if other is not leaf:
            raise InvalidInput(
                f"{path_text(other.path)} and {path_text(leaf.path)} of the state dict have the "
                f"same name {leaf.name[:200]!r} in torch.distributed.checkpoint; rename one of the "
                "keys, or use groupio.torch.save"
            )
    return root


def _dcp_branch(path: Path, value: Any, around: tuple[int, ...]) -> Branch:
    around = _entered(path, value, around)
    form = form_of(value) or Form("list")
    branch = Branch(path, form.kind, detail=form.detail, was=form.was)
    indexed = not isinstance(value, Mapping)
    for key, child in enumerate(value) if indexed else value.items():
        below = (*path, Step(key, indexed))
        apart = isinstance(child, Mapping) or (
            isinstance(child, list) and _holds_parts(below, child, (), list)
        )
        branch.children[key] = _dcp_branch(below, child, around) if apart else Leaf(below)
    return branch


def _entered(path: Path, value: Any, around: tuple[int, ...]) -> tuple[int, ...]:
    """The identities of the containers around what is in ``value``."""
    if id(value) in around:
        raise InvalidInput(f"the state dict contains itself at {_clipped(path)}")
    if len(path) > DEPTH_MAX:
        raise InvalidInput(
            f"the state dict is nested deeper than {DEPTH_MAX} levels at {_clipped(path)}"
        )
    return (*around, id(value))


def _branch(path: Path, value: Any, around: tuple[int, ...] = (), *, wholes: bool) -> Branch:
    around = _entered(path, value, around)
    items: Iterator[tuple[Step, Any]]
    if isinstance(value, Mapping):
        items = ((Step(_checked_key(path, key), False), child) for key, child in value.items())
    else:
        items = ((Step(index, True), child) for index, child in enumerate(value))
    form = form_of(value)
    assert form is not None
    branch = Branch(path, form.kind, value=value, detail=form.detail, was=form.was)
    for part, child in items:
        below = (*path, part)
        node: Branch | Leaf
        if isinstance(child, torch.Tensor):  # first: there are many, and the other checks are slow
            node = Leaf(below, child)
        elif not is_branch(below, child):
            node = leaf_of(below, child)
        elif wholes and is_whole(child):
            node = Leaf(below, child, whole=True)
        else:
            node = _branch(below, child, around, wholes=wholes)
        branch.children[part.key] = node
    return branch


def _clipped(path: Path) -> str:
    return path_text(path) if len(path) <= 8 else f"{path_text(path[:8])}…"


def is_branch(path: Path, value: Any) -> bool:
    """Whether ``value`` is taken apart: a mapping, or a list or tuple that holds one or a tensor.

    Tuples of tensors differ from ``torch.distributed.checkpoint``, which pickles them whole.
    """
    if type(value) in _ATOMS:
        return False
    if isinstance(value, Mapping):
        return True
    return isinstance(value, _SEQUENCES) and _holds_parts(path, value, ())


_SEQUENCES = (list, tuple, deque, UserList)


def _holds_parts(
    path: Path,
    values: Any,
    around: tuple[int, ...],
    sequences: type | tuple[type, ...] = _SEQUENCES,
) -> bool:
    kinds = set(map(type, values))
    if kinds <= _ATOMS:
        return False
    if id(values) in around or len(around) > DEPTH_MAX:
        what = "contains itself" if id(values) in around else f"is deeper than {DEPTH_MAX} levels"
        raise InvalidInput(f"the value at {_clipped(path)} {what}")
    around = (*around, id(values))
    if any(issubclass(kind, torch.Tensor | Mapping) for kind in kinds):
        return True
    nested = {kind for kind in kinds if issubclass(kind, sequences)}
    inner = values if nested == kinds else [one for one in values if type(one) in nested]
    if set(map(type, chain.from_iterable(inner))) <= _ATOMS:
        return False
    return any(
        _holds_parts(path, value, around, sequences)
        for value in values
        if type(value) not in _ATOMS and isinstance(value, sequences)
    )


def is_whole(value: Any) -> bool:
    """Whether ``value`` is one leaf although it is a mapping, or a sequence that holds one.

    It is large, and :func:`groupio.format.codec.encode_plain` writes it as columns. What it could
    not write, or would have to copy at length (arrays, long texts), is taken apart.
    """
    level = [value]
    seen = {id(value)}
    kept = [level]  # an object that is gone would leave its identity to another
    entries = size = 0
    for _ in range(DEPTH_MAX):
        classes = set(map(type, level))
        keyed = {cls for cls in classes if issubclass(cls, Mapping)}
        indexed = {cls for cls in classes - keyed if issubclass(cls, _SEQUENCES)}
        mappings = _of_classes(level, keyed)
        entries += sum(map(len, mappings))
        if not _are_keys(mappings):
            return False
        if OrderedDict in keyed and any(getattr(one, "_metadata", None) for one in mappings):
            return False
        values = map(dict.values, mappings) if keyed == {dict} else (m.values() for m in mappings)
        inner = list(chain.from_iterable(chain(values, _of_classes(level, indexed))))
        kinds = set(map(type, inner))
        if not all(map(_is_plain_class, kinds)):
            return False
        texts = kinds & _TEXTS
        size += sum(len(one) for one in inner if type(one) in texts) if texts else 0
        if size > WHOLE_BYTES_MAX:
            return False
        below = {kind for kind in kinds if issubclass(kind, (Mapping, *_SEQUENCES))}
        level = _of_classes(inner, below)
        found = dict(zip(map(id, level), level, strict=True))
        if len(found) < len(level) or not seen.isdisjoint(found):
            level = [one for key, one in found.items() if key not in seen]
        kept.append(level)
        seen.update(found)
        if not level:
            return entries >= WHOLE_FROM
    return False


_TEXTS = frozenset((str, bytes))


def _of_classes(values: list[Any], classes: set[type]) -> list[Any]:
    """Those of ``values`` that are of ``classes``, exactly."""
    if not classes:
        return []
    if classes.issuperset(map(type, values)):
        return values
    return [one for one in values if type(one) in classes]


def _is_plain_class(cls: type) -> bool:
    if cls in _ATOMS:
        return True
    if issubclass(cls, torch.Tensor | np.ndarray):
        return False
    is_known = kind_of_class(cls) is not None or known_base(cls) is not None
    return is_known or issubclass(cls, np.generic)


def _are_keys(mappings: Iterable[Mapping[Any, Any]]) -> bool:
    plain = frozenset((str, int, bool, bytes, type(None)))
    kinds = set(map(type, chain.from_iterable(mappings)))
    if kinds <= plain:
        return True
    try:
        for key in chain.from_iterable(mappings):
            if type(key) not in plain:
                _checked_key((), key)
    except InvalidInput:
        return False
    return True


def leaf_of(path: Path, value: Any) -> Leaf:
    """A value that is no tensor as a leaf; InvalidInput, with its path, when it is no plain one."""
    if type(value) in _ATOMS or isinstance(value, np.ndarray | np.generic):
        return Leaf(path, value)
    if container_kind(value) is None and known_base(type(value)) is None:
        raise InvalidInput(
            f"the value at {path_text(path)} of the state dict is a {type_text(value)}, which "
            f"cannot be stored; {_advice(value)}"
        )
    return Leaf(path, value)


def _advice(value: Any) -> str:
    if isinstance(value, torch.nn.Module) or hasattr(value, "state_dict"):
        return "save its state_dict() instead"
    if isinstance(value, bytearray | memoryview):
        return "convert it with bytes(...)"
    if hasattr(value, "getvalue"):
        return "save its getvalue()"
    if isinstance(value, torch.dtype | torch.device | torch.layout):
        return "save str(...) of it"
    if isinstance(value, str | int | float | complex | bytes):
        return "save the plain value of it (of an Enum its .value)"
    if isinstance(value, torch.Generator):
        return "save its get_state()"
    if callable(value):
        return "functions are code: leave it out and build it anew on loading"
    return (
        "save tensors, numpy arrays and plain values (None, bool, int, float, complex, str, bytes, "
        "list, tuple, dict)"
    )


def _checked_key(path: Path, key: Any) -> Any:
    if type(key) in KEY_TYPES and key == key:
        return key
    if type(key) is tuple:
        return tuple(_checked_key(path, part) for part in key)
    raise InvalidInput(
        f"a key of {path_text(path) or 'the state dict'} is {str(key)[:60]!r} of type "
        f"{type_text(key)}; keys are str, int, float, bool, None, bytes or tuples of them"
    )
