"""A nested state dict as named leaves and a structure record, and back.

Names are those that ``torch.distributed.checkpoint`` gives (its FQNs): the keys of nested
mappings and the indexes of traversed lists, joined by dots. Lists are traversed when they hold
mappings or tensors, so ``param_groups.0.lr`` is a leaf and ``betas`` is one too. Where such a name
is no item name or stands for two leaves (``{"a.b": x, "a": {"b": y}}``, ``{1: x, "1": y}``), every
leaf concerned is named by its path instead; the structure record keeps the paths apart and the
types of the keys.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from groupio.errors import FormatError, InvalidInput

RESERVED = "groupio:"
"""Prefix of the item names that the adapter makes; a user's name of this form is escaped."""

STRUCTURE = RESERVED + "structure"
"""The item that holds the structure record of one rank."""

NAME_BYTES_MAX = 4096
DEPTH_MAX = 100
STRUCTURE_VERSION = 1

KEY_TYPES = (str, int, bool, float, bytes, type(None))
PLAIN_TYPES = (type(None), bool, int, float, complex, str, bytes, list, tuple)

_ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes))

_OPEN = {"dict": "{", "odict": "{o", "list": "[", "tuple": "("}
_KINDS = {token: kind for kind, token in _OPEN.items()}
_LEAF = "="


class Step(NamedTuple):
    """One step of a path: a key of a mapping, or an index of a list or tuple."""

    key: Any
    indexed: bool


Path = tuple[Step, ...]


@dataclass(slots=True)
class Leaf:
    """A value of the state dict. ``note`` is what its item table cannot say, usually nothing."""

    path: Path
    value: Any = None
    name: str = ""
    note: str = ""


@dataclass(slots=True)
class Branch:
    """A mapping, list or tuple of the state dict; ``children`` by key or index, in order."""

    path: Path
    kind: str
    children: dict[Any, Branch | Leaf] = field(default_factory=dict)
    value: Any = None

    def leaves(self) -> Iterator[Leaf]:
        """All leaves below, in the order of the state dict."""
        for child in self.children.values():
            if isinstance(child, Leaf):
                yield child
            else:
                yield from child.leaves()


def path_text(path: Path) -> str:
    """The path as it is written in Python: ``['optim']['state'][0]``."""
    return "".join(f"[{part.key!r}]" for part in path)


def flatten(state_dict: Mapping[Any, Any]) -> Branch:
    """The tree of ``state_dict``, its leaves named.

    Raises InvalidInput, naming the path, for keys that are no plain values, values nested deeper
    than 100 levels (or in themselves), and objects that are no tensors or plain values.
    """
    if not isinstance(state_dict, Mapping):
        raise InvalidInput(
            f"the state dict is a {type_text(state_dict)}; give a dict that maps names to values"
        )
    root = _branch((), state_dict)
    name_leaves(list(root.leaves()))
    return root


def name_leaves(leaves: Sequence[Leaf]) -> None:
    """Give every leaf its item name; the rule depends on the set of paths only."""
    joined = [".".join(str(part.key) for part in leaf.path) for leaf in leaves]
    times = Counter(joined)
    escaped: set[str] = set()
    for leaf, name in zip(leaves, joined, strict=True):
        if times[name] > 1 or not _is_item_name(name):
            name = f"{RESERVED}path:{path_text(leaf.path)}"
            if name in escaped:
                raise InvalidInput(
                    f"two values of the state dict have the same path {path_text(leaf.path)[:200]}"
                    "; rename one of the keys"
                )
            if len(name) > NAME_BYTES_MAX:
                raise InvalidInput(
                    f"the name {name[:80]}… in the state dict is {len(name)} bytes long; "
                    f"the limit is {NAME_BYTES_MAX}"
                )
            escaped.add(name)
        leaf.name = name


def encode_structure(root: Branch) -> list[Any]:
    """The structure record of a tree: a flat list of plain values, in pre-order."""
    tokens: list[Any] = [STRUCTURE_VERSION]
    _write(root, tokens)
    return tokens


def decode_structure(tokens: Any) -> Branch:
    """The tree of a structure record, its leaves named but without values.

    Raises FormatError when the record is not one of this version.
    """
    if not isinstance(tokens, list) or not tokens or tokens[0] != STRUCTURE_VERSION:
        version = tokens[0] if isinstance(tokens, list) and tokens else type_text(tokens)
        raise FormatError(
            f"structure record of version {version!r} cannot be read by this release; "
            f"it reads version {STRUCTURE_VERSION}"
        )
    reader = iter(tokens)
    next(reader)
    try:
        root = _read(reader, (), 0)
    except (StopIteration, TypeError, ValueError) as broken:
        raise FormatError("the structure record is malformed") from broken
    if not isinstance(root, Branch) or next(reader, reader) is not reader:
        raise FormatError("the structure record is malformed")
    name_leaves(list(root.leaves()))
    return root


def rebuild(node: Branch | Leaf, value_of: Callable[[Leaf], Any]) -> Any:
    """The nested value of ``node``, with the leaves that ``value_of`` gives."""
    if isinstance(node, Leaf):
        return value_of(node)
    built = {key: rebuild(child, value_of) for key, child in node.children.items()}
    return make_container(node.kind, built)


def make_container(kind: str, built: dict[Any, Any]) -> Any:
    """A dict, OrderedDict, list or tuple of the values of ``built``."""
    if kind == "list":
        return list(built.values())
    if kind == "tuple":
        return tuple(built.values())
    return OrderedDict(built) if kind == "odict" else built


def type_text(value: Any) -> str:
    """The type of ``value`` for a message: ``module.Name``, or the bare name of a builtin."""
    cls = type(value)
    return cls.__name__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def _branch(path: Path, value: Any) -> Branch:
    if len(path) > DEPTH_MAX:
        raise InvalidInput(
            f"the state dict is nested deeper than {DEPTH_MAX} levels, or contains itself, at "
            f"{path_text(path[:8])}…"
        )
    items: Iterator[tuple[Step, Any]]
    if isinstance(value, Mapping):
        kind = "odict" if isinstance(value, OrderedDict) else "dict"
        items = ((Step(_checked_key(path, key), False), child) for key, child in value.items())
    else:
        kind = "list" if type(value) is list else "tuple"
        items = ((Step(index, True), child) for index, child in enumerate(value))
    branch = Branch(path, kind, value=value)
    for part, child in items:
        below = (*path, part)
        node: Branch | Leaf
        if isinstance(child, torch.Tensor):  # first: there are many, and the other checks are slow
            node = Leaf(below, child)
        else:
            node = _branch(below, child) if _is_branch(below, child) else _leaf(below, child)
        branch.children[part.key] = node
    return branch


def _is_branch(path: Path, value: Any) -> bool:
    """Whether ``value`` is taken apart: a mapping, or a list or tuple that holds one or a tensor.

    Tuples of tensors differ from ``torch.distributed.checkpoint``, which pickles them whole.
    """
    if isinstance(value, Mapping):
        return True
    return isinstance(value, list | tuple) and _holds_parts(path, value, 0)


def _holds_parts(path: Path, values: Sequence[Any], depth: int) -> bool:
    if depth > DEPTH_MAX:
        raise InvalidInput(
            f"the value at {path_text(path)} is nested deeper than {DEPTH_MAX} levels, or contains "
            "itself"
        )
    return any(
        isinstance(value, torch.Tensor)
        or (isinstance(value, list | tuple) and _holds_parts(path, value, depth + 1))
        or isinstance(value, Mapping)
        for value in values
        if type(value) not in _ATOMS
    )


def _leaf(path: Path, value: Any) -> Leaf:
    known = isinstance(value, np.ndarray | np.generic)
    if not known and type(value) not in PLAIN_TYPES:
        raise InvalidInput(
            f"the value at {path_text(path)} of the state dict is a {type_text(value)}, which "
            f"cannot be stored; {_advice(value)}"
        )
    return Leaf(path, value)


def _advice(value: Any) -> str:
    if isinstance(value, torch.nn.Module) or hasattr(value, "state_dict"):
        return "save its state_dict() instead"
    if isinstance(value, set | frozenset | range | list | tuple):
        return "convert it to a list, tuple or dict"
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


def _is_item_name(name: str) -> bool:
    if not name or "\0" in name or name.startswith(RESERVED):
        return False
    try:
        return len(name.encode("utf-8")) <= NAME_BYTES_MAX
    except UnicodeEncodeError:  # a lone surrogate, which repr() escapes
        return False


def _write(node: Branch | Leaf, tokens: list[Any]) -> None:
    if isinstance(node, Leaf):
        tokens.append(_LEAF + node.note)
        return
    tokens += (_OPEN[node.kind], len(node.children))
    keyed = node.kind in ("dict", "odict")
    for key, child in node.children.items():
        if keyed:
            tokens.append(key)
        _write(child, tokens)


def _read(tokens: Iterator[Any], path: Path, depth: int) -> Branch | Leaf:
    token = next(tokens)
    if depth > DEPTH_MAX + 1 or type(token) is not str:
        raise ValueError("not a node")
    if token.startswith(_LEAF):
        return Leaf(path, note=token[len(_LEAF) :])
    if token not in _KINDS:
        raise ValueError("not a node")
    branch = Branch(path, _KINDS[token])
    count = next(tokens)
    if type(count) is not int:
        raise ValueError("not a count")
    index = branch.kind in ("list", "tuple")
    for number in range(count):
        key = number if index else next(tokens)
        branch.children[key] = _read(tokens, (*path, Step(key, index)), depth + 1)
    if len(branch.children) != count:
        raise ValueError("a key stands twice")
    return branch
