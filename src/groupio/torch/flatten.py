"""A nested state dict as named leaves; :mod:`groupio.format.structure` has the record of it.

Lists are traversed when they hold mappings or tensors, so ``param_groups.0.lr`` is a leaf and
``betas`` is one too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from groupio.errors import InvalidInput
from groupio.format.structure import DEPTH_MAX, Branch, Leaf, Path, Step, name_leaves, path_text

KEY_TYPES = (str, int, bool, float, bytes, type(None))
PLAIN_TYPES = (type(None), bool, int, float, complex, str, bytes, list, tuple)

_ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes))


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


def type_text(value: Any) -> str:
    """The type of ``value`` for a message: ``module.Name``, or the bare name of a builtin."""
    cls = type(value)
    return cls.__name__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def kind_of(value: Any) -> str:
    """The kind of branch that a mapping, list or tuple is; "" for anything else."""
    if isinstance(value, Mapping):
        return "odict" if isinstance(value, OrderedDict) else "dict"
    if type(value) is list:
        return "list"
    return "tuple" if isinstance(value, list | tuple) else ""


def _branch(path: Path, value: Any) -> Branch:
    if len(path) > DEPTH_MAX:
        raise InvalidInput(
            f"the state dict is nested deeper than {DEPTH_MAX} levels, or contains itself, at "
            f"{path_text(path[:8])}…"
        )
    items: Iterator[tuple[Step, Any]]
    if isinstance(value, Mapping):
        items = ((Step(_checked_key(path, key), False), child) for key, child in value.items())
    else:
        items = ((Step(index, True), child) for index, child in enumerate(value))
    branch = Branch(path, kind_of(value), value=value)
    for part, child in items:
        below = (*path, part)
        node: Branch | Leaf
        if isinstance(child, torch.Tensor):  # first: there are many, and the other checks are slow
            node = Leaf(below, child)
        else:
            node = _branch(below, child) if is_branch(below, child) else leaf_of(below, child)
        branch.children[part.key] = node
    return branch


def is_branch(path: Path, value: Any) -> bool:
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


def leaf_of(path: Path, value: Any) -> Leaf:
    """A value that is no tensor as a leaf; InvalidInput, with its path, when it is no plain one."""
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
